"""Token embedding, and what a model adds to it before its layers."""

from __future__ import annotations

from torch import Tensor, nn

from fastgen.compile.backends.ops import EmbeddingOp, LinearOp, NormOp, PositionsOp
from fastgen.layers.ragged_batch import RaggedBatch


class Embedding(nn.Module):
    """``[T]`` token ids to ``[T, H]``: ``norm(project(scale * tokens[id]) + positions[position + offset])``.

    ``tokens`` looks up and scales; it adds positions too, unless a projection comes between and ``positions`` does.
    """

    def __init__(
        self,
        tokens: EmbeddingOp,
        *,
        project: LinearOp | None = None,
        positions: PositionsOp | None = None,
        norm: NormOp | None = None,
    ):
        super().__init__()
        self.tokens, self.project, self.positions, self.norm = tokens, project, positions, norm

    def forward(self, batch: RaggedBatch) -> Tensor:
        x = self.tokens(batch.input_ids, batch.token_source, batch.sampled_ids, batch.positions)
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x = self.positions(x, batch.positions)
        return x if self.norm is None else self.norm(x)
