"""The feed-forward part, plain or gated."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fastgen.compile.ops.activation.reference import activate, activate_and_multiply
from fastgen.layers.linear import Linear

Activate = Callable[[Tensor], Tensor]


class Activation(nn.Module):
    """``act(x)``, or where it is ``gated`` ``act(gate) * up`` of ``x [T, 2F]``; a ``kernel`` computes it, where there
    is one. ``kind`` is a key of :data:`fastgen.compile.ops.activation.reference.ACTIVATIONS`.
    """

    def __init__(self, kind: str, *, gated: bool, kernel: Activate | None = None):
        super().__init__()
        self.kind, self.gated, self.kernel = kind, gated, kernel

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x)
        return activate_and_multiply(x, self.kind) if self.gated else activate(x, self.kind)


class Mlp(nn.Module):
    """``down(act(up(x)))``: ``x [T, H] -> [T, H]``."""

    def __init__(self, up: Linear, down: Linear, activation: Activation):
        super().__init__()
        self.up, self.down, self.activation = up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class GatedMlp(nn.Module):
    """``down(act(gate(x)) * up(x))`` with gate and up stacked into one matrix: ``x [T, H] -> [T, H]``."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation):
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.gate_up(x)))
        return out
