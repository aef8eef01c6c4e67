"""Quantized weights for activations in 16 or 32 bits, in the layout of Triton kernels and the reference.

Codes and scales are those of :mod:`fastgen.compile.weights.formats`. For 8-bit floating point there is one scale for
each output, which maps its largest weight to the format's largest number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.compile.weights.formats import GROUP, WeightOnlyFormat, largest_of, quantize_channels, quantize_groups

# The short name of the dtype of the codes, by format.
CODES = {"int8_weight_only": "i8", "int4_weight_only": "u8", "fp8_weight_only": "u8"}
# The short name of the dtype of the scales, by format.
SCALES = {"int8_weight_only": "fp32", "int4_weight_only": "fp16", "fp8_weight_only": "fp32"}
_LARGEST_FP8 = 448.0
_PIECE = 4 << 20  # weights converted at a time


class QuantizedWeight:
    """A quantized weight ``[out, in]``, written by rows as they are read: of the unquantized rows only a piece is held
    at a time.

    ``codes`` is ``[out, in]`` int8, or the bits of float8_e4m3 as uint8, or for 4 bits ``[out, in / 2]`` uint8, ``in``
    padded to a multiple of 32: byte ``i`` of the 16 of a group has its feature ``i`` in the low half and ``i + 16`` in
    the high one, plus 8. ``scale`` is fp32 ``[out]``, for 4 bits fp16 ``[out, in / 32]``.
    """

    def __init__(self, weight_format: WeightOnlyFormat, out_features: int, in_features: int, device: torch.device):
        self.format, self.out_features, self.in_features = weight_format, out_features, in_features
        if weight_format == "int4_weight_only":
            groups = -(-in_features // GROUP)
            self.codes = torch.empty(out_features, groups * GROUP // 2, dtype=torch.uint8, device=device)
            self.scale = torch.empty(out_features, groups, dtype=torch.float16, device=device)
            return
        dtype = torch.int8 if weight_format == "int8_weight_only" else torch.uint8
        self.codes = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.scale = torch.empty(out_features, dtype=torch.float32, device=device)

    @property
    def size_bytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def write(self, start: int, rows: Tensor, largest: Tensor | None = None) -> None:
        """Quantizes ``rows [n, in]`` of any float dtype, which become outputs ``start`` to ``start + n``.

        In formats with a scale for each output, ``largest [n]`` are the magnitudes that get the largest code, where
        these are not those of ``rows``.
        """
        step, device = max(1, _PIECE // self.in_features), self.codes.device
        for first in range(0, len(rows), step):
            piece = slice(first, first + step)
            its_largest = None if largest is None else largest[piece].to(device)
            codes, scale = self._quantized(rows[piece].to(device), its_largest)
            place = slice(start + first, start + first + len(codes))
            self.codes[place], self.scale[place] = codes, scale

    def rows(self, indices: Tensor | slice) -> Tensor:
        """Returns the dequantized rows, in fp32: ``[n, in]``."""
        scale = self.scale[indices].float()
        if self.format != "int4_weight_only":
            return self.numbers(indices) * scale.unsqueeze(1)
        grouped = self.numbers(indices).view(*scale.shape, GROUP) * scale.unsqueeze(2)
        return grouped.flatten(1)[:, : self.in_features]

    def numbers(self, indices: Tensor | slice) -> Tensor:
        """Returns the numbers of the rows' codes, before scales: fp32 ``[n, in]``, with 4 bits ``in`` padded."""
        codes = self.codes[indices]
        if self.format == "fp8_weight_only":
            return codes.view(torch.float8_e4m3fn).float()
        if self.format == "int8_weight_only":
            return codes.float()
        halves = codes.view(len(codes), -1, 1, GROUP // 2)
        return torch.cat([halves & 15, halves >> 4], dim=2).flatten(1).float() - 8

    def _quantized(self, rows: Tensor, largest: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns codes and scales in the stored layout."""
        if self.format == "int8_weight_only":
            rounded = quantize_channels(rows, largest)
            return rounded.codes, rounded.scale.flatten()
        if self.format == "int4_weight_only":
            groups = quantize_groups(rows)
            low, high = (groups.codes + 8).to(torch.uint8).view(len(rows), -1, 2, GROUP // 2).unbind(2)
            return (low | high << 4).flatten(1), groups.scale.half()
        scale = (largest_of(rows) if largest is None else largest) / _LARGEST_FP8
        codes = (rows.float() / torch.where(scale == 0, 1.0, scale)[:, None]).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scale


def quantized(weight: Tensor, weight_format: WeightOnlyFormat, largest: Tensor | None = None) -> QuantizedWeight:
    """Quantizes ``weight [out, in]`` of a float dtype; for ``largest`` see :meth:`QuantizedWeight.write`."""
    stored = QuantizedWeight(weight_format, weight.shape[0], weight.shape[1], weight.device)
    stored.write(0, weight, largest)
    return stored
