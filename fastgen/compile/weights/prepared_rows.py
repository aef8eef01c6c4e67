"""Rows of a linear layer's input as its C++ kernels read them: rounded, cut into parts, or quantized.

The layer prepares them itself, or the norm or activation before it does, which has each row at hand: then the row is
written once, and shorter. Both call the function of ``prepared_row.cpp.j2``, so the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.compile.spec import Value
from fastgen.compile.weights.formats import GROUP
from fastgen.compile.weights.packed import ARCHES_WITH_TILES, TILED, WeightFormat, padded_features

_LINE = 64  # bytes
_TILE_ROWS = 16  # that a matrix unit reads at once


@dataclass(frozen=True)
class RowFormat:
    """How rows are prepared for weights of a format by kernels of an instruction set."""

    weight: WeightFormat
    arch: str

    @property
    def tiles(self) -> int | None:
        """Returns how many numbers of a row one tile has; ``None`` where there is no matrix unit."""
        return TILED[self.weight] if self.arch in ARCHES_WITH_TILES else None

    def row_bytes(self, in_features: int) -> int:
        """Returns the bytes from one row to the next: an odd number of cache lines, so that rows share no cache sets.

        ======== ===================================================================
        weights  a row, of features as many as fill steps or tiles
        ======== ===================================================================
        bf16_dot a bf16 for each
        bf16     three bf16 for each, whose sum it is
        int8     a signed byte for each; an i32 and an fp32 for all
        int4     a signed byte for each; an i32 and an fp32 for each group of 32
        ======== ===================================================================
        """
        features = padded_features(self.weight, in_features, self.arch)
        size_bytes = {
            "bf16_dot": 2 * features,
            "bf16": 6 * features,
            "int8": features + 8,
            "int4": features // GROUP * (GROUP + 8),
        }[self.weight]
        return ((size_bytes // _LINE + 1) | 1) * _LINE

    def size_bytes(self, num_rows: int, in_features: int) -> int:
        """Returns the bytes of rows. A matrix unit reads complete tiles, so rows behind the last one have room too."""
        return (num_rows + (_TILE_ROWS - 1 if self.tiles else 0)) * self.row_bytes(in_features)

    def empty(self, num_rows: int, in_features: int, device: torch.device) -> Tensor:
        """Returns room for rows: ``[num_rows, row_bytes]`` u8, behind which a tile may be read."""
        room = torch.empty(self.size_bytes(num_rows, in_features), dtype=torch.uint8, device=device)
        return room.view(-1, self.row_bytes(in_features))[:num_rows]

    def parameters(self, in_features: int) -> dict[str, Value]:
        """Returns the parameters by which templates of other ops write such rows: few, so that instruction sets share
        kernels."""
        return {
            "row_format": self.weight,
            "row_features": padded_features(self.weight, in_features, self.arch),
            "row_bytes": self.row_bytes(in_features),
            "tiles": self.tiles if self.weight == "bf16" else None,
        }


def row_format(weight: WeightFormat, arch: str) -> RowFormat | None:
    """Returns how rows are prepared; ``None`` where kernels read them as they are."""
    prepares = weight in ("int8", "int4", "bf16_dot") or (weight == "bf16" and arch in ARCHES_WITH_TILES)
    return RowFormat(weight, arch) if prepares else None
