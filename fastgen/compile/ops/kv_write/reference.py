"""Writing a step's new keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores ``k [T, K, D]`` and ``v [T, K, Dv]`` at the same slots of their caches; see :func:`write`."""
    write(k, k_cache, slot_mapping)
    write(v, v_cache, slot_mapping)


def write(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores ``rows [T, K, D]`` at slots ``block * P + offset`` of ``cache [B, P, K, D]``, in place, in any memory
    layout.

    ``slot_mapping [T]`` i64. Padding tokens have slots of block 0, which is never read.
    """
    block_size = cache.shape[1]
    cache[slot_mapping // block_size, slot_mapping % block_size] = rows.to(cache.dtype)
