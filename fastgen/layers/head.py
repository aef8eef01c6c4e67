"""From final hidden states to logits."""

from __future__ import annotations

from torch import Tensor, nn

from fastgen.compile.backends.ops import HeadOp, LinearOp


class Head(nn.Module):
    """``hidden [R, H] -> softcap(scale * (project(hidden) Wᵀ + bias)) [R, V]`` in fp32. ``logits`` computes all behind
    the projection."""

    def __init__(self, logits: HeadOp, *, project: LinearOp | None = None):
        super().__init__()
        self.logits, self.project = logits, project

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if self.project is not None:
            hidden = self.project(hidden)
        return self.logits(hidden, out)
