"""Token embedding, with what a model adds to it before its layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastgen.compile.ops.embedding import embed, resolve_token_ids
from fastgen.compile.ops.linear import LinearKernel
from fastgen.layers.linear import Linear, PackedRows
from fastgen.layers.norm import Norm
from fastgen.layers.ragged_batch import RaggedBatch


class EmbeddingTable(nn.Module):
    """``weight [rows, size]``, looked up by id. What is looked up has ``out_dtype``.

    With a ``kernel`` it is packed for it: a head, or an embedding that is the head as well.
    """

    def __init__(
        self,
        num_rows: int,
        size: int,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        device: torch.device,
        kernel: LinearKernel | None = None,
    ):
        super().__init__()
        self.num_rows, self.size, self.out_dtype, self.kernel = num_rows, size, out_dtype, kernel
        if kernel is not None:
            self.packed = kernel.pack(num_rows, size)
        else:
            self.weight = nn.Parameter(torch.empty(num_rows, size, dtype=dtype, device=device), requires_grad=False)

    @property
    def slot(self) -> Tensor | PackedRows:
        """Where the checkpoint's tensor goes."""
        return self.weight.data if self.kernel is None else PackedRows(self.packed, 0, (self.num_rows, self.size))

    def forward(self, ids: Tensor) -> Tensor:
        rows = embed(ids, self.weight) if self.kernel is None else self.packed.rows(ids.long())
        return rows.to(self.out_dtype)


class Embedding(nn.Module):
    """``[T]`` token ids to ``[T, H]``: ``norm(project(scale * tokens[id]) + positions[position + offset])``."""

    def __init__(
        self,
        tokens: EmbeddingTable,
        *,
        scale: float | None = None,
        project: Linear | None = None,
        positions: EmbeddingTable | None = None,
        position_offset: int = 0,
        norm: Norm | None = None,
    ):
        super().__init__()
        self.tokens, self.scale, self.project, self.norm = tokens, scale, project, norm
        self.positions, self.position_offset = positions, position_offset

    def forward(self, batch: RaggedBatch) -> Tensor:
        x: Tensor = self.tokens(resolve_token_ids(batch.input_ids, batch.token_source, batch.sampled_ids))
        if self.scale is not None:
            x = x * self.scale
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x = x + self.positions(batch.positions + self.position_offset)
        return x if self.norm is None else self.norm(x)
