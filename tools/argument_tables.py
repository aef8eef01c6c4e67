"""Writes the tables of arguments in ``docs``, from the dataclasses that state them.

``python tools/argument_tables.py`` writes each table between its two markers, ``<!-- arguments: … -->`` and
``<!-- end -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastgen.arguments import Argument, arguments_of
from fastgen.options import LoadOptions
from fastgen.serving.options import ServeOptions

DOCS = Path(__file__).resolve().parents[1] / "docs"
# The page of each table, and the dataclass that states its arguments.
TABLES = {"load": ("arguments.md", LoadOptions), "serve": ("serving.md", ServeOptions)}


def with_table(page: str, name: str) -> str:
    """Returns the text ``page`` with the table ``name`` as it should be."""
    table = "\n".join(["| flag | default | meaning |", "|---|---|---|", *map(_row, arguments_of(TABLES[name][1]))])
    written, count = re.subn(
        rf"(<!-- arguments: {name} -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{table}\n{found[2]}",
        page,
        flags=re.DOTALL,
    )
    assert count == 1, f"the page has {count} places for the table {name}"
    return written


def _row(argument: Argument) -> str:
    flags = [argument.flag]
    if argument.default is True:
        flags.append(f"--no-{argument.flag[2:]}")
    if argument.option.second_flag is not None:
        flags.append(argument.option.second_flag.name)
    if argument.is_required:
        flags = [argument.name.upper()]
    first = ", ".join(f"`{flag}`" for flag in flags)
    if argument.flag[2:].replace("-", "_") != argument.name or argument.is_required:
        first += f" (`{argument.name}`)"
    option = argument.option
    meaning = " ".join(part for part in (option.help, option.flag_help, option.details) if part)
    return f"| {first} | {argument.default_text} | {meaning} |"


def main() -> None:
    for name, (page, _) in TABLES.items():
        file = DOCS / page
        file.write_text(with_table(file.read_text(), name))


if __name__ == "__main__":
    main()
