"""Loads a recipe from its file, merged over the recipes that it extends, into the typed schema.

Every mistake in a recipe is a :class:`~fastgen.errors.RecipeError` that names file, line and node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fastgen.models.recipe.schema import RecipeSchema
from fastgen.models.recipe.search_path import find_file_by_name
from fastgen.models.recipe.spelling import shown
from fastgen.models.recipe.tree import NodePath, Tree, merge, stated_name
from fastgen.models.recipe.values import MAX_NAME, NAME, PATTERNS
from fastgen.models.recipe.yaml_reader import parse_recipe_yaml, read_recipe_yaml, read_text

MAX_EXTENDS: Final = 8

# Returns the file of the recipe with a name, other than these files; ``None`` if there is none.
FindByName = Callable[[str, frozenset[Path]], Path | None]


@dataclass(frozen=True, eq=False)
class Recipe:
    """A loaded recipe: ``schema`` holds its typed content, ``tree`` the same with positions, ``text`` its own file."""

    schema: RecipeSchema
    tree: Tree
    file: Path
    text: str
    extends: str | None

    @property
    def name(self) -> str:
        return self.schema.name

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.schema.architectures

    def __repr__(self) -> str:
        return f"Recipe({self.name!r}, {str(self.file)!r})"


def load_recipe(path: str | Path, *, find: FindByName = find_file_by_name) -> Recipe:
    """Loads the recipe in the file ``path``.

    The recipe that it ``extends`` is looked up beside it, as ``<name>.yaml``, and then by ``find``, which by default
    looks through the search path. Raises :class:`~fastgen.errors.RecipeError`.
    """
    file = Path(path)
    text = read_text(file)
    own = parse_recipe_yaml(text, str(file))
    tree = _with_inherited(own, file, find, {})
    return Recipe(_validated(tree), tree, file, text, stated_name(own, "extends"))


def _with_inherited(tree: Tree, file: Path, find: FindByName, chain: Mapping[Path, str]) -> Tree:
    """Returns ``tree`` merged over all that it extends. ``chain`` maps the files that led here to their recipes."""
    parent_name = stated_name(tree, "extends")
    if parent_name is None:
        return tree
    name = stated_name(tree, "name")
    if name is None:
        raise tree.error((), "a variant needs a `name` of its own")
    chain = {**chain, file.resolve(): name}
    if len(chain) > MAX_EXTENDS:
        raise tree.error(("extends",), f"extends more than {MAX_EXTENDS} recipes in a row")
    sibling = _sibling(file, parent_name)
    parent = sibling if sibling and sibling.resolve() not in chain else find(parent_name, frozenset(chain))
    if parent is None and parent_name in chain.values():
        raise tree.error(("extends",), f"a recipe cannot extend itself: {' -> '.join([*chain.values(), parent_name])}")
    if parent is None:
        raise tree.error(("extends",), f"no recipe is called {shown(parent_name)}")
    inherited = _with_inherited(read_recipe_yaml(parent), parent, find, chain)
    return _extended(inherited, tree)


@lru_cache(maxsize=256)  # reading a file gives the same tree again, and each search for a recipe reads all of them
def _extended(inherited: Tree, tree: Tree) -> Tree:
    return merge(inherited, tree.without("extends"))


def _sibling(file: Path, name: str) -> Path | None:
    """Returns the file called ``name`` beside ``file``, if it contains a recipe of that name."""
    if len(name) > MAX_NAME or not re.fullmatch(NAME, name):
        return None
    candidate = file.with_name(f"{name}.yaml")
    if not candidate.is_file():
        return None
    return candidate if stated_name(read_recipe_yaml(candidate), "name") == name else None


@lru_cache(maxsize=256)
def _validated(tree: Tree) -> RecipeSchema:
    try:
        return RecipeSchema.model_validate(tree.plain())
    except ValidationError as error:
        path, message = _located(error.errors(include_url=False)[0])
        raise tree.error(path, message) from None


def _located(error: ErrorDetails) -> tuple[NodePath, str]:
    """Returns the node that a pydantic error is about, and what is wrong with it."""
    path: NodePath = tuple(str(part) for part in error["loc"] if part != "[key]")
    match error["type"]:
        case "unknown_key":
            return (*path, str(error["ctx"]["key"])), error["msg"]
        case "missing":
            return path[:-1], f"the key {path[-1]!r} is missing"
        case "value_error":
            return path, str(error["ctx"]["error"])
        case "model_type" | "dict_type":
            return path, f"must be a mapping, not {_kind(error['input'])}"
        case "tuple_type":
            return path, f"must be a list, not {_kind(error['input'])}"
        case "string_type":
            return path, f"must be a text, not {_kind(error['input'])}"
        case "bool_type":
            return path, f"must be true or false, not {_kind(error['input'])}"
        case "literal_error":
            return path, f"must be {error['ctx']['expected']}, not {_kind(error['input'])}"
        case "too_short":
            return path, "is empty; name at least one"
        case "too_long":
            return path, f"has {len(error['input']):,} entries, at most {error['ctx']['max_length']}"
        case "string_too_long":
            length, most = len(error["input"]), error["ctx"]["max_length"]
            return path, f"is too long: {length:,} characters, at most {most}"
        case "string_pattern_mismatch":
            return path, f"{shown(error['input'])} is not {PATTERNS[error['ctx']['pattern']]}"
    return path, error["msg"]


def _kind(value: object) -> str:
    """Returns the value as text; a list or a mapping is only named as such."""
    return "a list" if isinstance(value, tuple) else "a mapping" if isinstance(value, dict) else shown(value)
