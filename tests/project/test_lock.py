"""tools/constraints.txt pins what the development environment consists of."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from fastgen.version import DISTRIBUTION
from tools import lock

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def of_project(extras: set[str]) -> list[str]:
    """Returns what fastgen requires, with these extras."""
    groups = PROJECT["project"]["optional-dependencies"]
    return [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in groups[extra])]


def required() -> set[str]:
    """Returns the names of all packages that ``pip install .[dev]`` installs here, with those that build fastgen."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(line) for line in (f"{DISTRIBUTION}[dev]", *PROJECT["build-system"]["requires"])]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                lines = of_project({extra} - {""}) if name == DISTRIBUTION else requires(name) or []
            except PackageNotFoundError:
                continue
            each = [Requirement(line) for line in lines]
            waiting += [part for part in each if part.marker is None or part.marker.evaluate({"extra": extra})]
    # The ordinary build of torch brings its CUDA libraries, and names their versions itself.
    return {name for name, _ in found if not name.startswith(("cuda-", "nvidia-"))} - {DISTRIBUTION}


def test_everything_that_set_up_installs_is_pinned() -> None:
    names = required()
    assert {"torch", "numpy", "hatchling", "ruff", "mypy", "sympy"} <= names
    assert names - lock.locked(lock.CONSTRAINTS.read_text()).keys() == set()


def test_every_pin_is_one_version_that_pyproject_allows() -> None:
    pins = lock.locked(lock.CONSTRAINTS.read_text())
    lines = [*of_project({"dev", "serve", "grammar", "ray"}), *PROJECT["build-system"]["requires"]]
    for each in map(Requirement, lines):
        if each.name != DISTRIBUTION:
            assert Version(pins[canonicalize_name(each.name)]) in each.specifier, each
    # "+cpu" would keep machines with a GPU from their build.
    assert [version for version in pins.values() if not re.fullmatch(r"[0-9][0-9a-z.]*", version)] == []


def test_the_file_is_as_make_lock_writes_it() -> None:
    text = lock.CONSTRAINTS.read_text()
    assert lock.render(lock.locked(text)) == text
    assert list(lock.locked(text)) == sorted(lock.locked(text))


def test_the_lock_has_what_is_installed_without_fastgen_and_builds() -> None:
    found = lock.installed()
    assert found["torch"][0].isdigit()
    assert "+" not in found["torch"]
    assert not {DISTRIBUTION, "pip"} & found.keys()


def test_other_versions_than_the_locked_ones_are_named() -> None:
    old, new = {"one": "1.0", "two": "2.0", "gone": "1"}, {"one": "1.1", "two": "2.0", "three": "3"}
    assert lock.differences(old, new) == ["one 1.0 -> 1.1", "three new -> 3"]


@pytest.mark.parametrize("line", ["numpy>=2", "numpy"])
def test_a_line_that_pins_nothing_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="dictionary update sequence"):
        lock.locked(f"# a comment\n{line}\n")
