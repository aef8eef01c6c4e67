"""Adds a branch's result to the residual stream."""

from __future__ import annotations

from torch import Tensor


def scaled_add(x: Tensor, y: Tensor, scale: float | None = None) -> Tensor:
    """Computes ``x + scale * y``, the product rounded to ``y``'s dtype first; ``x`` and ``y`` of one shape."""
    return x + (y if scale is None else y * scale)
