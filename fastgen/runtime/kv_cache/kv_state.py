"""The state of a :class:`~fastgen.runtime.kv_cache.kv_cache_manager.KVCacheManager`, for snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.runtime.kv_cache.block_tables import BlockCopy
from fastgen.runtime.kv_cache.prefix_cache import PrefixNode
from fastgen.runtime.requests.request import Sequence


@dataclass(frozen=True, slots=True)
class KVState:
    """Holds the state of a manager beside the block tables of sequences and the tree of prefixes."""

    free: list[int]
    cached: list[int]
    nodes: dict[Sequence, PrefixNode]
    private: list[Sequence]
    may_share: list[Sequence]
    copies: list[tuple[BlockCopy, Sequence]]
