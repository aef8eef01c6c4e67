"""Finds the recipe for a checkpoint.

The first of these that has a recipe decides:

1. ``recipe=``: a name, a file, or a :class:`Recipe`;
2. the search path (:mod:`fastgen.models.recipe.search_path`): the directories in ``FASTGEN_RECIPES``, those of
   installed packages, and the built-in recipes;
3. ``fastgen.yaml`` inside the checkpoint, if no other recipe is for its architecture, or for ``recipe="checkpoint"``.

Two recipes in one place of the search path that have the same name or are for the same architecture are an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastgen.errors import RecipeError, UnknownArchitectureError
from fastgen.models.checkpoint.kinds import other_model
from fastgen.models.recipe.recipe import Recipe, load_recipe
from fastgen.models.recipe.search_path import ENVIRONMENT_VARIABLE, SearchPlace, find_file_by_name, search_path
from fastgen.models.recipe.spelling import close_to, one_of, quoted, shown
from fastgen.models.registry.nearest import hint, other_tensors, shapes_in, tensors_of_another

CHECKPOINT_FILE: Final = "fastgen.yaml"


@dataclass(frozen=True)
class ListedRecipe:
    """A recipe that can be selected by name, and its origin: ``environment``, ``package`` or ``built-in``."""

    recipe: Recipe
    origin: str


def list_recipes() -> list[ListedRecipe]:
    """Returns every recipe that can be selected by name, in search order; of two with one name only the first."""
    listed: dict[str, ListedRecipe] = {}
    for place in search_path():
        for recipe in _recipes_in(place):
            listed.setdefault(recipe.name, ListedRecipe(recipe, place.origin))
    return list(listed.values())


def find_recipe(
    config: Mapping[str, Any],
    *,
    recipe: str | Path | Recipe | None = None,
    checkpoint_dir: Path | None = None,
) -> Recipe:
    """Returns the recipe for a checkpoint whose ``config.json`` contains ``config``, found in the order above.

    Raises :class:`~fastgen.errors.UnknownArchitectureError` if no recipe is for its architecture, and
    :class:`~fastgen.errors.RecipeError` for a recipe that is wrong or missing, or for two that conflict.
    """
    own = checkpoint_dir / CHECKPOINT_FILE if checkpoint_dir is not None else None
    if isinstance(recipe, Recipe):
        return recipe
    if recipe == "checkpoint":
        if own is None or not own.is_file():
            raise RecipeError(f"the checkpoint contains no recipe: it has no {CHECKPOINT_FILE}", file=str(own or ""))
        return load_recipe(own)
    if recipe is not None:
        return named_recipe(recipe)
    architectures = _architectures(config, required=own is None or not own.is_file())
    known: list[Recipe] = []
    for place in search_path():
        recipes = _recipes_in(place)
        claims = _unique(
            recipes, lambda each: each.architectures, "the architecture", "remove one, or choose with recipe="
        )
        for architecture in architectures:
            if architecture in claims:
                return claims[architecture]
        known += recipes
    if own is not None and own.is_file():
        return _checkpoints_own(own, architectures)
    claimed = f"no recipe is for {' or '.join(map(quoted, architectures))}"
    if (found := other_model(config)) is not None:
        raise UnknownArchitectureError(f"{claimed}: {found}")
    shapes = shapes_in(checkpoint_dir)
    if other := other_tensors(config, shapes):
        raise UnknownArchitectureError(f"{claimed}. {other}. `fastgen recipe list` lists all known recipes")
    near = close_to(architectures[0], {name for each in known for name in each.architectures}, ending="ForCausalLM")
    advice = hint(config, checkpoint_dir, shapes, known) or (
        f"Write one (docs/recipes.md) and pass it with recipe=, or put it into a directory of {ENVIRONMENT_VARIABLE}."
    )
    raise UnknownArchitectureError(f"{claimed}{near or '.'} {advice} `fastgen recipe list` lists all known recipes")


def mismatch_note(found: Recipe, config: Mapping[str, Any], checkpoint_dir: Path) -> str:
    """Returns text to add to an error of the recipe ``found``, if the tensors are those of another architecture."""
    return tensors_of_another(config, checkpoint_dir, found, [each.recipe for each in list_recipes()])


def named_recipe(recipe: str | Path) -> Recipe:
    """Returns the recipe of that name or in that file; text with a separator or that ends in ``.yaml`` is a path."""
    text = str(recipe)
    if isinstance(recipe, Path) or text.endswith((".yaml", ".yml")) or "/" in text or os.sep in text:
        return load_recipe(recipe)
    file = find_file_by_name(text, frozenset())
    if file is None:
        names = [listed.recipe.name for listed in list_recipes()]
        raise RecipeError(f"no recipe is called {text!r}{one_of(text, names)}")
    return load_recipe(file)


def _checkpoints_own(file: Path, architectures: list[str]) -> Recipe:
    recipe = load_recipe(file)
    if architectures and not set(architectures) & set(recipe.architectures):
        raise recipe.tree.error(
            ("architectures",),
            f"the checkpoint is {' or '.join(architectures)}, which its own recipe does not list; "
            f'pass recipe="checkpoint" to use it anyway',
        )
    return recipe


def _architectures(config: Mapping[str, Any], *, required: bool) -> list[str]:
    stated = config.get("architectures")
    if not stated and not required:
        return []
    if not isinstance(stated, list) or not stated or not all(isinstance(name, str) for name in stated):
        raise UnknownArchitectureError(
            f"config.json names no architecture: `architectures` is {shown(stated)}; pass recipe= to select a recipe"
        )
    return stated


def _recipes_in(place: SearchPlace) -> list[Recipe]:
    """Loads all recipes of a place. Raises :class:`RecipeError` where one is wrong or two share a name."""
    recipes = [load_recipe(file) for file in place.files()]
    _unique(recipes, lambda recipe: (recipe.name,), "the name", "remove or rename one")
    return recipes


def _unique(
    recipes: Iterable[Recipe], keys: Callable[[Recipe], Iterable[str]], what: str, advice: str
) -> dict[str, Recipe]:
    """Returns the recipes by key. Raises :class:`RecipeError` if two have the same key."""
    found: dict[str, Recipe] = {}
    for recipe in recipes:
        for key in keys(recipe):
            if found.setdefault(key, recipe) is not recipe:
                raise RecipeError(f"two recipes have {what} {key!r}: {found[key].file} and {recipe.file}; {advice}")
    return found
