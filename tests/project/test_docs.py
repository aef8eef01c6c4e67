"""The documentation is true: its Python runs, its commands exist, its links and file names lead somewhere."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastgen.cli import app
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.models.recipe.recipe import load_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.runtime.requests.sampling_params import SamplingParams
from tests.pages import ROOT, anchor, blocks

PAGES = [
    *(ROOT / each for each in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "training/README.md")),
    *sorted((ROOT / "benchmarks").rglob("README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def printed_by(code: str) -> str:
    """Runs ``code`` as a module of its own in this process, where most of what it imports is loaded; returns what it
    prints. The README's code runs in a fresh process.
    """
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "a page", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def test_the_python_of_the_readme_runs() -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 40


@pytest.mark.slow
def test_the_python_of_the_scheduling_page_runs() -> None:
    printed = [printed_by(code) for code in blocks(ROOT / "docs" / "scheduling.md", "python")]
    batches, without, bounded = printed[0], *printed[1].splitlines()
    assert len(json.loads(batches)) == 6
    longest_ms = [int(re.findall(r"longest gap (\d+) ms", line)[0]) for line in (without, bounded)]
    assert longest_ms[0] > 90 > 33 > longest_ms[1]


def test_the_python_of_the_sampling_page_runs() -> None:
    (code,) = blocks(ROOT / "docs" / "sampling.md", "python")
    assert printed_by(code).split()[1] == "stop"


def test_the_sampling_page_has_a_row_for_each_field() -> None:
    table = re.search(r"\| field \| range, default \|.*?\n\n", (ROOT / "docs" / "sampling.md").read_text(), re.DOTALL)
    assert table is not None
    named = [name for row in table[0].strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(field.name for field in fields(SamplingParams))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert [target for target in targets if "://" not in target and not leads_somewhere(page, target)] == []


def leads_somewhere(page: Path, target: str) -> bool:
    """Returns whether a link of ``page`` names a file that exists and, after a ``#``, one of its headings."""
    name, _, heading = target.partition("#")
    file = page.parent / name if name else page
    return file.exists() and (not heading or heading in anchors(file))


@cache
def anchors(file: Path) -> set[str]:
    """Returns the names by which links call the headings of a page."""
    return set(map(anchor, re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)))


def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks(ROOT / "README.md", "console") for line in block.splitlines()]
    checkpoint = next(iter(BUILTINS.values()))
    stand_ins = {"path/to/config.json": checkpoint / "config.json", "path/to/checkpoint": checkpoint}
    commands = [line.removeprefix("$ ") for line in lines]
    for shown, real in stand_ins.items():
        assert any(shown in command for command in commands)
        commands = [command.replace(shown, shlex.quote(str(real))) for command in commands]
    for command in commands:
        typed, _, rest = command.rpartition("|")
        program, *arguments = shlex.split(rest, comments=True)
        if program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
            continue
        assert program == "fastgen"
        done = CliRunner().invoke(app, arguments, input=" ".join(shlex.split(typed)[1:]))
        assert done.exit_code == 0, f"{command}: {done.output}"


def test_the_account_of_slow_requests_is_given_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "why.md"
    code, (shown,) = "\n".join(blocks(page, "python")), blocks(page, "text")
    monkeypatch.chdir(tmp_path)
    printed = printed_by(code)
    # Times differ, and with them the order of shares; what each line is about does not.
    prefixes = [re.split(r"[:,]", line)[0] for line in (shown.splitlines(), printed.splitlines()[:-1]) for line in line]
    subjects = [re.sub(r"[\d.,]+( µs| ms| s)?", "N", subject) for subject in prefixes]
    half = len(subjects) // 2
    assert subjects[:half] == subjects[half:]
    for command in [line.removeprefix("$ ") for block in blocks(page, "console") for line in block.splitlines()]:
        program, *arguments = shlex.split(command)
        assert program == "fastgen"
        ran = CliRunner().invoke(app, arguments)
        assert ran.exit_code == 0, f"{command}: {ran.output}"
    assert (tmp_path / "flight.png").exists()


def test_the_recipe_of_the_readme_loads(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "mistral.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "mistral.yaml")
    spec = resolve(recipe, json.loads((BUILTINS["tiny-mistral"] / "config.json").read_text()))
    assert {attention.sliding_window for attention in spec.attentions()} != {None}


def folders_on_the_map() -> list[str]:
    (tree,) = re.findall(r"^```\n(fastgen/.*?)^```", (ROOT / "docs" / "architecture.md").read_text(), re.M | re.S)
    found: list[str] = []
    above: list[str] = []
    for indent, name in re.findall(r"^( *)([\w<>]+)/ ", tree, re.MULTILINE):
        above[len(indent) // 2 :] = [name]
        found.append("/".join(above))
    return found


def test_the_map_has_one_line_for_each_folder() -> None:
    """One line stands for all ops. Folders without modules, such as templates, need no line."""
    named = folders_on_the_map()
    assert len(named) == len(set(named))
    packages = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "fastgen").rglob("*.py")}
    ops = {each for each in packages if each.startswith("fastgen/compile/ops/")}
    assert packages - ops - set(named) == set(), "not on the map"
    assert {each for each in named if "<op>" not in each and not (ROOT / each).is_dir()} == set(), "only on the map"
    assert len(ops) > 10


@pytest.mark.parametrize(
    "page", [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"], ids=lambda page: page.stem
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """A name is a path below the repository, the package, or the folder of the page's other examples."""
    places = (
        ROOT,
        ROOT / "fastgen",
        ROOT / "fastgen/compile",
        ROOT / "fastgen/runtime/scheduling",
        ROOT / "tests/runtime",
    )
    named = set(re.findall(r"`([\w/-]+\.(?:py|yaml|md|j2|toml))`", page.read_text())) - {
        "fastgen.yaml",
        "recipes/NAME.yaml",
    }
    assert named
    assert {each for each in named if not any((place / each).exists() for place in places)} == set()
