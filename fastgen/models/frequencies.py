"""Rotary frequencies, plain and stretched beyond the trained length.

They are computed in fp32, with the operations in the order that the checkpoints were trained and published with: at
position 100,000, one unit in the last place of a frequency already rotates a head by a measurable angle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastgen.models.spec import RotaryScaling, RotarySpec


def inverse_frequencies(rotary: RotarySpec) -> Tensor:
    """Returns the radians per position of each rotated pair: ``[dim/2]`` fp32, on the CPU.

    The plain frequencies are ``theta ** (-2i/dim)`` (Su et al., 2021); a scaling changes them according to its kind.
    ``dynamic`` (NTK-aware, growing with the length) equals plain up to the trained length, and longer sequences are not
    served.
    """
    wavelengths = rotary.theta ** (torch.arange(0, rotary.dim, 2, dtype=torch.float32) / rotary.dim)
    plain = 1.0 / wavelengths
    scaling = rotary.scaling
    match scaling.kind if scaling else None:
        case None | "dynamic":
            return plain
        case "linear":
            assert scaling
            return plain / scaling.factor
        case "llama3":
            assert scaling
            return _llama3(plain, scaling)
        case "yarn":
            assert scaling
            return _yarn(wavelengths, rotary, scaling)


def _llama3(plain: Tensor, scaling: RotaryScaling) -> Tensor:
    """Scales as Llama 3.1: divides slow frequencies by ``factor``, keeps fast ones, blends those between linearly."""
    turns = scaling.original_max_positions / (2 * math.pi / plain)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(wavelengths: Tensor, rotary: RotarySpec, scaling: RotaryScaling) -> Tensor:
    """Scales as YaRN (Peng et al., 2023), depending on how often a pair turns within the trained length.

    Pairs that turn more than ``beta_fast`` times are kept, those that turn less than ``beta_slow`` times are divided by
    ``factor``, and between them the blend is linear in the pair's index.
    """

    def pair_turning(num_turns: float) -> float:
        length = scaling.original_max_positions / (num_turns * 2 * math.pi)
        return rotary.dim * math.log(length) / (2 * math.log(rotary.theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    width = high - low if high != low else 0.001
    keep = 1 - ((torch.arange(rotary.dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return (1 - keep) * (1.0 / (scaling.factor * wavelengths)) + keep * (1.0 / wavelengths)
