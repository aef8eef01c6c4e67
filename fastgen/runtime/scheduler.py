"""The scheduler: which tokens the next step computes, and in which blocks their keys and values go.

It keeps the sequences in order of arrival, the running ones an oldest prefix of them and the waiting ones the rest,
and nothing ever overtakes. A step takes

1. one token of every decode. One that finds no free block preempts the youngest running sequence, which may be itself:
   its blocks are freed, it waits at the head of the queue, and will be computed again from its first token;
2. prompt tokens, as many as :mod:`fastgen.runtime.policies.splitfuse` says: those of running prompts, partly computed,
   then those of waiting ones, which are admitted as long as seats last. A chunk is cut to what the free blocks hold.
   Nothing is preempted for it, and no one is admitted in a step that had to preempt. One that was preempted comes back
   only when there is room for all that it has to compute again.

So the oldest sequence gets on in every step, and every sequence becomes the oldest one day. As a decode it preempts
until it has its block. As a prompt it has all its blocks already where any running sequence is younger, for nobody is
admitted before the older ones were given theirs; where none is, the cache is its own and suffices, or it would have
been refused.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.kv_cache_manager import KVCacheManager
from fastgen.runtime.policies import splitfuse
from fastgen.runtime.request import Request, Sequence, SequenceStatus


class BlockUpdate(NamedTuple):
    """``block_tables[group, seat, table_index] = block_id`` on the device."""

    seat: int
    group: int
    table_index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Tokens ``start .. end - 1`` of ``seq``; ``samples`` where nothing remains pending, so that the step samples
    the next token.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one step computes.

    ``entries`` are in order of arrival, the decodes before the prompts. ``size`` is the captured size to run at.
    ``block_updates`` are the entries of the block tables that the device has not been given. ``preempted`` lost their
    seats and blocks before the step.
    """

    entries: tuple[ScheduledTokens, ...]
    block_updates: tuple[BlockUpdate, ...]
    preempted: tuple[Sequence, ...]
    size: int

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def decodes(self) -> tuple[Sequence, ...]:
        """Those that get one token each, the one they were given last."""
        return tuple(entry.seq for entry in self.entries if entry.seq.is_decode)

    @property
    def chunks(self) -> tuple[ScheduledTokens, ...]:
        return self.entries[len(self.decodes) :]

    def check(self, kv: KVCacheManager, token_budget: int) -> None:
        """Assert what a step relies on: it fits its size, and its tokens are pending, seated and have their blocks."""
        assert 0 < self.num_tokens <= self.size <= token_budget, f"{self.num_tokens} tokens at size {self.size}"
        seats = {entry.seq.seat for entry in self.entries}
        assert None not in seats, "an entry has no seat"
        assert len(seats) == len(self.entries), f"{len(self.entries)} entries on the seats {seats}"
        for older, younger in pairwise(self.entries):
            assert older.seq.key < younger.seq.key, f"{younger} stands behind {older}"
        for entry in self.entries:
            seq = entry.seq
            assert seq.num_computed_tokens == entry.start < entry.end <= seq.num_tokens, (
                f"{entry} is not what is pending"
            )
            assert entry.samples == (entry.end == seq.num_tokens), f"{entry} samples before it has caught up"
            assert len(seq.block_tables) == kv.num_groups, f"{entry} has {len(seq.block_tables)} block tables"
            for table in seq.block_tables:
                assert entry.end <= len(table) * kv.block_size, f"{entry} has only the blocks {table}"


