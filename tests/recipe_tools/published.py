"""A published configuration for each shipped recipe, with fewer experts if it has hundreds."""

from __future__ import annotations

from typing import Any, Final

from fastgen.models.registry.registry import list_recipes
from tests.models import test_recipe_published, test_recipe_published_families

_ALL: Final = {**test_recipe_published.PUBLISHED, **test_recipe_published_families.PUBLISHED}


# By architecture, the name of its recipe. `find_recipe` would validate all recipes again for each configuration.
_NAMES: Final = {each: listed.recipe.name for listed in list_recipes() for each in listed.recipe.architectures}


def recipe_name(config: dict[str, Any]) -> str:
    """Returns the name of the shipped recipe for a configuration."""
    return _NAMES[config["architectures"][0]]


def _smaller(config: dict[str, Any]) -> dict[str, Any]:
    counts = {key: 16 for key in ("num_experts", "n_routed_experts") if key in config}
    return config | counts | ({"num_hidden_layers": 8} if counts else {})


# By the recipe's name: that name again, and the content of a ``config.json``.
CONFIGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    name: (name, _smaller(config)) for config, _ in reversed(_ALL.values()) for name in [recipe_name(config)]
}
