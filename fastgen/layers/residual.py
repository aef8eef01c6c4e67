"""The residual stream. What a branch adds to it stays pending, and the next reader adds it: kernels do that and the
norm that follows in one pass over memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fastgen.compile.backends.ops import AddNormOp, AddOp, NormOp


@dataclass
class Stream:
    """The residual stream ``x [T, H]``, and ``pending [T, H]`` if something is still to be added to it."""

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


class FlushAndNorm(nn.Module):
    """Adds what is pending to the stream, and reads the sum through a norm."""

    def __init__(self, add_norm: AddNormOp):
        super().__init__()
        self.add_norm = add_norm

    def forward(self, stream: Stream) -> Tensor:
        assert stream.pending is not None
        stream.x, normed = self.add_norm(stream.x, stream.pending)
        stream.pending = None
        return normed


# How the stream is read at one place of a model.
Reader = ReadStream | FlushStream | FlushAndNorm
