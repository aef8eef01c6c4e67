"""Staggering: when many decodes fill a block in the same step, the work for that is distributed over steps."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.scheduling.running_set import RunningSet

# With fewer decodes it takes little time even if all of them fill a block in the same step.
STARTS_FROM = 64
# A step in which this many times the usual share of decodes need a new block gives no lookahead blocks.
_MANY_TIMES = 4


class Staggering:
    """Serves a share of the decodes of ``running`` in each step, in turn."""

    def __init__(self, kv: KVCacheManager, running: RunningSet):
        self._kv, self._running = kv, running
        self.starts_from = STARTS_FROM
        # Index of the decode that the next step begins with.
        self.next_lookahead = 0

    def advance(self, full: list[Sequence], num_decodes: int) -> None:
        """Advances the ``full`` decodes, which have filled a block in a step of ``num_decodes`` decodes, now or
        later."""
        if num_decodes < self.starts_from:
            for seq in full:
                self._kv.advance(seq)
            return
        self._kv.defer_advance(full)
        if len(full) <= _MANY_TIMES * self._share(num_decodes):
            self._kv.advance_deferred(self._share(num_decodes))

    def give_lookahead(self, decodes: SequenceOf[Sequence], num_wanting: int) -> None:
        """Gives lookahead blocks to some of ``decodes`` where there are plenty of free blocks. ``num_wanting`` decodes
        need a new block in this step.
        """
        kv, num_decodes = self._kv, len(decodes)
        if num_decodes < self.starts_from:
            return
        share = self._share(num_decodes)
        if num_wanting > _MANY_TIMES * share or kv.pool.num_free < 2 * kv.num_groups * num_decodes:
            return
        first = self.next_lookahead if self.next_lookahead < num_decodes else 0
        self.next_lookahead = first + share
        for seq in kv.lookahead.give(decodes[first : self.next_lookahead]):
            self._running.add_blocks(seq, len(seq.block_tables[0]) - 1)

    def _share(self, num_decodes: int) -> int:
        """Returns how many decodes are served in a step, so that all have their turn before they need the next
        block."""
        return 1 + num_decodes // max(1, self._kv.block_size - 1)
