"""The shipped recipes without one of them, each written without ``extends``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fastgen.models.recipe.recipe import Recipe, load_recipe
from fastgen.models.registry.registry import list_recipes


def all_but(hidden: str, directory: Path) -> list[Recipe]:
    """Writes every shipped recipe except ``hidden`` into ``directory``, without ``extends``."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for recipe in (each.recipe for each in list_recipes() if each.recipe.name != hidden):
        file = directory / f"{recipe.name}.yaml"
        file.write_text(yaml.safe_dump(_lists(recipe.tree.plain()), sort_keys=False, width=110))
        files.append(file)
    return [load_recipe(file) for file in files]


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(child) for key, child in value.items()}
    return [_lists(child) for child in value] if isinstance(value, tuple) else value
