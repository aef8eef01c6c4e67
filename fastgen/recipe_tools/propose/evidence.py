"""What a checkpoint's headers say: modules with their tensors, the same ones of all layers and experts as one.

Facts only: nothing here guesses what a module is for.
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
    """A module's tensors by the last part of their names. ``name`` is below the layer (or expert), or from the top."""

    name: str
    shapes: Mapping[str, Shape]
    layers: frozenset[int] = frozenset()

    @property
    def weight(self) -> Shape:
        """The weight's shape, ``()`` where there is none."""
        return self.shapes.get("weight", ())

    @property
    def has_bias(self) -> bool:
        return "bias" in self.shapes

    @property
    def is_plain(self) -> bool:
        """Whether it holds a weight, perhaps a bias, and nothing else."""
        return "weight" in self.shapes and self.shapes.keys() <= {"weight", "bias"}


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, all alike: ``at`` is their prefix, below the layer, with {expert} in it."""

    at: str
    count: int
    modules: tuple[Module, ...]
    layers: frozenset[int]


@dataclass(frozen=True)
class Evidence:
    """A checkpoint's structure. ``odd`` are tensors that do not stand in all layers, or experts, in one shape."""

    config: Mapping[str, Any]
    # All that the configuration says, keys inside mappings dotted.
    values: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    top: tuple[Module, ...]
    layers_at: str
    num_layers: int
    layer: tuple[Module, ...]
    experts: tuple[Experts, ...]
    odd: tuple[str, ...]


def gather(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Evidence:
    """The structure of a checkpoint whose tensors have ``shapes``; ``layers_at`` is empty where nothing repeats."""
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
    """The prefix below which indices count the layers, and how many: the one with most tensors, then the first."""
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
    """Experts, what is no expert's, and the names that stand below an expert's prefix but not in all of them alike."""
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
        if count < 2 or not whole:  # parts of something, not copies of one thing
            continue
        modules = tuple(_modules(whole))
        experts.append(Experts(f"{before}{{expert}}", count, modules, modules[0].layers))
        for after, by_index in names.items():
            for index in by_index:
                del others[f"{before}{index}.{after}"]
            odd += [f"{before}{index}.{after}" for index in by_index if after not in whole]
    return experts, others, odd


def _modules(tensors: Mapping[str, tuple[Shape, frozenset[int]]]) -> Iterator[Module]:
    """Tensors by module; those of one module that stand in different layers apart."""
    found: dict[tuple[str, frozenset[int]], dict[str, Shape]] = defaultdict(dict)
    for name, (shape, layers) in tensors.items():
        module, _, last = name.rpartition(".")
        found[module, layers][last] = shape
    for (module, layers), shapes in found.items():
        yield Module(module, shapes, layers)


def _flat(config: Mapping[str, Any], at: str = "", depth: int = _CONFIG_DEPTH) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            continue  # no expression can name it
        yield f"{at}{key}", value
        if isinstance(value, Mapping) and depth > 1:
            yield from _flat(value, f"{at}{key}.", depth - 1)
