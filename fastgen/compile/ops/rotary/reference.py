"""Rotary position embedding (Su et al., 2021): pairs of features of a head rotated against each other."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotates the first ``R`` features of each head by its token's position; the others are unchanged.

    ``x [T, heads, D]``, ``positions [T]``, ``cos_sin [max_positions, R]`` fp32: ``R/2`` cosines, then ``R/2`` sines.
    Pair ``i`` is features ``i`` and ``i + R/2``, or with ``interleaved`` ``2i`` and ``2i + 1``. Computed in fp32,
    returned in ``x``'s dtype.
    """
    size = cos_sin.shape[-1]
    cos, sin = cos_sin[positions.long()].unsqueeze(1).tensor_split(2, dim=-1)
    turning = x[..., :size].float()
    first, second = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.tensor_split(2, dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    rotated = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., size:]], dim=-1)
