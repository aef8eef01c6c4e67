"""The results of the hunt as a page of the docs, written and read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.verify.mutations import Mutant

PAGE = Path(__file__).parents[2] / "docs" / "verify-mutations.md"

_HEAD = """# The mutation hunt

Written by `python -m tests.verify.hunt`; [verify.md](verify.md#how-much-it-catches) says how
the mistakes are made, and defines the words.

| recipe | mistakes | change nothing | beyond a reference | rejected | at the right node | set |
|---|---:|---:|---:|---:|---:|---|
"""


@dataclass(frozen=True)
class Row:
    """The figures of one recipe. ``digest`` identifies the set of mutants."""

    recipe: str
    num_mutants: int
    num_equivalent: int
    num_apart: int
    num_rejected: int
    num_right: int
    digest: str

    @property
    def num_judged(self) -> int:
        return self.num_mutants - self.num_equivalent - self.num_apart

    def __str__(self) -> str:
        return (
            f"| {self.recipe} | {self.num_mutants} | {self.num_equivalent} | {self.num_apart} "
            f"| {self.num_rejected} of {self.num_judged}, {_percent(self.num_rejected, self.num_judged)} "
            f"| {self.num_right}, {_percent(self.num_right, self.num_rejected)} | {self.digest} |"
        )


def digest(mutants: Iterable[Mutant]) -> str:
    """Returns a short identifier of a set of mutants."""
    text = "\n".join(sorted(mutant.what for mutant in mutants))
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def row(recipe: str, verdicts: Sequence[Mapping[str, Any]], mutants: Sequence[Mutant]) -> Row:
    count = [each["verdict"] for each in verdicts].count
    right = count("right")
    rejected = right + count("misnamed")
    return Row(recipe, len(verdicts), count("equivalent"), count("apart"), rejected, right, digest(mutants))


def total(rows: Sequence[Row]) -> Row:
    sums = [
        sum(getattr(each, name) for each in rows)
        for name in ("num_mutants", "num_equivalent", "num_apart", "num_rejected", "num_right")
    ]
    return Row("**all**", *sums, digest="")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def write(rows: Sequence[Row], verdicts: Mapping[str, Sequence[Mapping[str, Any]]], page: Path = PAGE) -> None:
    lines = [*map(str, rows), str(total(rows))]
    for title, verdict, reason in (
        ("Missed", "missed", "why"),
        ("At another node", "misnamed", "named"),
        ("Beyond a reference", "apart", "why"),
        ("Changing nothing", "equivalent", "why"),
    ):
        lines += ["", f"## {title}", ""]
        found = [
            f"- {name}: `{each['what']}`: {each[reason] or 'no node'}"
            for name, judged in verdicts.items()
            for each in judged
            if each["verdict"] == verdict
        ]
        lines += found or ["None."]
    page.write_text(_HEAD + "\n".join(lines) + "\n")


_ROW = re.compile(
    r"\| (?P<recipe>\w+) \| (?P<mutants>\d+) \| (?P<equivalent>\d+) \| (?P<apart>\d+) "
    r"\| (?P<rejected>\d+) of \d+, [^|]+ \| (?P<right>\d+), [^|]+ \| (?P<digest>\w+) \|"
)


def read(page: Path = PAGE) -> dict[str, Row]:
    """Returns the rows of the page, by recipe."""
    counts = ("mutants", "equivalent", "apart", "rejected", "right")
    return {
        match["recipe"]: Row(match["recipe"], *(int(match[name]) for name in counts), digest=match["digest"])
        for match in _ROW.finditer(page.read_text())
    }
