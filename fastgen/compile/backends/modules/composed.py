"""Linear layers and the op that follows, one after the other: as backends do it that do not compute both at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fastgen.compile.backends.paged_view import PagedView
from fastgen.compile.weights.rows import Rows

if TYPE_CHECKING:
    from fastgen.compile.backends.ops import ActivationOp, AddNormOp, AttentionOp, LinearOp, NormOp, NormWeights


class ActivatedLinear(nn.Module):
    """An activation of a linear layer's outputs."""

    def __init__(self, linear: LinearOp, activation: ActivationOp):
        super().__init__()
        self.linear, self.activation = linear, activation

    def part(self, index: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of part ``index`` of the linear layer."""
        return self.linear.part(index)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class LinearAddNorm(nn.Module):
    """Adds a linear layer's output, through a norm if there is one, to a residual stream, then norms the sum.

    The layer whose output it is has ``linear`` and ``output_norm`` among its modules, so they are none of this one's:
    they count once.
    """

    def __init__(self, linear: LinearOp, output_norm: NormOp | None, add_norm: AddNormOp):
        super().__init__()
        self.add_norm = add_norm
        self._of_other = linear, output_norm

    @property
    def linear(self) -> LinearOp:
        return self._of_other[0]

    @property
    def output_norm(self) -> NormOp | None:
        return self._of_other[1]

    @property
    def norm(self) -> NormWeights:
        return self.add_norm.norm

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.linear(y)
        return self.add_norm(x, out if self.output_norm is None else self.output_norm(out))


class ProjectedAttention(nn.Module):
    """The projection to queries, keys and values, what happens ``between`` in place, and attention."""

    def __init__(self, qkv: LinearOp, attention: AttentionOp, between: Callable[[Tensor], None] | None = None):
        super().__init__()
        self.qkv, self.attention, self.between = qkv, attention, between

    @property
    def q_norm(self) -> NormWeights | None:
        return self.attention.q_norm

    @property
    def k_norm(self) -> NormWeights | None:
        return self.attention.k_norm

    def forward(self, x: Tensor, cos_sin: Tensor | None, positions: Tensor, cache: PagedView) -> Tensor:
        qkv = self.qkv(x)
        if self.between is not None:
            self.between(qkv)
        return self.attention(qkv, cos_sin, positions, cache)
