"""Where recipes are, and which one a checkpoint gets.

Looked through in this order, the first place that answers decides:

1. ``recipe=``: a name, a file, or a :class:`Recipe`;
2. the directories in ``FASTGEN_RECIPES``;
3. directories of installed packages: entry points of the group ``fastgen.recipes``, a path or a function giving one;
4. the built-in recipes;
5. ``fastgen.yaml`` inside the checkpoint, if nobody else knows its architecture, or for ``recipe="checkpoint"``.

Within one place, two recipes for one architecture, or of one name, are an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from fastgen.errors import RecipeError, UnknownArchitectureError
from fastgen.models.recipe.recipe import Recipe, load_recipe, read_text, stated_name
from fastgen.models.recipe.spelling import close_to, one_of, quoted, shown
from fastgen.models.recipe.yaml_positions import parse_recipe_yaml
from fastgen.models.registry.nearest import hint, suspicion

ENVIRONMENT_VARIABLE: Final = "FASTGEN_RECIPES"
ENTRY_POINT_GROUP: Final = "fastgen.recipes"
CHECKPOINT_FILE: Final = "fastgen.yaml"


@dataclass(frozen=True)
class Place:
    """One place of the lookup order: what it is, and the directories it consists of."""

    origin: str
    directories: tuple[Path, ...]

    def files(self) -> list[Path]:
        return [file for directory in self.directories for file in sorted(directory.glob("*.yaml"))]

    def recipes(self) -> list[Recipe]:
        """All recipes here. Raises :class:`RecipeError` where one is wrong or two share a name."""
        recipes = [load_recipe(file) for file in self.files()]
        _unique(recipes, lambda recipe: (recipe.name,), "the name", "remove or rename one")
        return recipes


@dataclass(frozen=True)
class ListedRecipe:
    """A recipe that can be asked for by name, and where it is from: ``environment``, ``package`` or ``built-in``."""

    recipe: Recipe
    origin: str


def places() -> list[Place]:
    """The places that hold recipes for everybody, in the order they are looked through."""
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
        Place("environment", tuple(dict.fromkeys(named))),
        Place("package", tuple(_entry_point_directories())),
        Place("built-in", (_built_in_directory(),)),
    ]


def _entry_point_directories() -> Iterator[Path]:
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        try:
            target = point.load()
            directory = Path(target() if callable(target) else target)
        except Exception as error:  # whatever the other package's code does
            raise RecipeError(f"entry point {point.name!r} of {ENTRY_POINT_GROUP} fails: {error!r}") from error
        if not directory.is_dir():
            raise RecipeError(f"entry point {point.name!r} of {ENTRY_POINT_GROUP} names no directory: {directory}")
        yield directory


def _built_in_directory() -> Path:
    """Inside the installed package; beside it in a checkout of the repository."""
    package = Path(__file__).parents[2]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def list_recipes() -> list[ListedRecipe]:
    """Every recipe that can be asked for by name, best first; a name found in two places is listed from the first."""
    listed: dict[str, ListedRecipe] = {}
    for place in places():
        for recipe in place.recipes():
            listed.setdefault(recipe.name, ListedRecipe(recipe, place.origin))
    return list(listed.values())


def find_recipe(
    config: Mapping[str, Any],
    *,
    recipe: str | Path | Recipe | None = None,
    checkpoint_dir: Path | None = None,
) -> Recipe:
    """The recipe for a checkpoint whose ``config.json`` holds ``config``, found in the order above.

    Raises :class:`~fastgen.errors.UnknownArchitectureError` where nobody knows its architecture, and
    :class:`~fastgen.errors.RecipeError` for a recipe that is wrong or missing, or two that contradict each other.
    """
    own = checkpoint_dir / CHECKPOINT_FILE if checkpoint_dir is not None else None
    if isinstance(recipe, Recipe):
        return recipe
    if recipe == "checkpoint":
        if own is None or not own.is_file():
            raise RecipeError(f"the checkpoint brings no recipe: it has no {CHECKPOINT_FILE}", file=str(own or ""))
        return load_recipe(own)
    if recipe is not None:
        return named_recipe(recipe)
    architectures = _architectures(config, required=own is None or not own.is_file())
    known: list[Recipe] = []
    for place in places():
        recipes = place.recipes()
        claims = _unique(
            recipes, lambda each: each.architectures, "the architecture", "remove one, or choose with recipe="
        )
        for architecture in architectures:
            if architecture in claims:
                return claims[architecture]
        known += recipes
    if own is not None and own.is_file():
        return _checkpoints_own(own, architectures)
    near = close_to(architectures[0], {name for each in known for name in each.architectures}, ending="ForCausalLM")
    advice = hint(config, checkpoint_dir, known) or (
        f"Write one (docs/recipes.md) and pass it with recipe=, or put it into a directory of {ENVIRONMENT_VARIABLE}."
    )
    raise UnknownArchitectureError(
        f"no recipe is for {' or '.join(map(quoted, architectures))}{near or '.'} {advice} `fastgen recipe list` names "
        f"all that are known"
    )


def doubt(found: Recipe, config: Mapping[str, Any], checkpoint_dir: Path) -> str:
    """What to add to an error of the recipe that was ``found`` by the architecture, where the tensors are another's."""
    return suspicion(config, checkpoint_dir, found, [each.recipe for each in list_recipes()])


