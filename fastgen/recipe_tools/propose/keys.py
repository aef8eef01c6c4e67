"""Finds the key of ``config.json`` for a number: by the spellings of its meaning, and always by its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgen.models.registry.nearest import SPELLINGS
from fastgen.models.resolve.config_keys import INERT
from fastgen.recipe_tools.propose.evidence import Evidence


class Keys:
    """The keys of a configuration, looked up by their meaning and by the value that the shape of a tensor implies."""

    def __init__(self, evidence: Evidence):
        self.values: Mapping[str, Any] = evidence.values

    def named(self, meaning: str) -> str | None:
        """Returns the key that is a spelling of ``meaning`` and is not null."""
        spelled = SPELLINGS[meaning]
        found = [key for key in self.values if key.rpartition(".")[2] in spelled and self.values[key] is not None]
        return min(found, key=lambda key: (key.count("."), spelled.index(key.rpartition(".")[2])), default=None)

    def number(self, meaning: str) -> int | None:
        key = self.named(meaning)
        value = self.values[key] if key is not None else None
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def of_value(self, meaning: str, value: int, *like: str) -> str | None:
        """Returns the key whose value is ``value``.

        It is a spelling of ``meaning``, else the key whose name contains most of the parts ``like``, else the only key
        with this value.
        """
        key = self.named(meaning) if meaning in SPELLINGS else None
        if key is not None and self._is(key, value):
            return key
        meant_otherwise = {spelling for other, spelled in SPELLINGS.items() if other != meaning for spelling in spelled}
        others = [
            key
            for key in self.values
            if self._is(key, value) and key not in INERT and key.rpartition(".")[2] not in meant_otherwise
        ]
        alike = sorted(others, key=lambda key: -sum(part in key for part in like))
        if like and alike and any(part in alike[0] for part in like):
            return alike[0]
        return others[0] if len(others) == 1 else None

    def containing(self, *parts: str, kind: type | tuple[type, ...] = (int, float)) -> str | None:
        """Returns the first key whose name contains all of ``parts`` and whose value has that type (not a flag)."""
        for key, value in self.values.items():
            is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            if is_kind and all(part in key.rpartition(".")[2] for part in parts):
                return key
        return None

    def _is(self, key: str, value: int) -> bool:
        found = self.values[key]
        return isinstance(found, int) and not isinstance(found, bool) and found == value
