"""The residual stream where kernels compute: what a branch adds, the next norm adds while it reads the stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# ``x + scale * y``, which may be in ``x`` itself.
Add = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Residual:
    """The stream ``x [T, H]`` and what is still to be ``added [T, H]`` to it, by ``add`` if no norm does it."""

    x: Tensor
    added: Tensor | None
    add: Add | None

    def settle(self) -> Tensor:
        """The stream with nothing left to add."""
        if self.added is not None:
            assert self.add is not None, "no kernel for a sum was asked for, since a norm is to make it"
            self.x, self.added = self.add(self.x, self.added), None
        return self.x


Stream = Tensor | Residual


def settled(stream: Stream) -> Tensor:
    """The stream as a tensor."""
    return stream.settle() if isinstance(stream, Residual) else stream


@dataclass
class DeferredAdd:
    """Adds to the stream later: ``scale`` times what it is given, by a norm's kernel, or by ``kernel`` where the next
    reader is no norm. ``node`` of the recipe asks for it."""

    scale: float | None
    node: Any
    kernel: Add | None = None

    def __call__(self, x: Tensor, y: Tensor) -> Residual:
        return Residual(x, y, self.kernel)
