"""How sequences of a request take over blocks from one another: several completions the prompt's, beams all of them."""

from __future__ import annotations

from fastgen.runtime.kv_cache_manager import KVCacheManager, held_entries
from fastgen.runtime.request import Sequence, SequenceStatus
from fastgen.runtime.running_set import RunningSet
from fastgen.runtime.waiting_queue import WaitingQueue


class Forks:
    """Forks sequences of ``running``, over the blocks of ``kv``. In ``waiting`` those are held that wait for a fork."""

    def __init__(self, kv: KVCacheManager, running: RunningSet, waiting: WaitingQueue):
        self._kv, self._running, self._waiting = kv, running, waiting
        self.forked: set[Sequence] = set()
        """Beams whose next token may go into a block that they share with their parent. It goes into a copy, and the
        parent's into the block itself, where it is of no account to the others.
        """

    def attach(self, seq: Sequence) -> None:
        """Let ``seq``, which holds nothing, have the blocks that others computed for it: those in the prefix cache, or
        those of the prompt where another sequence of its request has more of them.
        """
        self._kv.attach_cached(seq)
        num_shared = min(seq.num_prompt_tokens, seq.num_tokens - 1)
        if len(seq.request.sequences) == 1 or seq.num_computed_tokens >= num_shared:
            return
        siblings = (each for each in self._running if each.request is seq.request)
        parent = next((each for each in siblings if self._kv.can_fork(each, num_shared)), None)
        if parent is not None:
            self.detach(seq)
            self._kv.fork(parent, seq, num_shared)

    def detach(self, seq: Sequence) -> None:
        """Undo :meth:`attach`."""
        self._kv.free(seq)
        seq.num_computed_tokens = 0
        if not seq.num_preemptions:
            seq.num_cached_tokens = 0

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the beam ``child`` go on from where ``parent`` of the same search is: with the same tokens, in the same
        blocks. What it did before is dropped.
        """
        assert parent.status is SequenceStatus.RUNNING, f"{parent} cannot be forked"
        child.token_ids[:] = parent.token_ids
        if child.status is SequenceStatus.RUNNING:
            before = set(held_entries(child))
            self._kv.free(child)
            self._kv.fork(parent, child, parent.num_computed_tokens)
            self._running.tell(child, [entry for entry in held_entries(child) if entry not in before])
        else:
            self._waiting.remove(child)
            self._kv.fork(parent, child, parent.num_computed_tokens)
            child.urgency = (*parent.urgency[:2], child.index)
            self._running.add_decode(child)
        self.forked.add(child)

    def park(self, beam: Sequence) -> None:
        """Take back what ``beam`` has, which ended and in whose place no other goes on, until it is forked again."""
        self._kv.free(beam)
        self._running.remove(beam)
        self.forked.discard(beam)
        beam.status, beam.num_computed_tokens = SequenceStatus.WAITING, 0
        del beam.token_ids[beam.num_prompt_tokens :]
        self._waiting.hold(beam)

    def release(self, first: Sequence) -> None:
        """Let the beams that were preempted with ``first`` go on from the prompt that it has computed, on the seats
        kept for them. Those that have nothing beyond it are held until they are forked.
        """
        for seq in first.request.sequences[1:]:
            if seq.status is not SequenceStatus.WAITING or seq.num_tokens == seq.num_prompt_tokens:
                continue
            self._waiting.remove(seq)
            # Not what the prefix cache has, unless they must: that may be other blocks than those of the first.
            if self._kv.can_fork(first, seq.num_prompt_tokens):
                self._kv.fork(first, seq, seq.num_prompt_tokens)
            else:
                self._kv.attach_cached(seq)
            seq.urgency = (*first.urgency[:2], seq.index)
            self._running.add_prompt(seq)
