"""RMS norm and layer norm, with statistics in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """Computes ``x / sqrt(mean(x²) + eps) * (weight + offset)`` over the last axis (Zhang and Sennrich, 2019).

    ``x [T, …, H]``, ``weight [H]`` or ``[heads, H]``. The normalised value is rounded to ``x``'s dtype before it is
    multiplied by the weight. With an ``offset`` it is rounded afterwards, since 16 bits could not add that exactly.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if offset:
        return (normed * (weight.float() + offset)).to(x.dtype)
    return normed.to(x.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """Computes ``(x − mean) / sqrt(var + eps) * (weight + offset) + bias`` over the last axis (Ba et al., 2016).

    ``x [T, …, H]``, ``weight, bias`` ``[H]`` or ``[heads, H]``. Computed in fp32, returned in ``x``'s dtype.
    """
    if not offset and (weight is None or weight.ndim == 1):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    out = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is not None:
        out = out * (weight.float() + offset)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)
