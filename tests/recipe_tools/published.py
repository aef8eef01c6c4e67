"""A published configuration for each shipped recipe, with fewer experts if it has hundreds."""

from __future__ import annotations

from typing import Any, Final

from fastgen.models.registry.registry import find_recipe
from tests.models import test_recipe_published, test_recipe_published_families

_ALL: Final = {**test_recipe_published.PUBLISHED, **test_recipe_published_families.PUBLISHED}


def _smaller(config: dict[str, Any]) -> dict[str, Any]:
    counts = {key: 16 for key in ("num_experts", "n_routed_experts") if key in config}
    return config | counts | ({"num_hidden_layers": 8} if counts else {})


# By the recipe's name: that name again, and the content of a ``config.json``.
CONFIGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    name: (name, _smaller(config)) for config, _ in reversed(_ALL.values()) for name in [find_recipe(config).name]
}
