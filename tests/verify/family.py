"""A large family of configurations of an architecture, with which a surviving mutant is compared.

It has configurations drawn with other seeds than verify's: as drawn, with all keys that the reference's class fills in,
with more layers, and with wider heads. Then each of them with one key that the recipe mentions or ignores removed, made
null or changed, and with several such changes.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import transformers

from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.errors import FastgenError
from fastgen.models.recipe.expression_grammar import Path
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.resolve.resolve import mentioned_paths, resolve
from fastgen.models.spec import ModelSpec
from fastgen.verify.cases import draws_of
from fastgen.verify.configs import SPELLINGS
from fastgen.verify.edits import nodes

SEEDS = range(100, 105)
NUM_DRAWN = 8
NUM_MIXED = 200
# Number of drawn configurations that each change is made in, and of those with more layers or wider heads.
NUM_BASES = 2
# Most parameters of a model; larger ones cost time and show nothing more.
MAX_TENSORS = 1000
DEPTHS = (6, 31)
# Numbers of layers, and factors on the width.
WIDTHS = (4, 16)
_OTHERS: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (0, 1, 2, 3, 4, 5, 8, 12, 16, 24, 48, 64, 96, 128, 192, 2048, 5000),
    float: (0.0, 0.5, 1.0, 1e-5, 0.05, 3.0),
    list: ([], [0], [1], [0, 1], [1, 1, 0], [0] * 31, [1, 0] * 16),
}
# Values of a key that the class does not know, or leaves empty.
_UNKNOWN = (True, False, 0, 1, 2, 0.5, 16, 64, 128, 5000, [1], [0, 1, 1])


DEPTH_KEYS, WIDTH_KEYS = (*SPELLINGS["num_layers"],), (*SPELLINGS["hidden_size"], *SPELLINGS["head_dim"], "n_embed")


class Family:
    """A fixed set of configurations; ``specs`` are the models that the recipe makes of the drawn ones."""

    def __init__(self, recipe: Recipe, model_class: Any = None):
        known = [getattr(transformers, name, None) for name in recipe.architectures]
        self.model_class = model_class or next(each for each in known if each is not None)
        self.recipe = recipe
        defaults = self.model_class.config_class().to_dict()
        self._defaults = defaults
        mentioned = {path[0] for path in mentioned_paths(recipe)}
        draws = [draws_of(self.model_class, mentioned, seed=seed) for seed in SEEDS]
        drawn = [each.config(index) for each in draws for index in range(NUM_DRAWN)]
        self.drawn = [{"architectures": list(recipe.architectures), **config} for config in drawn]
        self.specs = [spec for config in self.drawn if (spec := resolved(recipe, config)) is not None]

    def configs(self) -> list[dict[str, Any]]:
        """Returns all configurations."""
        recipe = self.recipe
        whole = [_filled_in(self.model_class, config) for config in self.drawn[::3]]
        configs = [*self.drawn, *(each for each in whole if each is not None)]
        deep = [_scaled(config, DEPTH_KEYS, 0, depth) for config in self.drawn[::6] for depth in DEPTHS]
        wide = [_scaled(config, WIDTH_KEYS, width, 0) for config in self.drawn[1::6] for width in WIDTHS]
        described = [config for config in configs if _is_described(recipe, config)]
        scaled = [config for config in (*deep, *wide) if _is_described(recipe, config)]
        generator = random.Random(recipe.name)
        changes = list(_changes(recipe, self._defaults))
        varied = [
            _changed(base, [change])
            for change in changes
            for base in (*generator.sample(described, NUM_BASES), generator.choice(scaled))
        ]
        mixed = [
            _changed(generator.choice((*described, *scaled)), generator.sample(changes, number % 4 + 2))
            for number in range(NUM_MIXED)
        ]
        found = [*configs, *scaled, *varied, *mixed]
        return [config for config in found if _is_small(recipe, config)]


def resolved(recipe: Recipe, config: dict[str, Any]) -> ModelSpec | None:
    """Returns the model, or ``None`` if the recipe refuses the configuration."""
    try:
        return resolve(recipe, config)
    except FastgenError:
        return None


def _is_described(recipe: Recipe, config: dict[str, Any]) -> bool:
    return resolved(recipe, config) is not None and _is_small(recipe, config)


def _is_small(recipe: Recipe, config: dict[str, Any]) -> bool:
    """Returns whether the model, if there is one, is small."""
    spec = resolved(recipe, config)
    return spec is None or sum(1 for _ in spec.tensors()) <= MAX_TENSORS


def _filled_in(model_class: Any, config: dict[str, Any]) -> dict[str, Any] | None:
    try:
        content = json.loads(model_class.config_class.from_dict(config).to_json_string(use_diff=False))
        return {**content, "architectures": config["architectures"]}
    except Exception:  # the reference refuses some combinations, each in its own way
        return None


# Location, whether the key is present, and its value.
_Change = tuple[Path, bool, Any]


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
            others = _OTHERS.get(type(value), (*_UNKNOWN, *sorted(texts)) if value is None else ())
        yield from ((path, True, other) for other in others if other != value)


def _scaled(config: dict[str, Any], keys: tuple[str, ...], factor: int, value: int) -> dict[str, Any]:
    """Returns ``config`` with the numbers at ``keys`` multiplied by ``factor``, plus ``value``."""
    numbers = {key: config[key] for key in keys if isinstance(config.get(key), int)}
    return {**config, **{key: number * factor + value for key, number in numbers.items()}}


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
