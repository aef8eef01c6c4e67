"""Forks: sequences of a request take over blocks of one another, completions those of the prompt, beams all of them."""

from __future__ import annotations

from bisect import bisect_right

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.kv_cache.block_tables import BlockUpdate, held_entries
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Sequence, SequenceStatus
from fastgen.runtime.scheduling.running_set import RunningSet
from fastgen.runtime.scheduling.waiting_queue import WaitingQueue


class Forks:
    """Forks sequences of ``running`` over the blocks of ``kv``. Sequences waiting for a fork are held in
    ``waiting``."""

    def __init__(self, kv: KVCacheManager, running: RunningSet, waiting: WaitingQueue):
        self._kv, self._running, self._waiting = kv, running, waiting
        # Beams whose next token may go into a block that they share with their parent. The beam writes into a copy, the
        # parent into the block itself, behind the tokens that the others read.
        self.forked: set[Sequence] = set()

    def blocks_needed(self, num_prompt_tokens: int, num_tokens: int, beam_width: int) -> int:
        """Returns the most blocks that the beams of a request hold at once when each has ``num_tokens`` tokens.

        They share the full blocks of the prompt, unless a window may have left these behind. Each beam may have the
        other blocks for itself. One more block for each is for copies in progress, whose sources are held as well.
        """
        needed = self._kv.capacity.blocks_needed(num_tokens)
        if beam_width == 1:
            return needed
        shared = self._shared_prompt_blocks(num_prompt_tokens)
        return shared + beam_width * (needed - shared + self._kv.num_groups)

    def check_fits(self, num_prompt_tokens: int, max_new_tokens: int, beam_width: int) -> None:
        """Refuses beams that could not finish even with all slots and the whole cache to themselves.

        :raises InvalidArgumentError: where there are fewer slots than beams.
        :raises RequestTooLargeError: where the cache is too small, with the arithmetic.
        """
        if beam_width == 1:
            return
        num_slots, capacity = self._running.max_num_seqs, self._kv.pool.capacity
        if beam_width > num_slots:
            raise InvalidArgumentError(
                f"beam_width={beam_width} beams run at once, but at most max_num_seqs={num_slots} sequences do: ask "
                "for fewer beams, or load with a higher max_num_seqs"
            )

        def needed(num_new: int) -> int:
            return self.blocks_needed(num_prompt_tokens, num_prompt_tokens + num_new - 1, beam_width)

        if needed(max_new_tokens) <= capacity:
            return
        shared = self._shared_prompt_blocks(num_prompt_tokens)
        own = self._kv.capacity.blocks_needed(num_prompt_tokens + max_new_tokens - 1) - shared
        raise RequestTooLargeError(
            f"beam_width={beam_width} beams of a prompt of {num_prompt_tokens} tokens with "
            f"max_new_tokens={max_new_tokens} need {shared} blocks that they share + {beam_width} * ({own} of each "
            f"alone + {self._kv.num_groups} for copies) = {needed(max_new_tokens)} blocks, the KV cache has "
            f"{capacity}: ask for fewer beams, shorten the prompt, lower max_new_tokens, or give the cache more memory "
            "(kv_cache_memory)",
            room=bisect_right(range(1, max_new_tokens), capacity, key=needed),
        )

    def _shared_prompt_blocks(self, num_prompt_tokens: int) -> int:
        kv = self._kv
        return 0 if any(kv.windows) else kv.num_groups * (num_prompt_tokens // kv.block_size)

    def has_room(self, seq: Sequence) -> bool:
        """Returns whether ``seq`` may be admitted: it was never preempted, or the free blocks hold all its pending
        tokens and one block more for each running sequence.

        If blocks for its next chunk were enough, as for a new sequence, decodes that need their next block would
        preempt it again a step later. On a small cache most of the work would be done twice. With nothing running it is
        always admitted.
        """
        num_running = len(self._running)
        if not seq.num_preemptions or not num_running:
            return True
        needed = self.blocks_needed(seq.num_prompt_tokens, seq.num_tokens, seq.request.sampling.beam_width)
        return needed - len(held_entries(seq)) + self._kv.num_groups * num_running <= self._kv.num_free

    def nobody_is_preempted(self, token_budget: int) -> bool:
        """Returns whether a running sequence has tokens pending, and the free blocks suffice for every decode and for
        the first prompt, copies of shared blocks included, whatever part of ``token_budget`` the policy gives to
        prompts.
        """
        kv, due, prompts = self._kv, self._running.pending_decodes, self._running.prompts[:1]
        num_blocks = len(self.forked) + sum(not seq.num_computed_tokens % kv.block_size for seq in due)
        for first in prompts:
            num_tokens = min(first.num_pending_tokens, token_budget)
            num_blocks += -(-num_tokens // kv.block_size) + 2
        return bool(due or prompts) and kv.num_groups * num_blocks <= kv.num_free

    def attach(self, seq: Sequence) -> None:
        """Gives ``seq``, which holds nothing, blocks that others computed: those in the prefix cache, or those of the
        prompt where another sequence of its request has more of them.
        """
        self._kv.attach_cached(seq)
        num_shared = min(seq.num_prompt_tokens, seq.num_tokens - 1)
        if len(seq.request.sequences) == 1 or seq.num_computed_tokens >= num_shared:
            return
        siblings = (each for each in self._running if each.request is seq.request)
        parent = next((each for each in siblings if self._kv.can_fork(each, num_shared)), None)
        if parent is not None:
            self._kv.detach(seq)
            self._kv.fork(parent, seq, num_shared)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets the beam ``child`` continue from the state of ``parent`` of the same search: with the same tokens, in
        the same blocks. The earlier state of the child is dropped.
        """
        assert parent.status is SequenceStatus.RUNNING, f"{parent} cannot be forked"
        if child.status is SequenceStatus.RUNNING:
            before, slot = set(held_entries(child)), child.slot
            assert slot is not None
            self._kv.free(child)  # publishes its blocks, so its tokens are still those that they were computed from
            self._kv.fork(parent, child, parent.num_computed_tokens)
            self._running.add_updates(BlockUpdate(slot, *entry) for entry in held_entries(child) if entry not in before)
        else:
            self._waiting.remove(child)
            self._kv.fork(parent, child, parent.num_computed_tokens)
            child.urgency = (*parent.urgency[:2], child.index)
            self._running.add_decode(child)
        child.token_ids[:] = parent.token_ids
        self.forked.add(child)

    def suspend(self, beam: Sequence) -> None:
        """Frees the blocks of ``beam``, which ended without a successor in its place, until it is forked again."""
        self._kv.free(beam)
        self._running.remove(beam)
        self.forked.discard(beam)
        beam.status, beam.num_computed_tokens = SequenceStatus.WAITING, 0
        del beam.token_ids[beam.num_prompt_tokens :]
        self._waiting.hold(beam)

    def release(self, first: Sequence) -> None:
        """Lets the beams that were preempted with ``first`` continue from the prompt that it has computed, on the slots
        reserved for them. Beams that have nothing beyond the prompt are held until they are forked.
        """
        for seq in first.request.sequences[1:]:
            if seq.status is not SequenceStatus.WAITING or seq.num_tokens == seq.num_prompt_tokens:
                continue
            self._waiting.remove(seq)
            # Take the blocks of the first beam: the prefix cache may hold other blocks for the same tokens.
            if self._kv.can_fork(first, seq.num_prompt_tokens):
                self._kv.fork(first, seq, seq.num_prompt_tokens)
            else:
                self._kv.attach_cached(seq)
            seq.urgency = (*first.urgency[:2], seq.index)
            self._running.add_prompt(seq)
