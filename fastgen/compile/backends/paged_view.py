"""The KV cache of a layer as a step sees it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PagedView(NamedTuple):
    """One layer's part of the KV cache, and where a step's sequences lie in it."""

    k: Tensor  # [B, P, K, D]
    v: Tensor  # [B, P, K, Dv]
    slots: Tensor  # [T] i64: ``block * P + offset`` of each new key and value
    block_tables: Tensor  # [S, max_blocks] i32
    cu_seqlens_q: Tensor  # [S+1] i32
    seq_lens: Tensor  # [S] i32