class Scheduler:
    """Continuous batching under Dynamic SplitFuse, over the blocks of ``kv``.

    At most ``token_budget`` tokens and ``max_num_seqs`` sequences a step. What a step costs does not depend on how many
    requests wait: as many of them are looked at as there are free seats.

    The engine's part of a step: :meth:`schedule`, run it, :meth:`commit`, then append one token to every sequence whose
    entry ``samples``, or :meth:`finish` it. A schedule may go uncommitted where running it failed: the next one takes
    its place, and the blocks and seats it gave stay with their sequences.
    """

    def __init__(self, kv: KVCacheManager, *, token_budget: int, max_num_seqs: int):
        if max_num_seqs < 1:
            raise InvalidArgumentError(f"max_num_seqs is {max_num_seqs}, but must be at least 1")
        if token_budget < max_num_seqs:
            raise InvalidArgumentError(
                f"token_budget {token_budget} is below max_num_seqs {max_num_seqs}, but each running sequence takes a "
                "token of every step: raise token_budget or lower max_num_seqs"
            )
        self.kv = kv
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.sizes = splitfuse.captured_sizes(token_budget)
        self.running: list[Sequence] = []
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._free_seats = list(reversed(range(max_num_seqs)))
        self._updates_of_seat: dict[int, list[BlockUpdate]] = {}
        self._scheduled: Schedule | None = None
        self._last_request_id: int | None = None

    def add(self, request: Request) -> None:
        """Queue every sequence of ``request``, whose id must be above all those added before.

        :raises RequestTooLargeError: where a sequence could never finish; nothing is queued then.
        """
        self.kv.check_fits(len(request.prompt_ids), request.sampling.max_new_tokens)
        if self._last_request_id is not None and request.request_id <= self._last_request_id:
            raise InvalidArgumentError(f"{request} comes after request {self._last_request_id}: ids must ascend")
        self._last_request_id = request.request_id
        self.waiting.update(dict.fromkeys(request.sequences))

    def finish(self, seq: Sequence) -> None:
        """Drop ``seq``, done or cancelled, whatever it is doing; its blocks and its seat are free at once."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._release(seq)
        else:
            del self.waiting[seq]
        seq.status = SequenceStatus.FINISHED

    def schedule(self) -> Schedule | None:
        """The next step, or ``None`` where no sequence is left. Some sequence always gets tokens otherwise."""
        caught_up = [seq for seq in self.running if seq.num_pending_tokens < 1]
        assert not caught_up, f"neither given a token nor finished after their last step: {caught_up}"
        if not self.running and not self.waiting:
            return None

        preempted: list[Sequence] = []
        decodes = self._schedule_decodes(preempted)
        prompts = self._schedule_prompts(len(decodes), may_admit=not preempted)

        entries = (*decodes, *prompts)
        schedule = Schedule(
            entries=entries,
            block_updates=tuple(update for updates in self._updates_of_seat.values() for update in updates),
            preempted=tuple(preempted),
            size=splitfuse.smallest_size(sum(entry.num_tokens for entry in entries), self.sizes),
        )
        schedule.check(self.kv, self.token_budget)
        self._scheduled = schedule
        return schedule

    def commit(self, schedule: Schedule) -> None:
        """``schedule`` has been run: its tokens are computed and the device has its block updates.

        A sequence that was finished in the meantime is passed over.
        """
        assert schedule is self._scheduled, "only the schedule made last can be committed, and only once"
        self._scheduled = None
        self._updates_of_seat.clear()
        for entry in schedule.entries:
            if entry.seq.status is SequenceStatus.RUNNING:
                entry.seq.num_computed_tokens = entry.end

    def check_integrity(self) -> None:
        """Assert that blocks, seats and the order of arrival are all accounted for."""
        self.kv.check_integrity(self.running)
        seats = [seq.seat for seq in self.running]
        assert sorted([*self._free_seats, *(seat for seat in seats if seat is not None)]) == list(
            range(self.max_num_seqs)
        ), f"seats {seats} taken, {self._free_seats} free"
        for older, younger in pairwise([*self.running, *self.waiting]):
            assert older.key < younger.key, f"{younger} stands behind {older}"
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.running), f"running: {self.running}"
        assert all(seq.status is SequenceStatus.WAITING for seq in self.waiting), f"waiting: {self.waiting}"
        for seq in self.waiting:
            assert seq.seat is None, f"{seq} waits on seat {seq.seat}"
            assert not seq.block_tables, f"{seq} waits with the blocks {seq.block_tables}"
            assert seq.num_computed_tokens == 0, f"{seq} waits"
        assert self._updates_of_seat.keys() <= set(seats), f"updates for the seats {list(self._updates_of_seat)}"

    def _schedule_decodes(self, preempted: list[Sequence]) -> list[ScheduledTokens]:
        entries = []
        for seq in [seq for seq in self.running if seq.is_decode]:
            # The youngest go first, so whoever an older decode has preempted is younger than all that have their token.
            while seq.status is SequenceStatus.RUNNING:
                if (entry := self._give(seq, 1)) is not None:
                    entries.append(entry)
                    break
                preempted.append(self._preempt_youngest())
        return entries

    def _schedule_prompts(self, num_decodes: int, *, may_admit: bool) -> list[ScheduledTokens]:
        # The passes are shared by the prompts that have a seat or could be given one now. Whether all of them will find
        # blocks is not asked: those come free while the passes go on.
        prompts = [seq for seq in self.running if not seq.is_decode]
        if may_admit:
            prompts += islice(self.waiting, len(self._free_seats))
        num_pending = sum(seq.num_pending_tokens for seq in prompts)
        _, num_places = splitfuse.plan(num_decodes, num_pending, self.token_budget, self.sizes)

        entries: list[ScheduledTokens] = []
        for seq in prompts:
            if seq.status is SequenceStatus.WAITING and seq.num_preemptions and not self._has_room(seq):
                break
            num_tokens = min(seq.num_pending_tokens, num_places, self.kv.max_tokens(seq))
            entry = self._give(seq, num_tokens) if num_tokens > 0 else None
            if entry is None:  # no place or no block is left, and then none for the younger ones either
                break
            entries.append(entry)
            num_places -= num_tokens
        return entries

    def _has_room(self, seq: Sequence) -> bool:
        """Whether the free blocks hold all that is pending of the preempted ``seq``, and one more for each that runs.

        Were blocks for its next chunk enough, as for one that comes the first time, then the decodes that want the next
        block would preempt it again and again, a step after it came back: on a small cache most of all work would be
        done over. The oldest is never kept waiting.
        """
        if not self.running:
            return True
        return self.kv.blocks_needed(seq.num_tokens) + self.kv.num_groups * len(self.running) <= self.kv.pool.num_free

    def _give(self, seq: Sequence, num_tokens: int) -> ScheduledTokens | None:
        """The next ``num_tokens`` pending tokens of ``seq`` with blocks for them, and a seat where it was waiting; or
        ``None`` with nothing changed.
        """
        blocks = self.kv.allocate(seq, num_tokens)
        if blocks is None:
            return None
        if seq.seat is None:
            self._admit(seq)
        assert seq.seat is not None
        if blocks:
            updates = self._updates_of_seat.setdefault(seq.seat, [])
            updates.extend(BlockUpdate(seq.seat, group, index, block_id) for group, index, block_id in blocks)
        return ScheduledTokens(seq, seq.num_computed_tokens, num_tokens, samples=num_tokens == seq.num_pending_tokens)

    def _admit(self, seq: Sequence) -> None:
        seq.seat = self._free_seats.pop()
        del self.waiting[seq]
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)

    def _preempt_youngest(self) -> Sequence:
        assert len(self.running) > 1, f"{self.running} has the cache to itself, which was found to suffice when it came"
        seq = self.running.pop()
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        return seq

    def _release(self, seq: Sequence) -> None:
        """Free the blocks and the seat of a running sequence, with what the device has not been told of them."""
        assert seq.seat is not None
        self.kv.free(seq)
        self._updates_of_seat.pop(seq.seat, None)
        self._free_seats.append(seq.seat)
        seq.seat = None
