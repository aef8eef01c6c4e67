"""A KV cache as kernels with bf16 dots keep it: pairs of a key's features, and pairs of values' features."""

from __future__ import annotations

from torch import Tensor


def keys_in_pairs(k: Tensor) -> Tensor:
    """Returns keys ``[B, P, K, D]`` as ``[B, K, D/2, P, 2]``, contiguous."""
    return k.permute(0, 2, 3, 1).unflatten(2, (-1, 2)).transpose(-1, -2).contiguous()


def values_in_pairs(v: Tensor) -> Tensor:
    """Returns values ``[B, P, K, D]`` as ``[B, K, P/2, D, 2]``, contiguous."""
    return v.transpose(1, 2).unflatten(2, (-1, 2)).transpose(-1, -2).contiguous()


def keys_of_pairs(stored: Tensor) -> Tensor:
    """Returns ``[B, P, K, D]`` of what :func:`keys_in_pairs` gave."""
    return stored.transpose(-1, -2).flatten(2, 3).permute(0, 3, 1, 2)


def values_of_pairs(stored: Tensor) -> Tensor:
    """Returns ``[B, P, K, D]`` of what :func:`values_in_pairs` gave."""
    return stored.transpose(-1, -2).flatten(2, 3).transpose(1, 2)
