"""Weight formats and quantization: codes and scales of weights and activations.

All formats are symmetric: a value is its code times a scale. Sums of products of codes are integers, computed without
rounding; the scales are applied afterwards, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WeightOnlyFormat = Literal["int8_weight_only", "int4_weight_only", "fp8_weight_only"]
# The values of ``quantize=``; without ``_weight_only`` activations are quantized as well.
QuantizedFormat = Literal["int8", "int4"] | WeightOnlyFormat
_WEIGHT_ONLY: tuple[QuantizedFormat, ...] = ("int8_weight_only", "int4_weight_only", "fp8_weight_only")
# The formats that each target supports.
QUANTIZED: dict[str, tuple[QuantizedFormat, ...]] = {
    "cpp": ("int8", "int8_weight_only", "int4"),
    "triton": _WEIGHT_ONLY,
    "torch": _WEIGHT_ONLY,
}

# Formats whose inputs are quantized too, with a scale for each row.
QUANTIZED_BY_ROWS: tuple[QuantizedFormat, ...] = ("int8",)
# Formats with a scale for each output.
SCALED_BY_OUTPUT: tuple[QuantizedFormat, ...] = ("int8", "int8_weight_only", "fp8_weight_only")
# Formats with a scale in fp16 for each group.
SCALED_BY_GROUP: tuple[QuantizedFormat, ...] = ("int4", "int4_weight_only")
# Neighbouring values of a row that share a scale, in formats with several scales a row.
GROUP = 32
_SMALLEST = 1e-30  # rows of smaller values are quantized to zero; 127 divided by them would overflow


@dataclass(frozen=True)
class Quantized:
    """``codes [rows, K]`` int8 and ``scale [rows, K / group]`` fp32: a value is its code times its group's scale."""

    codes: Tensor
    scale: Tensor


def largest_of(weight: Tensor) -> Tensor:
    """Returns the largest magnitude of each row of ``weight [out, in]``, in fp32: ``[out]``."""
    return torch.maximum(weight.amax(1), -weight.amin(1)).float()


def quantize_channels(weight: Tensor, largest: Tensor | None = None) -> Quantized:
    """Quantizes ``weight [out, in]`` to 8 bits with one scale for each output; codes are −127 to 127.

    Where ``weight`` is a part of the inputs, ``largest [out]`` are the results of :func:`largest_of` for all inputs.
    """
    wide = weight.float()
    scale = (largest_of(weight) if largest is None else largest).unsqueeze(1) / 127
    return Quantized(torch.round(wide / scale.clamp(min=_SMALLEST)).to(torch.int8), scale)


def group_scales(furthest: Tensor) -> Tensor:
    """Returns the scales of groups whose values furthest from zero are these, in fp16; infinite where fp16 has no such
    scale, from a magnitude of 524,160 on."""
    return (furthest.float() / -8).half()


def quantize_groups(weight: Tensor) -> Quantized:
    """Quantizes ``weight [out, in]`` to 4 bits with one scale, rounded to fp16, for each 32 of a row; codes −8 to 7.

    ``in`` is padded with zeros to a multiple of 32. The value furthest from zero gets code −8, whatever its sign (so
    the scale may be negative), since there are more codes below zero than above.
    """
    wide = _pad(weight.float()).reshape(len(weight), -1, GROUP)
    furthest = wide.gather(2, wide.abs().argmax(2, keepdim=True))
    scale = group_scales(furthest).float()
    codes = torch.round(wide / torch.where(scale == 0, 1.0, scale)).clamp(-8, 7)
    return Quantized(torch.where(scale == 0, 0.0, codes).to(torch.int8).flatten(1), scale.squeeze(2))


def quantize_activations(x: Tensor, group: int | None = None) -> Quantized:
    """Quantizes ``x [T, in]`` to 8 bits with one scale for each row, or each ``group`` of its values (``in`` is
    padded).

    A row with an infinity or NaN gets that as its scale, so none of its outputs is finite.
    """
    wide = (x.float() if group is None else _pad(x.float())).reshape(len(x), -1, group or x.shape[1])
    largest = wide.abs().amax(2)
    inverse = torch.where(largest > _SMALLEST, torch.full_like(largest, 127) / largest, 0.0)
    codes = torch.round(wide * inverse[:, :, None]).nan_to_num(0)
    return Quantized(codes.to(torch.int8).flatten(1), largest / 127)


def _pad(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP))
