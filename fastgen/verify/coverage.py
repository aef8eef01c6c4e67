"""Selects the configurations to use among those that can be drawn: those that show combinations not seen before.

A mistake often shows only in a combination of several keys, such as an activation left to its default in a layer whose
parts are not parallel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from fastgen.models.resolve.config_keys import INERT
from fastgen.verify.configs import Draws, is_sparse

# A key and its value.
Fact = tuple[str, str]

# The index of a configuration, and the number of its attempt.
Place = tuple[int, int]

_NUM_ATTEMPTS: Final = 16
_FEW: Final = 8
_MEANS: Final = " means"
# Weight of a new combination of three flags, since flags choose the parts of a layer.
_FLAGS_COUNT: Final = 20.0


class Series:
    """Attempts at ``num_configs`` configurations: ``configs[index][attempt]``, of which one per index is used."""

    def __init__(self, draws: Draws, num_configs: int):
        self.draws = draws
        self.configs = [
            [draws.config(index, attempt) for attempt in range(_NUM_ATTEMPTS)] for index in range(num_configs)
        ]
        self._orders: dict[tuple[int, tuple[Place, ...]], list[int]] = {}

    def order(self, index: int, taken: tuple[Place, ...]) -> list[int]:
        """Returns the order in which to try the attempts at one configuration, after those at ``taken``.

        The attempt that shows most new combinations is first. Sparse files are tried in their own order.
        """
        if is_sparse(index):
            return list(range(_NUM_ATTEMPTS))
        if (index, taken) not in self._orders:
            defaults = {key: value for key, value in self.draws.defaults.items() if key not in INERT}
            coverage = Coverage([config for each in self.configs for config in each], defaults)
            for number, attempt in taken:
                coverage.add(self.configs[number][attempt])
            gains = [coverage.gain(config) for config in self.configs[index]]
            self._orders[index, taken] = sorted(range(_NUM_ATTEMPTS), key=lambda attempt: -gains[attempt])
        return self._orders[index, taken]


class Coverage:
    """The combinations of three values that configurations have shown so far.

    A combination counts less the more values its keys have; combinations of flags always count fully.

    ``candidates`` are the configurations that may be drawn. ``defaults`` are the keys to look at and their values if
    absent: a flag shows its value, stated or not, and also whether it is stated.
    """

    def __init__(self, candidates: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]):
        self.defaults = dict(sorted(defaults.items()))
        values: dict[str, set[str]] = defaultdict(set)
        for config in candidates:
            for key, value in self._facts(config):
                values[key].add(value)
        self._weights = {key: 1 / len(found) for key, found in values.items() if len(found) > 1}
        self._seen: set[tuple[Fact, ...]] = set()

    def gain(self, config: Mapping[str, Any]) -> float:
        """Returns the total weight of the combinations in ``config`` that are new."""
        return sum(self._count(triple) for triple in self._triples(config) if triple not in self._seen)

    def add(self, config: Mapping[str, Any]) -> None:
        self._seen.update(self._triples(config))

    def _count(self, triple: tuple[Fact, Fact, Fact]) -> float:
        if all(key.endswith(_MEANS) for key, _ in triple):
            return _FLAGS_COUNT
        (a, _), (b, _), (c, _) = triple
        return self._weights[a] * self._weights[b] * self._weights[c]

    def _triples(self, config: Mapping[str, Any]) -> Iterator[tuple[Fact, Fact, Fact]]:
        return combinations((fact for fact in self._facts(config) if fact[0] in self._weights), 3)

    def _facts(self, config: Mapping[str, Any]) -> Iterator[Fact]:
        for key, default in self.defaults.items():
            value = config.get(key, "absent")
            if isinstance(default, bool):
                yield key + _MEANS, str(config.get(key, default))
            if isinstance(value, Mapping):
                yield "rope_type", str(value.get("rope_type"))
            plain = isinstance(value, bool | str) or value is None
            small = isinstance(value, int | float) and value < _FEW
            yield key, str(value) if plain or small else "stated"
