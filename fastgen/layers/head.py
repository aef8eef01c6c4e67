"""The head, which computes logits from final hidden states."""

from __future__ import annotations

from torch import Tensor, nn

from fastgen.compile.backends.ops import GatherOp, HeadOp, LinearOp


class Head(nn.Module):
    """``hidden [R, H] -> softcap(scale * (project(hidden) Wᵀ + bias)) [R, V]`` in fp32. ``logits`` computes all behind
    the projection.

    With ``gather_ranks`` it computes the logits of a rank's part of the vocabulary of ``vocab_size`` tokens, and rank 0
    gets all of them.
    """

    def __init__(
        self,
        logits: HeadOp,
        *,
        project: LinearOp | None = None,
        gather_ranks: GatherOp | None = None,
        vocab_size: int = 0,
    ):
        super().__init__()
        self.logits, self.project, self.gather_ranks, self.vocab_size = logits, project, gather_ranks, vocab_size

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if self.project is not None:
            hidden = self.project(hidden)
        if self.gather_ranks is None:
            return self.logits(hidden, out)
        own = self.logits(hidden)
        if out is None:
            out = own.new_empty(len(own), self.vocab_size)
        self.gather_ranks(own, out)
        return out
