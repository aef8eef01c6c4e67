"""Mixture of experts: a router, the experts, and sometimes an expert that all tokens share."""

from __future__ import annotations

from torch import Tensor, nn

from fastgen.compile.backends.ops import ExpertsOp, LinearOp, RouterOp
from fastgen.layers.mlp import Mlp


class Moe(nn.Module):
    """``x [T, H] -> [T, H]``: the weighted sum of each token's experts, plus the shared expert if there is one.

    ``shared_gate`` ``H -> 1`` weighs the shared expert by a sigmoid.
    """

    def __init__(
        self, router: RouterOp, experts: ExpertsOp, *, shared: Mlp | None = None, shared_gate: LinearOp | None = None
    ):
        super().__init__()
        self.router, self.experts, self.shared, self.shared_gate = router, experts, shared, shared_gate

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.router(x)
        shared: Tensor | None = None if self.shared is None else self.shared(x)
        gate = None if self.shared_gate is None else self.shared_gate(x)
        return self.experts(x, experts, weights, shared, gate)
