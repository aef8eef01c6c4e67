"""Spreading over steps what decodes ask of the KV cache when they fill a block: many may fill one in the same step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.scheduling.running_set import RunningSet

# With fewer decodes it takes no time to speak of where all of them fill a block in the same step.
STARTS_FROM = 64
# How many times more decodes than usual come to a new block in a step that does nothing for others.
_MANY_TIMES = 4


class Spreading:
    """Looks after a share of the decodes of ``running`` in each step, in turn."""

    def __init__(self, kv: KVCacheManager, running: RunningSet):
        self._kv, self._running = kv, running
        self.starts_from = STARTS_FROM
        # Which of the decodes is the first to be given a spare by the next step.
        self.next_spare = 0

    def advance(self, full: list[Sequence], num_decodes: int) -> None:
        """``full`` of the ``num_decodes`` decodes of a step have filled a block by it."""
        if num_decodes < self.starts_from:
            for seq in full:
                self._kv.advance(seq)
            return
        self._kv.advance_later(full)
        if len(full) <= _MANY_TIMES * self._share(num_decodes):
            self._kv.catch_up(self._share(num_decodes))

    def give_spares(self, decodes: SequenceOf[Sequence], num_wanting: int) -> None:
        """The next block for some of ``decodes``, where there are free blocks enough for everybody. ``num_wanting`` of
        them have come to a new block in this step.
        """
        kv, num_decodes = self._kv, len(decodes)
        share = self._share(num_decodes)
        if num_decodes < self.starts_from or num_wanting > _MANY_TIMES * share:
            return
        if kv.pool.num_free < 2 * kv.num_groups * num_decodes:
            return
        first = self.next_spare if self.next_spare < num_decodes else 0
        self.next_spare = first + share
        self._running.tell_all(kv.spares.give(decodes[first : self.next_spare]))

    def _share(self, num_decodes: int) -> int:
        """How many of them are looked after in a step, so that it is everybody's turn before the next block."""
        return 1 + num_decodes // max(1, self._kv.block_size - 1)
