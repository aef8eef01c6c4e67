"""A large family of configurations of an architecture: what a survivor of the hunt is held against.

Drawn configurations by other seeds than verify's own, as drawn and with all that the reference's class fills in; then
each with one key that the recipe mentions taken away, made null or given another value, and with several such changes.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import transformers

from fastgen.compile.ops.activation import ACTIVATIONS
from fastgen.errors import FastgenError
from fastgen.models.expression_grammar import Path
from fastgen.models.recipe import Recipe
from fastgen.models.resolve import mentioned_paths, resolve
from fastgen.models.spec import ModelSpec
from fastgen.verify.configs import Draws
from fastgen.verify.edits import nodes
from fastgen.verify.keys import read_spellings

SEEDS = range(100, 104)
NUM_DRAWN = 8
NUM_MIXED = 100
_OTHERS: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (0, 1, 2, 3, 4, 5, 8, 12, 16, 24, 64, 96),
    float: (0.0, 0.5, 1.0, 1e-5, 0.05, 3.0),
    list: ([], [0], [1], [0, 1], [1, 1, 0]),
}


class Family:
    """The same configurations at every time; ``specs`` are the models that the recipe makes of those drawn."""

    def __init__(self, recipe: Recipe, model_class: Any = None):
        known = [getattr(transformers, name, None) for name in recipe.architectures]
        self.model_class = model_class or next(each for each in known if each is not None)
        self.recipe = recipe
        defaults = self.model_class.config_class().to_dict()
        self._defaults = defaults
        mentioned = {path[0] for path in mentioned_paths(recipe)}
        spellings = read_spellings(self.model_class.config_class, mentioned - defaults.keys())
        draws = [Draws(defaults, mentioned, seed=seed, spellings=spellings) for seed in SEEDS]
        drawn = [each.config(index) for each in draws for index in range(NUM_DRAWN)]
        self.drawn = [{"architectures": list(recipe.architectures), **config} for config in drawn]
        self.specs = [spec for config in self.drawn if (spec := resolved(recipe, config)) is not None]

    def configs(self) -> list[dict[str, Any]]:
        """All of them."""
        recipe = self.recipe
        whole = [_filled_in(self.model_class, config) for config in self.drawn[::3]]
        configs = [*self.drawn, *(each for each in whole if each is not None)]
        described = [config for config in configs if resolved(recipe, config) is not None]
        generator = random.Random(recipe.name)
        changes = list(_changes(recipe, self._defaults))
        varied = [_changed(base, [change]) for change in changes for base in generator.sample(described, 2)]
        mixed = [_changed(generator.choice(described), generator.sample(changes, 3)) for _ in range(NUM_MIXED)]
        return [*configs, *varied, *mixed]


def resolved(recipe: Recipe, config: dict[str, Any]) -> ModelSpec | None:
    """The model, or ``None`` where the recipe refuses the configuration."""
    try:
        return resolve(recipe, config)
    except FastgenError:
        return None


def _filled_in(model_class: Any, config: dict[str, Any]) -> dict[str, Any] | None:
    try:
        content = json.loads(model_class.config_class.from_dict(config).to_json_string(use_diff=False))
        return {**content, "architectures": config["architectures"]}
    except Exception:  # the reference refuses some combinations, each in its own way
        return None


_Change = tuple[Path, bool, Any]
"""Where, whether the key is there then, and with which value."""


def _changes(recipe: Recipe, defaults: Mapping[str, Any]) -> Iterator[_Change]:
    mentioned = mentioned_paths(recipe) | {(key,) for key in recipe.schema.ignores.config}
    texts = {text for _, tree in nodes(recipe.tree) if isinstance(tree.value, str) for text in _quoted(tree.value)}
    for path in sorted(mentioned):
        yield path, False, None
        yield path, True, None
        value: Any = defaults
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            others: tuple[Any, ...] = (*sorted(texts), *ACTIVATIONS)
        else:
            others = _OTHERS.get(type(value), (True, False, 2, 0.5, *sorted(texts)) if value is None else ())
        yield from ((path, True, other) for other in others if other != value)


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _changed(config: dict[str, Any], changes: list[_Change]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for path, present, value in changes:
        inner: Any = config
        for key in path[:-1]:
            if present and not isinstance(inner.get(key), dict):
                inner[key] = {}
            inner = inner.get(key)
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict):
            continue
        if present:
            inner[path[-1]] = value
        else:
            inner.pop(path[-1], None)
    return config
