"""Token embedding, with what a model adds to it before its layers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from fastgen.compile.ops.embedding.reference import embed, resolve_token_ids
from fastgen.compile.ops.linear.cpp import LinearKernel
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.compile.weights.packed import PackedWeight
from fastgen.compile.weights.quantized import QuantizedWeight
from fastgen.layers.linear import Linear, PackedRows, Rows, stored_weight, weight_rows
from fastgen.layers.norm import Norm
from fastgen.layers.ragged_batch import RaggedBatch

# A table as kernels read it.
Stored = Tensor | PackedWeight | QuantizedWeight


class EmbeddingTable(nn.Module):
    """``weight [rows, size]``, looked up by id.

    A head, or an embedding that is the head as well, may have a ``kernel`` that it is packed for, or be kept in few
    bits, in a ``weight_format``.
    """

    def __init__(
        self,
        num_rows: int,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernel: LinearKernel | None = None,
        weight_format: WeightOnlyFormat | None = None,
    ):
        super().__init__()
        self.num_rows, self.size, self.kernel, self.dtype = num_rows, size, kernel, dtype
        if kernel is not None:
            self.packed = kernel.pack(num_rows, size)
        else:
            self.weight = stored_weight(num_rows, size, dtype, device, weight_format)

    @property
    def slot(self) -> Tensor | Rows:
        """Where the checkpoint's tensor goes."""
        if self.kernel is None:
            return weight_rows(self.weight, 0, self.num_rows, self.dtype)
        return PackedRows(self.packed, 0, (self.num_rows, self.size))

    @property
    def stored(self) -> Stored:
        return self.weight if self.kernel is None else self.packed

    def forward(self, ids: Tensor) -> Tensor:
        return embed(ids, self.weight).to(self.dtype)


class EmbeddingKernels(Protocol):
    """Look up in a model's tables, as :attr:`EmbeddingTable.stored`; the scale and the offset are theirs."""

    # What they write.
    dtype: torch.dtype

    def look_up(self, batch: RaggedBatch, tokens: Stored, positions: Stored | None, out: Tensor) -> None:
        """``out [T, E]``, the batch's tokens, scaled, and their positions where there is a table of these."""

    def add_positions(self, batch: RaggedBatch, positions: Stored, x: Tensor) -> None:
        """Adds positions to ``x [T, H]``."""


class Embedding(nn.Module):
    """``[T]`` token ids to ``[T, H]``: ``norm(project(scale * tokens[id]) + positions[position + offset])``.

    ``kernels`` look up, where there are some.
    """

    def __init__(
        self,
        tokens: EmbeddingTable,
        *,
        scale: float | None = None,
        project: Linear | None = None,
        positions: EmbeddingTable | None = None,
        position_offset: int = 0,
        norm: Norm | None = None,
        kernels: EmbeddingKernels | None = None,
    ):
        super().__init__()
        self.tokens, self.scale, self.project, self.norm = tokens, scale, project, norm
        self.positions, self.position_offset, self.kernels = positions, position_offset, kernels

    def forward(self, batch: RaggedBatch) -> Tensor:
        x = self._looked_up(batch) if self.kernels is None else self._looked_up_by(self.kernels, batch)
        return x if self.norm is None else self.norm(x)

    def _looked_up(self, batch: RaggedBatch) -> Tensor:
        x: Tensor = self.tokens(resolve_token_ids(batch.input_ids, batch.token_source, batch.sampled_ids))
        if self.scale is not None:
            x = x * self.scale
        if self.project is not None:
            x = self.project(x)
        return x if self.positions is None else x + self.positions(batch.positions + self.position_offset)

    def _looked_up_by(self, kernels: EmbeddingKernels, batch: RaggedBatch) -> Tensor:
        x = torch.empty(len(batch.input_ids), self.tokens.size, dtype=kernels.dtype, device=batch.input_ids.device)
        positions = None if self.positions is None else self.positions.stored
        fused = self.project is None
        kernels.look_up(batch, self.tokens.stored, positions if fused else None, x)
        if self.project is not None:
            x = self.project(x)
            if positions is not None:
                kernels.add_positions(batch, positions, x)
        return x
