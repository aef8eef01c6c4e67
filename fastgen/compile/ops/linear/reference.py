"""Linear layers, and the head's logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.compile.weights.formats import GROUP, Quantized, quantize_activations
from fastgen.compile.weights.quantized import QuantizedWeight

_PIECE = 4 << 20  # quantized weights converted to fp32 at a time
_VOCAB_PIECE = 8192  # vocabulary rows converted to fp32 at a time, so that a head in 16 bits never needs a whole copy


def linear(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Computes ``x Wᵀ + b``: ``x [T, in]``, ``weight [out, in]``, ``bias [out]``; returns ``[T, out]`` in ``x``'s
    dtype.
    """
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias).to(x.dtype)
    return F.linear(x, weight, bias)


def logits(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Computes ``x Wᵀ + b``, accumulated and returned in fp32, whatever the weights' dtype.

    ``x [R, H]``, ``weight [V, H]``, ``bias [V]``; returns ``[R, V]``. Rounding logits to 16 bits would make
    different ones equal.
    """
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias)
    x = x.float()
    if weight.dtype == torch.float32:
        out = F.linear(x, weight)
    else:
        pieces = [weight[start : start + _VOCAB_PIECE] for start in range(0, len(weight), _VOCAB_PIECE)]
        out = torch.cat([F.linear(x, piece.float()) for piece in pieces], dim=-1)
    return out if bias is None else out + bias.float()


def per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Applies a matrix of its own to each head: ``x [T, N, in]``, ``weight [N, out, in]``; returns ``[T, N, out]``."""
    return torch.einsum("tni,noi->tno", x, weight)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Applies a matrix of its own to each group of rows: ``weight[0]`` to the first ``counts[0]`` rows, and so on.

    ``x [M, in]``, ``weight [E, out, in]``, ``bias [E, out]``, ``counts [E]`` with sum ``M``, zeros allowed; returns
    ``[M, out]`` in ``x``'s dtype.
    """
    out = x.new_empty(len(x), weight.shape[1])
    start = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            rows = slice(start, start + count)
            out[rows] = F.linear(x[rows], weight[group], None if bias is None else bias[group])
            start += count
    return out


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Computes ``x Wᵀ + b``: ``x [T, in]``, ``bias [out]``; summed and returned in fp32, ``[T, out]``.

    A scale of an output is applied to its sum. Scales of groups are applied to the weights, which are then rounded to
    ``x``'s dtype.
    """
    wide, step = x.float(), max(1, _PIECE // weight.in_features)
    out = torch.empty(len(x), weight.out_features, device=x.device)
    for start in range(0, weight.out_features, step):
        piece = slice(start, start + step)
        if weight.format == "int4_weight_only":
            out[:, piece] = F.linear(wide, weight.rows(piece).to(x.dtype).float())
        else:
            out[:, piece] = F.linear(wide, weight.numbers(piece)) * weight.scale[piece]
    return out if bias is None else out.add_(bias)


def linear_int8(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """Computes ``x Wᵀ + b`` with ``weight`` of :func:`quantize_channels` and rows of ``x [T, in]`` quantized: fp32
    ``[T, out]``.
    """
    rows = quantize_activations(x)
    sums = (rows.codes.double() @ weight.codes.double().T).float()
    out = sums * rows.scale * weight.scale.T
    return out if bias is None else out + bias.float()


def linear_int4(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """Computes ``x Wᵀ + b`` with ``weight`` of :func:`quantize_groups` and ``x [T, in]`` quantized in the same groups.

    The groups' sums are added in fp32, in order. Returns fp32 ``[T, out]``.
    """
    rows = quantize_activations(x, GROUP)
    out = x.new_zeros(len(x), len(weight.codes), dtype=torch.float32)
    for group in range(weight.scale.shape[1]):
        part = slice(group * GROUP, (group + 1) * GROUP)
        sums = rows.codes[:, part].float() @ weight.codes[:, part].float().T
        out += sums * (rows.scale[:, group, None] * weight.scale[:, group])
    return out if bias is None else out + bias.float()


def linear_int8_weight_only(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """Computes ``x Wᵀ + b`` with ``weight`` of :func:`quantize_channels`, in fp32; ``x [T, in]``, returns fp32 ``[T,
    out]``.
    """
    out = (x.float() @ weight.codes.float().T) * weight.scale.T
    return out if bias is None else out + bias.float()
