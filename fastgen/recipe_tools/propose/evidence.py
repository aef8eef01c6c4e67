"""Gathers facts from the headers of a checkpoint: its modules, with equal ones of all layers and experts merged.

Nothing here guesses the role of a module.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Shape = tuple[int, ...]

_INDEXED: Final = re.compile(r"^(?P<before>(?:.*?\.)??)(?P<index>\d{1,6})\.(?P<after>.+)$")
_CONFIG_DEPTH: Final = 3


@dataclass(frozen=True)
class Module:
    """The tensors of a module by the last part of their names.

    ``name`` is relative to the layer or expert; outside the layers it is the full name.
    """

    name: str
    shapes: Mapping[str, Shape]
    layers: frozenset[int] = frozenset()

    @property
    def weight(self) -> Shape:
        """The weight's shape; ``()`` if there is no weight."""
        return self.shapes.get("weight", ())

    @property
    def has_bias(self) -> bool:
        return "bias" in self.shapes

    @property
    def is_plain(self) -> bool:
        """True if it has a weight, perhaps a bias, and nothing else."""
        return "weight" in self.shapes and self.shapes.keys() <= {"weight", "bias"}


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, all equal. ``at`` is their prefix, relative to the layer, with {expert} in it."""

    at: str
    count: int
    modules: tuple[Module, ...]
    layers: frozenset[int]


@dataclass(frozen=True)
class Evidence:
    """A checkpoint's structure. ``odd`` are tensors that not all layers or experts have in the same shape."""

    config: Mapping[str, Any]
    # All keys of the configuration with their values, dotted for keys inside mappings.
    values: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    top: tuple[Module, ...]
    layers_at: str
    num_layers: int
    layer: tuple[Module, ...]
    experts: tuple[Experts, ...]
    odd: tuple[str, ...]


def gather(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Evidence:
    """Returns the structure of a checkpoint whose tensors have ``shapes``; ``layers_at`` is empty without layers."""
    prefix, num_layers = _layers_at(shapes)
    outside: dict[str, Shape] = {}
    inside: dict[str, dict[int, Shape]] = defaultdict(dict)
    for name, shape in shapes.items():
        index, _, rest = name.removeprefix(prefix).partition(".")
        if num_layers and name.startswith(prefix) and rest and _is_index(index, num_layers):
            inside[rest][int(index)] = shape
        else:
            outside[name] = shape
    alike: dict[str, tuple[Shape, frozenset[int]]] = {}
    odd: list[str] = []
    for rest, by_layer in inside.items():
        shape = Counter(by_layer.values()).most_common(1)[0][0]
        alike[rest] = shape, frozenset(index for index, other in by_layer.items() if other == shape)
        odd += [f"{prefix}{index}.{rest}" for index, other in by_layer.items() if other != shape]
    experts, others, odd_ones = _experts(alike)
    odd += [f"{prefix}{index}.{rest}" for rest in odd_ones for index in sorted(alike[rest][1])]
    return Evidence(
        config=config,
        values=dict(_flat(config)),
        shapes=shapes,
        top=tuple(_modules({name: (shape, frozenset()) for name, shape in outside.items()})),
        layers_at=f"{prefix}{{layer}}" if num_layers else "",
        num_layers=num_layers,
        layer=tuple(_modules(others)),
        experts=tuple(experts),
        odd=tuple(odd),
    )


def _is_index(text: str, count: int) -> bool:
    return text.isdecimal() and text.isascii() and str(int(text[:8])) == text and int(text) < count


def _layers_at(shapes: Mapping[str, Shape]) -> tuple[str, int]:
    """Returns the prefix of the indexed layers, and their number: the prefix with most tensors, then the first."""
    indices: dict[str, set[int]] = defaultdict(set)
    tensors: Counter[str] = Counter()
    for name in shapes:
        if found := _INDEXED.match(name):
            indices[found["before"]].add(int(found["index"]))
            tensors[found["before"]] += 1
    for before, _ in sorted(tensors.items(), key=lambda each: (-each[1], each[0])):
        count = max(indices[before]) + 1
        if indices[before] == set(range(count)):
            return before, count
    return "", 0


def _experts(
    alike: Mapping[str, tuple[Shape, frozenset[int]]],
) -> tuple[list[Experts], dict[str, tuple[Shape, frozenset[int]]], list[str]]:
    """Returns the experts, the tensors outside experts, and the names of tensors that not all experts have equally."""
    below: dict[str, dict[str, dict[int, tuple[Shape, frozenset[int]]]]] = defaultdict(lambda: defaultdict(dict))
    for rest, entry in alike.items():
        if found := _INDEXED.match(rest):
            below[found["before"]][found["after"]][int(found["index"])] = entry
    experts, others, odd = [], dict(alike), []
    for before, names in below.items():
        count = max(len(by_index) for by_index in names.values())
        whole = {
            after: next(iter(by_index.values()))
            for after, by_index in names.items()
            if set(by_index) == set(range(count)) and len(set(by_index.values())) == 1
        }
        if count < 2 or not whole:  # parts of one module, not copies of one module
            continue
        modules = tuple(_modules(whole))
        experts.append(Experts(f"{before}{{expert}}", count, modules, modules[0].layers))
        for after, by_index in names.items():
            for index in by_index:
                del others[f"{before}{index}.{after}"]
            odd += [f"{before}{index}.{after}" for index in by_index if after not in whole]
    return experts, others, odd


def _modules(tensors: Mapping[str, tuple[Shape, frozenset[int]]]) -> Iterator[Module]:
    """Groups tensors by module and by the layers that have them."""
    found: dict[tuple[str, frozenset[int]], dict[str, Shape]] = defaultdict(dict)
    for name, (shape, layers) in tensors.items():
        module, _, last = name.rpartition(".")
        found[module, layers][last] = shape
    for (module, layers), shapes in found.items():
        yield Module(module, shapes, layers)


def _flat(config: Mapping[str, Any], at: str = "", depth: int = _CONFIG_DEPTH) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            continue  # no expression can name this key
        yield f"{at}{key}", value
        if isinstance(value, Mapping) and depth > 1:
            yield from _flat(value, f"{at}{key}.", depth - 1)