def named_recipe(recipe: str | Path) -> Recipe:
    """The recipe of that name, or in that file: what ends in ``.yaml`` or contains a separator is a path."""
    text = str(recipe)
    if isinstance(recipe, Path) or text.endswith((".yaml", ".yml")) or "/" in text or os.sep in text:
        return load_recipe(recipe)
    file = find_file_by_name(text, frozenset())
    if file is None:
        names = [listed.recipe.name for listed in list_recipes()]
        raise RecipeError(f"no recipe is called {text!r}{one_of(text, names)}")
    return load_recipe(file)


def find_file_by_name(name: str, exclude: frozenset[Path]) -> Path | None:
    """The file of the recipe called ``name``, from the first place that has it; ``exclude`` are left aside.

    Reads only names, so it can serve a recipe that is being loaded.
    """
    for place in places():
        found = [file for file in place.files() if file.resolve() not in exclude and _name_in(file) == name]
        if len(found) > 1:
            raise RecipeError(f"two recipes have the name {name!r}: {found[0]} and {found[1]}; remove or rename one")
        if found:
            return found[0]
    return None


def _name_in(file: Path) -> str | None:
    return stated_name(parse_recipe_yaml(read_text(file), str(file)), "name")


def _checkpoints_own(file: Path, architectures: list[str]) -> Recipe:
    recipe = load_recipe(file)
    if architectures and not set(architectures) & set(recipe.architectures):
        raise recipe.tree.error(
            ("architectures",),
            f"the checkpoint is {' or '.join(architectures)}, which its own recipe does not name; "
            f'pass recipe="checkpoint" to use it all the same',
        )
    return recipe


def _architectures(config: Mapping[str, Any], *, required: bool) -> list[str]:
    stated = config.get("architectures")
    if not stated and not required:
        return []
    if not isinstance(stated, list) or not stated or not all(isinstance(name, str) for name in stated):
        raise UnknownArchitectureError(
            f"config.json names no architecture: `architectures` is {shown(stated)}; pass recipe= to say which it is"
        )
    return stated


def _unique(
    recipes: Iterable[Recipe], keys: Callable[[Recipe], Iterable[str]], what: str, advice: str
) -> dict[str, Recipe]:
    """Recipes by key. Raises :class:`RecipeError` where two have one."""
    found: dict[str, Recipe] = {}
    for recipe in recipes:
        for key in keys(recipe):
            if found.setdefault(key, recipe) is not recipe:
                raise RecipeError(f"two recipes have {what} {key!r}: {found[key].file} and {recipe.file}; {advice}")
    return found
