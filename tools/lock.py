"""Writes tools/constraints.txt from the packages of the environment that runs it: ``make lock``.

``python -m tools.lock --newer`` prints instead which packages have another version than the file says.
"""

from __future__ import annotations

import argparse
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from fastgen.version import DISTRIBUTION

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
_HEADER = """\
# The version of every package that tools/setup.sh installs, so that the development environment is the same everywhere.
# `make lock` writes this file. pyproject.toml says what users need, which is less strict.
"""
# fastgen is what the environment is for, and pip comes with Python.
_NOT_LOCKED = {DISTRIBUTION, "pip"}


def installed() -> dict[str, str]:
    """Returns the version of each package of this environment by its name, without the build, such as ``+cpu``."""
    found = {canonicalize_name(each.name): Version(each.version).public for each in distributions()}
    return {name: found[name] for name in sorted(found) if name not in _NOT_LOCKED}


def locked(text: str) -> dict[str, str]:
    """Returns the version of each package that the text of a constraints file names."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def render(versions: dict[str, str]) -> str:
    return _HEADER + "".join(f"{name}=={version}\n" for name, version in versions.items())


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Returns a text for each package of ``new`` that ``old`` has in another version, or lacks."""
    return [f"{name} {old.get(name, 'new')} -> {new[name]}" for name in new if old.get(name) != new[name]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--newer", action="store_true", help="print what differs from the file, and write nothing")
    options = parser.parse_args()
    found = differences(locked(CONSTRAINTS.read_text()), installed())
    print(", ".join(found))
    if not options.newer:
        CONSTRAINTS.write_text(render(installed()))


if __name__ == "__main__":
    main()
