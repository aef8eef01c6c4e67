"""The residual stream. What a branch adds to it stays pending, and the next reader adds it: kernels do that and the
norm that follows in one pass over memory. The last linear layer of a branch may be left to the reader too."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fastgen.compile.backends.ops import AddNormOp, AddOp, LinearAddNormOp, NormOp
from fastgen.compile.weights.rows import Rows


@dataclass
class Stream:
    """The residual stream ``x [T, H]``, and ``pending`` if something is still to be added to it: that ``[T, H]``, or
    what the linear layer reads that makes it."""

    x: Tensor
    pending: Tensor | None = None


class ReadStream(nn.Module):
    """Reads a stream on which nothing is pending, through a ``norm`` if there is one."""

    def __init__(self, norm: NormOp | None = None):
        super().__init__()
        self.norm = norm

    def forward(self, stream: Stream) -> Tensor:
        return stream.x if self.norm is None else self.norm(stream.x)


class FlushStream(nn.Module):
    """Adds what is pending to the stream, and reads the sum."""

    def __init__(self, add: AddOp):
        super().__init__()
        self.add = add

    def forward(self, stream: Stream) -> Tensor:
        assert stream.pending is not None
        stream.x, stream.pending = self.add(stream.x, stream.pending), None
        return stream.x


class LeftToReader(nn.Module):
    """Takes the place of the last linear layer of a branch that the stream's next reader computes: it gives its input.

    The ``linear`` layer, and the norm of its output if there is one, are among the modules of the branch that they
    belong to.
    """

    def __init__(self, left: LinearAddNormOp):
        super().__init__()
        self.linear, self.output_norm = left.linear, left.output_norm

    def part(self, index: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of part ``index`` of the linear layer."""
        return self.linear.part(index)

    def forward(self, x: Tensor) -> Tensor:
        return x


class FlushAndNorm(nn.Module):
    """Adds what is pending to the stream, of which ``add_norm`` may compute a linear layer first, and reads the sum
    through a norm."""

    def __init__(self, add_norm: AddNormOp | LinearAddNormOp):
        super().__init__()
        self.add_norm = add_norm

    def forward(self, stream: Stream) -> Tensor:
        assert stream.pending is not None
        stream.x, normed = self.add_norm(stream.x, stream.pending)
        stream.pending = None
        return normed


# How the stream is read at one place of a model.
Reader = ReadStream | FlushStream | FlushAndNorm
