"""Reads ``rope_parameters`` and ``rope_scaling`` of ``config.json`` strictly into a :class:`RotaryScaling`.

The two are one mapping under two names; its kind is ``rope_type``, formerly ``type``. The keys of each kind, and the
choice of the trained length, follow transformers 5. YaRN's attention factor is equation 22 of Peng et al. 2023
(arXiv:2309.00071), or DeepSeek's form of it if both ``mscale`` and ``mscale_all_dim`` are given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from fastgen.errors import FastgenError
from fastgen.models.recipe.spelling import close_to, shown
from fastgen.models.spec import RotaryScaling

_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_OF_EVERY_KIND: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


class RopeConfigError(FastgenError, ValueError):
    """The mapping is malformed, or of a kind that fastgen cannot compute."""


def rotary_scaling(mapping: Any, *, trained_positions: int | None, fraction: float = 1.0) -> RotaryScaling | None:
    """Returns the scaling that ``mapping`` describes; ``None`` if it describes none.

    ``trained_positions`` is the length in the model's configuration outside the mapping. It is the trained length of
    ``dynamic``, and of ``llama3`` and ``yarn`` if the mapping states none. ``fraction`` is the part of each head that
    the model rotates; a mapping that states another fraction is refused. Raises :class:`RopeConfigError`.
    """
    if not mapping and (mapping is None or isinstance(mapping, Mapping)):
        return None
    if not isinstance(mapping, Mapping):
        raise RopeConfigError(f"rotary scaling must be a mapping or null, not {shown(mapping)}")
    return _RopeConfig(mapping, trained_positions, fraction).scaling()


class _RopeConfig:
    def __init__(self, mapping: Mapping[str, Any], trained_positions: int | None, fraction: float):
        self.mapping = mapping
        self.fraction = fraction
        self.trained_positions = trained_positions

    def scaling(self) -> RotaryScaling | None:
        kind = self.kind()
        known = {*_OF_EVERY_KIND, *_KEYS[kind]}
        for key in self.mapping:
            if key not in known:
                raise RopeConfigError(
                    f"rotary scaling of kind {kind!r} has no key {shown(key)}{close_to(key, known)}; if it changes "
                    f"nothing, allow it by its dotted name with allow_config_keys="
                )
        stated = self.number("partial_rotary_factor", self.fraction)
        if stated != self.fraction:
            raise RopeConfigError(
                f"partial_rotary_factor is {stated:g}, but the recipe rotates {self.fraction:g} of each head"
            )
        match kind:
            case "linear":
                return RotaryScaling("linear", self.factor(), self.original_length())
            case "dynamic":
                return self.dynamic()
            case "llama3":
                return self.llama3()
            case "yarn":
                return self.yarn()
        return None

    def kind(self) -> str:
        kind, old = self.mapping.get("rope_type"), self.mapping.get("type")
        if kind is not None and old is not None and kind != old:
            raise RopeConfigError(f"rotary scaling says both rope_type {shown(kind)} and type {shown(old)}")
        kind = next((name for name in (kind, old) if name is not None), "default")
        if not isinstance(kind, str) or kind not in _KEYS:
            raise RopeConfigError(
                f"rotary scaling of kind {shown(kind)} is not supported; the supported kinds are {', '.join(_KEYS)}"
            )
        return kind

    def dynamic(self) -> RotaryScaling:
        if self.trained_positions is None:
            raise RopeConfigError("dynamic rotary scaling needs the trained length, but the model states none")
        stated = self.integer("original_max_position_embeddings", self.trained_positions)
        if stated != self.trained_positions:
            raise RopeConfigError(
                f"dynamic rotary scaling starts at max_position_embeddings ({self.trained_positions}), but "
                f"original_max_position_embeddings is {stated}"
            )
        return RotaryScaling("dynamic", self.factor(), self.trained_positions)

    def llama3(self) -> RotaryScaling:
        low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
        if not 0 < low < high:
            raise RopeConfigError(f"low_freq_factor ({low:g}) must be above 0 and below high_freq_factor ({high:g})")
        return RotaryScaling(
            "llama3", self.factor(), self.original_length(), low_freq_factor=low, high_freq_factor=high
        )

    def yarn(self) -> RotaryScaling:
        original = self.original_length()
        # A factor of null means the ratio of the lengths: the length that the model states is then the stretched one.
        ratio = self.trained_positions / original if self.trained_positions and "factor" in self.mapping else None
        factor = self.factor(default=ratio)
        fast, slow = self.number("beta_fast", 32.0) or 32.0, self.number("beta_slow", 1.0) or 1.0
        if not 0 < slow <= fast:
            raise RopeConfigError(f"beta_slow ({slow:g}) must be above 0 and at most beta_fast ({fast:g})")
        truncate = self.mapping.get("truncate", True)
        if not isinstance(truncate, bool):
            raise RopeConfigError(f"truncate must be true or false, not {shown(truncate)}")
        return RotaryScaling(
            "yarn",
            factor,
            original,
            attention_factor=self.attention_factor(factor),
            beta_fast=fast,
            beta_slow=slow,
            truncate=truncate,
        )

    def attention_factor(self, factor: float) -> float:
        if self.mapping.get("attention_factor") is not None:
            stated = self.number("attention_factor")
            if stated <= 0:
                raise RopeConfigError(f"attention_factor must be above 0, not {stated:g}")
            return stated

        def mscale(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        weight, weight_all = self.number("mscale", 0.0), self.number("mscale_all_dim", 0.0)
        if min(weight, weight_all) < 0:
            raise RopeConfigError("mscale and mscale_all_dim must not be negative")
        return mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)

    def factor(self, default: float | None = None) -> float:
        factor = self.number("factor", default)
        if factor < 1:
            raise RopeConfigError(f"factor must be at least 1, not {factor:g}")
        return factor

    def original_length(self) -> int:
        return self.integer("original_max_position_embeddings", self.trained_positions)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns the finite number at ``key``; ``default`` if it is absent or null."""
        value = self.mapping.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise RopeConfigError(f"rotary scaling lacks {key!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise RopeConfigError(f"{key} must be a number, not {shown(value)}")
        return float(value)

    def integer(self, key: str, default: int | None) -> int:
        value = self.mapping.get(key, default)
        if value is None:
            raise RopeConfigError(f"rotary scaling lacks {key!r}, and the model states no length")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**53:
            raise RopeConfigError(f"{key} must be a positive integer, not {shown(value)}")
        return value
