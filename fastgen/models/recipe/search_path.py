"""The search path of recipes: the directories that hold recipes under a name.

They are searched in this order, and the first place that has the recipe decides:

1. the directories in ``FASTGEN_RECIPES``;
2. the directories of installed packages: entry points of the group ``fastgen.recipes``, each a path or a function that
   returns one;
3. the built-in recipes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

from fastgen.errors import RecipeError
from fastgen.models.recipe.tree import stated_name
from fastgen.models.recipe.yaml_reader import read_recipe_yaml

ENVIRONMENT_VARIABLE: Final = "FASTGEN_RECIPES"
ENTRY_POINT_GROUP: Final = "fastgen.recipes"

_PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class SearchPlace:
    """One place of the search path: its directories, and its ``origin``: environment, package or built-in."""

    origin: str
    directories: tuple[Path, ...]

    def files(self) -> list[Path]:
        return [file for directory in self.directories for file in sorted(directory.glob("*.yaml"))]


def search_path() -> list[SearchPlace]:
    """Returns the places that hold recipes, in the order in which they are searched."""
    named = [Path(part) for part in os.environ.get(ENVIRONMENT_VARIABLE, "").split(os.pathsep) if part]
    for directory in named:
        if not directory.is_dir():
            problem = (
                f"is a file; {ENVIRONMENT_VARIABLE} takes directories"
                if directory.exists()
                else f"{ENVIRONMENT_VARIABLE} names a directory that is not there"
            )
            raise RecipeError(problem, file=str(directory))
    return [
        SearchPlace("environment", tuple(dict.fromkeys(named))),
        SearchPlace("package", tuple(_entry_point_directories())),
        SearchPlace("built-in", (_built_in_directory(),)),
    ]


def _entry_point_directories() -> Iterator[Path]:
    for point in _entry_points():
        try:
            target = point.load()
            directory = Path(target() if callable(target) else target)
        except Exception as error:  # the code of another package may raise any error
            raise RecipeError(f"entry point {point.name!r} of {ENTRY_POINT_GROUP} fails: {error!r}") from error
        if not directory.is_dir():
            raise RecipeError(f"entry point {point.name!r} of {ENTRY_POINT_GROUP} names no directory: {directory}")
        yield directory


def _entry_points() -> tuple[EntryPoint, ...]:
    """Returns those of installed packages, in the order of their names."""
    return _entry_points_in(tuple((path, _changed_ns(path)) for path in map(os.path.abspath, sys.path)))


@lru_cache(1)  # it opens a file of each installed package, and installing one changes a directory
def _entry_points_in(paths: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name))


def _changed_ns(path: str) -> int:
    """Returns when something was last added to a directory of the import path or removed; 0 if it is not there."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _built_in_directory() -> Path:
    """Returns the directory inside the installed package; in a checkout of the repository, the one beside it."""
    inside = _PACKAGE / "recipes"
    return inside if inside.is_dir() else _PACKAGE.parent / "recipes"


def find_file_by_name(name: str, exclude: frozenset[Path]) -> Path | None:
    """Returns the file of the recipe called ``name``, from the first place that has it and without ``exclude``.

    It reads only names, so it can be called while a recipe is being loaded.
    """
    for place in search_path():
        found = [file for file in place.files() if file.resolve() not in exclude and _name_in(file) == name]
        if len(found) > 1:
            raise RecipeError(f"two recipes have the name {name!r}: {found[0]} and {found[1]}; remove or rename one")
        if found:
            return found[0]
    return None


def _name_in(file: Path) -> str | None:
    return stated_name(read_recipe_yaml(file), "name")
