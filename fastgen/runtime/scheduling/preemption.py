"""Preemption: a running sequence loses its blocks and its slot, and waits to be computed again."""

from __future__ import annotations

from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Sequence, SequenceStatus
from fastgen.runtime.scheduling.forks import Forks
from fastgen.runtime.scheduling.reservations import Reservations
from fastgen.runtime.scheduling.running_set import RunningSet
from fastgen.runtime.scheduling.waiting_queue import WaitingQueue


class Preemption:
    """Stops sequences of ``running``; the preempted ones wait in ``waiting`` at the place of their urgency."""

    def __init__(
        self,
        kv: KVCacheManager,
        running: RunningSet,
        waiting: WaitingQueue,
        forks: Forks,
        reservations: Reservations,
    ):
        self._kv, self._running, self._waiting = kv, running, waiting
        self._forks, self._reservations = forks, reservations

    def preempt_least_urgent(self, now_s: float) -> list[Sequence]:
        """Returns the preempted sequences: one, or all running beams of a search."""
        chosen = self._running.least_urgent
        beams = [seq for seq in chosen.request.sequences if seq.status is SequenceStatus.RUNNING]
        lost = beams if chosen.request.has_beams else [chosen]
        assert len(self._running) > len(lost), f"{lost} is alone in the cache, which was found to suffice on arrival"
        for seq in lost:
            self.stop(seq)
            seq.status = SequenceStatus.WAITING
            seq.num_computed_tokens = 0
            seq.num_preemptions += 1
            self._waiting.hold(seq)
        first = chosen.request.sequences[0] if chosen.request.has_beams else chosen
        self._waiting.remove(first)
        self._waiting.requeue(first, now_s)
        return lost

    def stop(self, seq: Sequence) -> None:
        """Frees the blocks and the slot of a running sequence."""
        self._kv.free(seq)
        self._running.remove(seq)
        self._forks.forked.discard(seq)
        self._reservations.release(seq)
