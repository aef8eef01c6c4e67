"""The scheduler: which tokens the next step computes, and in which blocks their keys and values go.

Every unfinished sequence has an urgency: its class, its turn in the class, its index in its request
(:mod:`fastgen.runtime.scheduling.waiting_queue`). A step takes

1. one token of every decode. One that finds no free block preempts the least urgent running sequence, which may be
   itself: its blocks are freed, it waits for a slot, and will be computed again from its first token;
2. prompt tokens, as many as the :mod:`policy <fastgen.runtime.scheduling.policies>` says, the most urgent prompt's
   first: of those that run and are partly computed, and of those that wait, which are admitted as long as slots last. A
   chunk is cut to what the free blocks hold. No one is admitted in a step that had to preempt, and one that was
   preempted comes back only when there is room for all that it has to compute again.

A request's sequences share its prompt. Those but the first wait until it is computed, and then take over its blocks.

**Beams** of a search move together, so all have slots or none, and where one is preempted, all are. Then the first
computes the prompt again, and the others go on from there.

**Progress.** The most urgent running sequence gets on whenever its kind runs. As a decode it preempts until it has its
block. As a prompt it has all its blocks already where everybody else was admitted after it; where one more urgent came
later, it preempts the less urgent until it has a place. Where it runs alone the cache is its own and suffices, or it
would have been refused. So running sequences finish, their slots and blocks come free, and the head of the queue is
next, for nobody passes it by. A policy may hold one kind back for the other only as long as the other gets on; and
since whoever waits comes to the head of the most urgent class one day, every sequence finishes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as SequenceOf
from itertools import islice
from operator import attrgetter

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.kv_cache.block_tables import TableEntry
from fastgen.runtime.kv_cache.forks import Forks
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.drafts import ProposeDrafts, with_drafts
from fastgen.runtime.scheduling.policies.policy import Policy, StepPlan, StepView
from fastgen.runtime.scheduling.policies.splitfuse import SplitFuse, captured_sizes, smallest_size
from fastgen.runtime.scheduling.running_set import RunningSet
from fastgen.runtime.scheduling.schedule import Schedule, ScheduledTokens
from fastgen.runtime.scheduling.spreading import Spreading
from fastgen.runtime.scheduling.step_room import StepRoom
from fastgen.runtime.scheduling.waiting_queue import DEFAULT_AGING_S, WaitingQueue

_urgency, _token_ids = attrgetter("urgency"), attrgetter("token_ids")
_num_computed_tokens = attrgetter("num_computed_tokens")


class Scheduler:
    """Continuous batching over the blocks of ``kv``, by ``policy``: Dynamic SplitFuse unless another is given.

    At most ``token_budget`` tokens and ``max_num_seqs`` sequences a step. What a step costs does not depend on how many
    requests wait. Who waits for ``aging_s`` seconds moves up a class. ``propose_drafts(seq, n)``, where given, is asked
    for at most ``n`` guesses of what follows the tokens of a decode, as long as a step has places left.

    The engine's part of a step: :meth:`schedule`, run it, :meth:`commit`, then append one token to every sequence that
    was sampled for, or :meth:`finish` it. A schedule may go uncommitted where running it failed: the next one takes its
    place, and the blocks and slots it gave stay with their sequences. Where the next step is scheduled ``ahead`` of the
    tokens of the last, it is :meth:`told` before and committed after these were appended.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        token_budget: int,
        max_num_seqs: int,
        policy: Policy | None = None,
        aging_s: float = DEFAULT_AGING_S,
        propose_drafts: ProposeDrafts | None = None,
    ):
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
        self.sizes = captured_sizes(token_budget)
        self.policy = SplitFuse() if policy is None else copy.deepcopy(policy)
        self.policy.check(max_num_seqs)
        self.waiting = WaitingQueue(aging_s)
        # Where the last step was put off by the policy: until when.
        self.resumes_at_s: float | None = None
        self._propose_drafts = propose_drafts
        self.running = RunningSet(max_num_seqs)
        self.forks = Forks(kv, self.running, self.waiting)
        self._num_opened = 0
        self._scheduled: Schedule | None = None
        self._is_told = self._is_ahead = False
        self._last_request_id: int | None = None
        self.spreading = Spreading(kv, self.running)
        self._now_s = 0.0

    @property
    def place(self) -> tuple[int, int, float]:
        """Where it is beside sequences and blocks: admissions that are open, whose turn it is to be given a spare, and
        the clock."""
        return self._num_opened, self.spreading.next_spare, self._now_s

    @place.setter
    def place(self, place: tuple[int, int, float]) -> None:
        self._num_opened, self.spreading.next_spare, self._now_s = place

    @property
    def num_waiting(self) -> int:
        """Those that have no slot."""
        return len(self.waiting) + self.waiting.num_held

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self.running, *self.waiting, *self.waiting.held]

    def add(self, request: Request) -> None:
        """Queue every sequence of ``request``, whose id must be above all those added before.

        :raises RequestTooLargeError: where a sequence could never finish; nothing is queued then.
        """
        self.check_fits(len(request.prompt_ids), request.sampling)
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """The same, of a request that is known to fit."""
        if self._last_request_id is not None and request.request_id <= self._last_request_id:
            raise InvalidArgumentError(f"{request} comes after request {self._last_request_id}: ids must ascend")
        self._last_request_id = request.request_id
        self.waiting.add(request)

    def check_fits(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        """Refuse a request that could not finish even with all slots and the whole cache to itself, saying why."""
        self.kv.check_fits(num_prompt_tokens, sampling.max_new_tokens)
        self.forks.check_fits(num_prompt_tokens, sampling.max_new_tokens, sampling.beam_width)

    def finish(self, seq: Sequence) -> None:
        """Drop ``seq``, done or cancelled, whatever it is doing; its blocks and its slot are free at once."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.RUNNING:
            self._stop(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        if seq.index == 0 and not seq.request.has_beams:
            self.waiting.release(seq, self._now_s)

    def schedule(self, now_s: float = 0.0) -> Schedule | None:
        """The next step, by the clock's ``now_s``. ``None`` where no sequence is left, or the policy waits for more;
        however often that is, later steps are the same.
        """
        self._is_ahead = False
        return self._schedule(now_s)

    def schedule_ahead(self, now_s: float) -> Schedule | None:
        """The same, while tokens of the step committed last are not known.

        A sequence whose token is only awaited has :data:`TO_COME` in its place, and is scheduled like any other. One
        that must have it first has nothing there, and is left out. ``None``, with nothing changed, where there is
        nothing to compute without these, or somebody might have to be preempted: a step that knows all tokens may do
        that.
        """
        self.running.some_wait = True
        try:
            schedule = self._schedule(now_s) if self.forks.nobody_is_preempted(self.token_budget) else None
            assert schedule is None or not schedule.preempted
        finally:
            self.running.some_wait = False
        self._is_ahead = schedule is not None
        return schedule

    def _schedule(self, now_s: float) -> Schedule | None:
        self._now_s, self.resumes_at_s = now_s, None
        if not self.running.prompts and not self.waiting:
            return self._schedule_decodes()
        if not self.running and (until_s := self._plan([]).until_s) is not None:
            self.resumes_at_s = until_s
            return None
        self.waiting.age(now_s)  # that leaves the head of the queue, so the policy does not wait now either
        if self.running.prompts or (self.waiting and self.running.num_free_slots):
            self.kv.settle()  # so that prompts have what blocks and prefixes there are
        preempted: list[Sequence] = []
        self._make_way(preempted)
        plan = self._plan(preempted)
        assert plan.until_s is None, f"{self.policy} puts a step off while sequences run"
        decodes: list[Sequence] = []
        room = StepRoom(self.policy, decodes, self.sizes)
        chunks = [] if plan.runs_decodes else self._give_prompts(plan, room, may_admit=not preempted)
        if not chunks:
            num_preempted = len(preempted)
            self._give_decodes(preempted)
            decodes = self.running.due_decodes
            if len(preempted) > num_preempted:
                plan = self._plan(preempted)
            room = StepRoom(self.policy, decodes, self.sizes)
            if plan.runs_decodes or not decodes:
                chunks = self._give_prompts(plan, room, may_admit=not preempted)
        return self._close(decodes, chunks, preempted, room)

    def _schedule_decodes(self) -> Schedule | None:
        """The next step where decodes are all there is: nothing is to be shared out, so no policy is asked."""
        if not self.running.decodes:
            return None
        preempted: list[Sequence] = []
        self._give_decodes(preempted)
        decodes = self.running.due_decodes
        return self._close(decodes, [], preempted, StepRoom(self.policy, decodes, self.sizes))

    def told(self, schedule: Schedule) -> None:
        """The device has the block updates and copies of ``schedule``; what comes from now on is for the next one."""
        assert schedule is self._scheduled, "only of the schedule made last can the device be told"
        self._is_told = True
        self.running.told()
        if schedule.block_copies:
            self.kv.copies_done(schedule.block_copies)

    def commit(self, schedule: Schedule) -> None:
        """``schedule`` has been run: its tokens are computed, and the device is :meth:`told`. Of drafts nothing is
        known yet; :meth:`accept` tells.

        A sequence that was finished in the meantime is passed over.
        """
        assert schedule is self._scheduled, "only the schedule made last can be committed, and only once"
        if not self._is_told:
            self.told(schedule)
        self._scheduled = None
        running, block_size = SequenceStatus.RUNNING, self.kv.block_size
        full: list[Sequence] = []
        for seq, position in zip(schedule.decodes, schedule.positions, strict=True):
            if seq.status is running:
                seq.num_computed_tokens = end = position + 1
                if not end % block_size:
                    full.append(seq)
        self.spreading.advance(full, len(schedule.decodes))
        for chunk in schedule.chunks:
            seq = chunk.seq
            if seq.status is running:
                seq.num_computed_tokens = chunk.end - len(chunk.drafts)
                self.kv.advance(seq)
                if not chunk.drafts and seq.num_computed_tokens >= seq.num_prompt_tokens:
                    self._note_prompt(seq)

    def accept(self, seq: Sequence, num_drafts: int) -> None:
        """Of the committed chunk of ``seq`` so many drafts were right and are among its tokens now."""
        seq.num_computed_tokens += num_drafts
        assert seq.num_computed_tokens < seq.num_tokens, f"{seq} has accepted {num_drafts} drafts that it does not have"
        self.kv.advance(seq)

    def observe(self, schedule: Schedule, step_s: float) -> None:
        """The step of ``schedule`` took ``step_s`` seconds, all of it."""
        if self.policy.observes:
            self.policy.observe(schedule.work, step_s)

    def check_integrity(self) -> None:
        """Assert that blocks, slots and the order of urgency are all accounted for, and so is the schedule made last
        where it is not committed, unless it was made ahead of its tokens.
        """
        self.kv.check_integrity(self.running)
        self.running.check_integrity()
        self.waiting.check_integrity()
        assert self.forks.forked <= set(self.running.decodes), f"forked: {self.forks.forked}"
        made = None if self._is_ahead else self._scheduled
        if made is not None and all(entry.seq.slot is not None for entry in made.entries):
            made.check(self.kv, self.token_budget)

    def _plan(self, preempted: list[Sequence]) -> StepPlan:
        num_free_slots = 0 if preempted else self.running.num_free_slots
        view = StepView(
            decodes=self.running.due_decodes,
            prompts=self.running.prompts,
            waiting=islice(self.waiting, num_free_slots),
            num_waiting=len(self.waiting),
            num_free_slots=num_free_slots,
            num_opened=self._num_opened,
            token_budget=self.token_budget,
            sizes=self.sizes,
            now_s=self._now_s,
        )
        plan = self.policy.plan(view)
        if plan.until_s is None:
            self._num_opened = plan.num_admissions
        return plan

    def _make_way(self, preempted: list[Sequence]) -> None:
        """Let the most urgent running sequence have places where it is a prompt, before decodes take all blocks."""
        if not self.running.prompts:
            return
        first = self.running.prompts[0]
        if any(seq.urgency < first.urgency for seq in self.running.due_decodes):
            return
        num_tokens = 1 if self.policy.splits_prompts else min(first.num_pending_tokens, self.token_budget)
        while not self._allocate(first, num_tokens):
            preempted += self._preempt_least_urgent()

    def _give_decodes(self, preempted: list[Sequence]) -> None:
        """Blocks for the next token of every decode, or for that of as many as there are blocks for."""
        block_size = self.kv.block_size
        decodes = self.running.due_decodes
        wanting = [seq for seq in decodes if not seq.num_computed_tokens % block_size]
        num_wanting = len(wanting)
        wanting = self.kv.spares.use(wanting)
        if self.forks.forked:
            wanting += [seq for seq in self.forks.forked if seq.num_computed_tokens % block_size]
        wanting.sort(key=_urgency)
        for seq in wanting:
            # The least urgent go first, so whoever is preempted is less urgent than all that have their block.
            while seq.status is SequenceStatus.RUNNING and not self._allocate(seq, 1):
                preempted += self._preempt_least_urgent()
        self.forks.forked.clear()
        if not preempted and not self.running.prompts:
            self.spreading.give_spares(decodes, num_wanting)

    def _give_prompts(self, plan: StepPlan, room: StepRoom, *, may_admit: bool) -> list[ScheduledTokens]:
        """Chunks of the most urgent prompts, until places or blocks run out."""
        chunks: list[ScheduledTokens] = []
        num_places = plan.num_prompt_tokens
        prompts = iter(tuple(self.running.prompts))
        running = next(prompts, None)
        while num_places:
            waiting = self._admissible() if may_admit else None
            if waiting is not None and (running is None or waiting.urgency < running.urgency):
                chunk = self._give_chunk(waiting, num_places, plan, room)
                if chunk is None:  # nobody passes it by, but who runs goes on
                    may_admit = False
                    continue
            elif running is not None:
                chunk = self._give_chunk(running, num_places, plan, room)
                running = next(prompts, None)
            else:
                break
            if chunk is None:  # no place or no block is left, and then none for the less urgent either
                break
            chunks.append(chunk)
            room.take(chunk)
            num_places -= chunk.num_tokens
            if not chunk.samples:
                break
        return chunks

    def _admissible(self) -> Sequence | None:
        """The head of the queue, if there is a slot, for beams one for each, and the policy lets it in."""
        seq = self.waiting.head if self.running.num_free_slots else None
        if seq is None or (seq.begins_request and not self._num_opened):
            return None
        return seq if self.running.num_free_slots >= seq.request.sampling.beam_width else None

    def _give_chunk(self, seq: Sequence, num_places: int, plan: StepPlan, room: StepRoom) -> ScheduledTokens | None:
        """The next pending tokens of ``seq`` with blocks for them, and a slot where it was waiting; or ``None`` with
        nothing changed. ``num_places`` are left of those that the ``plan`` has for prompts.
        """
        waits = seq.status is SequenceStatus.WAITING
        if waits and self.kv.num_free < self.kv.num_groups:  # whatever others have computed: it is not looked up
            return None
        chunk = None
        try:
            if waits:
                self.forks.attach(seq)
            num_pending, num_free = seq.num_pending_tokens, self.kv.max_tokens(seq)
            num_tokens = min(num_pending, num_places, num_free)
            if not self.policy.splits_prompts and num_tokens < min(num_pending, plan.num_prompt_tokens):
                num_tokens = 0
            num_tokens = room.limit(seq.num_computed_tokens, num_tokens)
            if num_tokens > 0 and (not waits or self.forks.has_room(seq)) and self._allocate(seq, num_tokens):
                if waits:
                    self.waiting.remove(seq)
                    self.running.add_prompt(seq)
                    self._num_opened -= seq.begins_request
                chunk = ScheduledTokens(seq, seq.num_computed_tokens, num_tokens, samples=num_tokens == num_pending)
        finally:
            if waits and chunk is None:
                self.forks.detach(seq)
        return chunk

    def _close(
        self, decodes: list[Sequence], chunks: list[ScheduledTokens], preempted: list[Sequence], room: StepRoom
    ) -> Schedule:
        """The schedule, with drafts as far as there is ``room``, and the assertions that cost little;
        :meth:`Schedule.check` has all."""
        if self._propose_drafts is not None and decodes:
            num_places = room.limit_drafts(self.token_budget - _num_tokens(decodes, chunks))
            decodes, drafted = with_drafts(decodes, num_places, self._propose_drafts, self._allocate)
            chunks += drafted
        positions = tuple(map(_num_computed_tokens, decodes))
        if sum(map(len, map(_token_ids, decodes))) != sum(positions) + len(decodes):
            caught_up = [seq for seq in decodes if seq.num_pending_tokens != 1]
            raise AssertionError(f"neither given a token nor finished after their last step: {caught_up}")
        num_tokens = _num_tokens(decodes, chunks)
        assert 0 < num_tokens <= self.token_budget, f"{self.policy} made a step of {num_tokens} tokens"
        self._is_told = False
        self._scheduled = Schedule(
            decodes=tuple(decodes),
            positions=positions,
            chunks=tuple(chunks),
            block_updates=self.running.block_updates,
            block_copies=self.kv.pending_copies,
            preempted=tuple(preempted),
            num_tokens=num_tokens,
            size=smallest_size(num_tokens, self.sizes),
        )
        return self._scheduled

    def _allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Blocks for the next tokens of ``seq``; the device will be told where it has a slot."""
        allocation = self.kv.allocate(seq, num_tokens)
        if allocation is None:
            return False
        if seq.slot is not None:
            copied = (TableEntry(copy.group, copy.table_index, copy.destination) for copy in allocation.copies)
            self.running.tell(seq, (*allocation.appended, *copied))
        return True

    def _note_prompt(self, seq: Sequence) -> None:
        """The prompt of ``seq`` is computed: it may be a decode now, and it is its siblings' turn."""
        if seq.num_pending_tokens <= 1:
            self.running.make_decode(seq)
        if seq.index == 0 and seq.request.has_beams:
            self.forks.release(seq)
        elif seq.index == 0:
            self.waiting.release(seq, self._now_s)

    def _preempt_least_urgent(self) -> list[Sequence]:
        """Who was preempted: one sequence, or all beams of a search that run."""
        chosen = self.running.least_urgent
        beams = [seq for seq in chosen.request.sequences if seq.status is SequenceStatus.RUNNING]
        lost = beams if chosen.request.has_beams else [chosen]
        assert len(self.running) > len(lost), f"{lost} has the cache to itself, which was found to suffice when it came"
        for seq in lost:
            self._stop(seq)
            seq.status = SequenceStatus.WAITING
            seq.num_computed_tokens = 0
            seq.num_preemptions += 1
            self.waiting.hold(seq)
        first = chosen.request.sequences[0] if chosen.request.has_beams else chosen
        self.waiting.remove(first)
        self.waiting.put_back(first, self._now_s)
        return lost

    def _stop(self, seq: Sequence) -> None:
        """Free the blocks and the slot of a running sequence."""
        self.kv.free(seq)
        self.running.remove(seq)
        self.forks.forked.discard(seq)


def _num_tokens(decodes: SequenceOf[Sequence], chunks: SequenceOf[ScheduledTokens]) -> int:
    return len(decodes) + (sum(chunk.num_tokens for chunk in chunks) if chunks else 0)
