"""Token embedding, and what a model adds to it before its layers."""

from __future__ import annotations

from torch import Tensor, nn

from fastgen.compile.backends.ops import AllReduceOp, EmbeddingOp, LinearOp, NormOp, PositionsOp
from fastgen.layers.ragged_batch import RaggedBatch


class Embedding(nn.Module):
    """``[T]`` token ids to ``[T, H]``: ``norm(project(scale * tokens[id]) + positions[position + offset])``.

    ``tokens`` looks up and scales; it adds positions too, unless a projection comes between and ``positions`` does.
    ``sum_ranks`` sums the rows that ranks found in their parts of the table.
    """

    def __init__(
        self,
        tokens: EmbeddingOp,
        *,
        sum_ranks: AllReduceOp | None = None,
        project: LinearOp | None = None,
        positions: PositionsOp | None = None,
        norm: NormOp | None = None,
    ):
        super().__init__()
        self.tokens, self.project, self.positions, self.norm = tokens, project, positions, norm
        self.sum_ranks = sum_ranks

    def forward(self, batch: RaggedBatch) -> Tensor:
        x = self.tokens(batch.input_ids, batch.token_source, batch.sampled_ids, batch.positions)
        if self.sum_ranks is not None:
            x = self.sum_ranks(x)
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x = self.positions(x, batch.positions)
        return x if self.norm is None else self.norm(x)
