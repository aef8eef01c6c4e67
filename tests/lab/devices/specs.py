"""Specs of published models, by the names of their configurations."""

from __future__ import annotations

from functools import cache

from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import ModelSpec
from tests.models import test_recipe_published, test_recipe_published_families

PUBLISHED = {**test_recipe_published.PUBLISHED, **test_recipe_published_families.PUBLISHED}


@cache
def published_spec(name: str) -> ModelSpec:
    config, _ = PUBLISHED[name]
    return resolve(find_recipe(config), config)
