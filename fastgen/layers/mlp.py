"""The feed-forward part, plain or gated."""

from __future__ import annotations

from torch import Tensor, nn

from fastgen.compile.backends.ops import LinearOp


class Mlp(nn.Module):
    """``down(act(up(x)))``, or gated ``down(act(gate(x)) * up(x))`` with gate and up stacked into one matrix:
    ``x [T, H] -> [T, H]``. ``inward`` is the up, or gate and up, and the activation.
    """

    def __init__(self, inward: LinearOp, down: LinearOp):
        super().__init__()
        self.inward, self.down = inward, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inward(x))
