"""The scheduler: which tokens the next step computes, and in which blocks their keys and values go.

Every unfinished sequence has an urgency: its class, its turn in the class, its index in its request
(:mod:`fastgen.runtime.scheduling.waiting_queue`). A step takes

1. one token of every decode. A decode that finds no free block preempts the least urgent running sequence, which may be
   the decode itself: its blocks are freed, it waits for a slot, and is computed again from its first token;
2. prompt tokens, as many as the :mod:`policy <fastgen.runtime.scheduling.policies>` says. The most urgent prompt comes
   first, whether it runs and is partly computed, or waits. Waiting ones are admitted as long as there are slots. A
   chunk is cut to what the free blocks hold. A step that had to preempt admits nothing. A preempted sequence is
   admitted again only when there is room for everything that it has to compute again.

The sequences of a request share its prompt. All but the first wait until it is computed, and then take its blocks.

**Beams** of a search move together. So all of them have slots or none, and a preemption takes all. Then the first beam
computes the prompt again, and the others continue from there.

**Progress.** The most urgent running sequence makes progress in every step that runs its kind. As a decode it preempts
until it has its block. As a prompt it has all its blocks already if the others were admitted after it; otherwise it
preempts the less urgent until it has a place. Alone, it has the whole cache, which suffices, or the request would have
been refused. So running sequences finish, their slots and blocks become free, and the head of the queue is admitted
next, because no sequence overtakes it. A policy may delay one kind for the other only while the other makes progress. A
waiting sequence reaches the head of the most urgent class at some time, so every sequence finishes.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from itertools import islice
from operator import attrgetter

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.drafts import ProposeDrafts, with_drafts
from fastgen.runtime.scheduling.forks import Forks
from fastgen.runtime.scheduling.policies.policy import Policy, StepPlan, StepView
from fastgen.runtime.scheduling.policies.splitfuse import SplitFuse, captured_sizes, smallest_size
from fastgen.runtime.scheduling.preemption import Preemption
from fastgen.runtime.scheduling.reservations import Reservations
from fastgen.runtime.scheduling.running_set import RunningSet
from fastgen.runtime.scheduling.schedule import Schedule, ScheduledTokens, tokens_of
from fastgen.runtime.scheduling.step_room import StepRoom
from fastgen.runtime.scheduling.waiting_queue import DEFAULT_AGING_S, WaitingQueue

_urgency = attrgetter("urgency")


class Scheduler:
    """Schedules continuous batches over the blocks of ``kv``, by ``policy``; by default Dynamic SplitFuse.

    A step has at most ``token_budget`` tokens and ``max_num_seqs`` sequences. Its cost does not depend on how many
    requests wait. A sequence that has waited for ``aging_s`` seconds moves up a class. ``propose_drafts(seq, n)``, if
    given, returns at most ``n`` guesses of what follows the tokens of a decode; it is called while a step has places
    left. :class:`~fastgen.runtime.scheduling.reservations.Reservations` explains ``kv_reservation``.

    For each step the engine calls :meth:`schedule`, runs the step, calls :meth:`commit`, and then appends one token to
    each sampled sequence or calls :meth:`finish`. If a step fails, its schedule is not committed: the next one takes
    its place, and the blocks and slots that it gave stay with their sequences. If a step is scheduled ahead of the
    tokens of the last one, :meth:`launched` is called before these tokens are appended, and :meth:`commit` afterwards.
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
        kv_reservation: str | None = None,
        max_model_len: int | None = None,
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
        # Until when the policy has postponed the last step, if it has.
        self.resumes_at_s: float | None = None
        self._propose_drafts = propose_drafts
        self.running = RunningSet(max_num_seqs)
        self.forks = Forks(kv, self.running, self.waiting)
        self.reservations = Reservations(kv, self.forks, kv_reservation, max_model_len)
        self._preemption = Preemption(kv, self.running, self.waiting, self.forks, self.reservations)
        self._num_opened = 0
        self._scheduled: Schedule | None = None
        self._is_launched = self._is_ahead = False
        self._last_request_id: int | None = None
        self._now_s = 0.0

    def use_policy(self, policy: Policy) -> None:
        """Replaces the policy by a copy of ``policy``. No sequence may run or wait. Raises ``InvalidArgumentError`` for
        one that cannot work with ``max_num_seqs`` sequences; nothing changes then.
        """
        assert not self.unfinished, "a policy is replaced between requests only"
        policy.check(self.max_num_seqs)
        self.policy, self.resumes_at_s, self._num_opened = copy.deepcopy(policy), None, 0

    @property
    def place(self) -> tuple[int, float]:
        """Returns the open admissions and the clock, for snapshots."""
        return self._num_opened, self._now_s

    @place.setter
    def place(self, place: tuple[int, float]) -> None:
        self._num_opened, self._now_s = place

    @property
    def num_waiting(self) -> int:
        """Returns how many sequences have no slot."""
        return len(self.waiting) + self.waiting.num_held

    @property
    def are_slots_wanted(self) -> bool:
        """Returns whether sequences wait and every slot is taken."""
        return self.num_waiting > 0 and not self.running.num_free_slots

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self.running, *self.waiting, *self.waiting.held]

    def add(self, request: Request) -> None:
        """Queues every sequence of ``request``, whose id must be above all earlier ones.

        :raises RequestTooLargeError: where a sequence could never finish; nothing is queued then.
        """
        self.check_fits(len(request.prompt_ids), request.sampling)
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Queues a request that is known to fit."""
        if self._last_request_id is not None and request.request_id <= self._last_request_id:
            raise InvalidArgumentError(f"{request} comes after request {self._last_request_id}: ids must ascend")
        self._last_request_id = request.request_id
        self.waiting.add(request)

    def check_fits(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        """Refuses a request that could not finish even with all slots and the whole cache to itself, with the
        arithmetic.
        """
        self.kv.capacity.check_fits(num_prompt_tokens, sampling.max_new_tokens)
        self.reservations.check_fits(num_prompt_tokens, sampling)

    def finish(self, seq: Sequence) -> None:
        """Ends ``seq``, done or cancelled, in any state; its blocks and its slot are free at once."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.RUNNING:
            self._preemption.stop(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        if seq.index == 0 and not seq.request.has_beams:
            self.waiting.release(seq, self._now_s)

    def schedule(self, now_s: float = 0.0) -> Schedule | None:
        """Returns the next step at the clock's ``now_s``; ``None`` where no sequence is left, or the policy waits for
        more. Further calls that return ``None`` do not change later steps.
        """
        self._is_ahead = False
        return self._schedule(now_s)

    def schedule_ahead(self, now_s: float) -> Schedule | None:
        """Returns the next step while tokens of the step committed last are not known yet.

        A sequence whose token is awaited has :data:`TO_COME` in its place and is scheduled like any other. A sequence
        that needs its token first has nothing there, and is left out. ``None``, with nothing changed, where nothing can
        be computed without these tokens, or a sequence might have to be preempted, which needs a step that knows all
        tokens.
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
        self.waiting.age(now_s)  # the head of the queue stays the same, so the policy does not wait now either
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
            decodes = self.running.pending_decodes
            if len(preempted) > num_preempted:
                plan = self._plan(preempted)
            room = StepRoom(self.policy, decodes, self.sizes)
            if plan.runs_decodes or not decodes:
                chunks = self._give_prompts(plan, room, may_admit=not preempted)
        return self._close(decodes, chunks, preempted, room)

    def _schedule_decodes(self) -> Schedule | None:
        """Returns the next step where there are only decodes: nothing is shared out, so the policy is not asked."""
        if not self.running.decodes:
            return None
        preempted: list[Sequence] = []
        self._give_decodes(preempted)
        decodes = self.running.pending_decodes
        return self._close(decodes, [], preempted, StepRoom(self.policy, decodes, self.sizes))

    def launched(self, schedule: Schedule) -> None:
        """Marks ``schedule`` as launched: the device has its block updates and copies, and later ones are for the next
        step.
        """
        assert schedule is self._scheduled, "only the schedule made last can be launched"
        self._is_launched = True
        self.running.updates_launched()
        if schedule.block_copies:
            self.kv.copies_done(schedule.block_copies)

    def commit(self, schedule: Schedule, postponed: Collection[Sequence] = ()) -> None:
        """Marks ``schedule`` as run: its tokens are computed. How many drafts are right is reported later, by
        :meth:`accept`.

        A sequence that was finished in the meantime is ignored. The last token of one that is ``postponed`` does not
        count: a later step computes it again, since nothing was sampled after it.
        """
        assert schedule is self._scheduled, "only the schedule made last can be committed, and only once"
        if not self._is_launched:
            self.launched(schedule)
        self._scheduled = None
        running, block_size = SequenceStatus.RUNNING, self.kv.block_size
        for seq in schedule.decodes if not postponed else [seq for seq in schedule.decodes if seq not in postponed]:
            if seq.status is running:
                seq.num_computed_tokens = end = seq.num_computed_tokens + 1
                if not end % block_size:
                    self.kv.advance_decode(seq)
        for chunk in schedule.chunks:
            seq = chunk.seq
            if seq.status is running:
                seq.num_computed_tokens = chunk.end - len(chunk.drafts) - (seq in postponed)
                self.kv.advance(seq)
                if not chunk.drafts and seq.num_computed_tokens >= seq.num_prompt_tokens:
                    self._note_prompt(seq)

    def accept(self, seq: Sequence, num_drafts: int) -> None:
        """Counts ``num_drafts`` drafts of the committed chunk of ``seq`` as computed; they are among its tokens now."""
        seq.num_computed_tokens += num_drafts
        assert seq.num_computed_tokens < seq.num_tokens, f"{seq} has accepted {num_drafts} drafts that it does not have"
        self.kv.advance(seq)

    def observe(self, schedule: Schedule, step_s: float) -> None:
        """Reports to the policy that the step of ``schedule`` took ``step_s`` seconds in all."""
        if self.policy.observes:
            self.policy.observe(schedule.work, step_s)

    def check_integrity(self) -> None:
        """Asserts that all owners agree, and so does a schedule that is not committed, unless it was made ahead."""
        self.kv.check_integrity(self.running)
        self.running.check_integrity()
        self.reservations.check_integrity(list(self.running))
        self.waiting.check_integrity()
        assert self.forks.forked <= set(self.running.decodes), f"forked: {self.forks.forked}"
        made = None if self._is_ahead else self._scheduled
        if made is not None and all(entry.seq.slot is not None for entry in made.entries):
            made.check(self.kv, self.token_budget)

    def _plan(self, preempted: list[Sequence]) -> StepPlan:
        num_free_slots = 0 if preempted else self.running.num_free_slots
        view = StepView(
            decodes=self.running.pending_decodes,
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
        """Makes room for the most urgent running sequence, where it is a prompt, before decodes take all blocks."""
        if not self.running.prompts:
            return
        first = self.running.prompts[0]
        if any(seq.urgency < first.urgency for seq in self.running.pending_decodes):
            return
        num_tokens = 1 if self.policy.splits_prompts else min(first.num_pending_tokens, self.token_budget)
        while not self._allocate(first, num_tokens):
            preempted += self._preemption.preempt_least_urgent(self._now_s)

    def _give_decodes(self, preempted: list[Sequence]) -> None:
        """Allocates blocks for the next token of every decode, or of as many decodes as there are blocks for."""
        block_size = self.kv.block_size
        decodes = self.running.pending_decodes
        full = [seq for seq in decodes if not seq.num_computed_tokens % block_size]
        # Others have a block already, of a step that failed.
        wanting = [seq for seq in full if len(seq.block_tables[0]) * block_size == seq.num_computed_tokens]
        wanting.sort(key=_urgency)
        if self.kv.append_blocks(wanting):
            for seq in wanting:
                self.running.add_blocks(seq, len(seq.block_tables[0]) - 1)
            wanting = []
        if self.forks.forked:
            wanting += [seq for seq in self.forks.forked if seq.num_computed_tokens % block_size]
            wanting.sort(key=_urgency)
        for seq in wanting:
            # The least urgent are preempted first, so they are less urgent than all that have their block.
            while seq.status is SequenceStatus.RUNNING and not self._allocate(seq, 1):
                preempted += self._preemption.preempt_least_urgent(self._now_s)
        self.forks.forked.clear()

    def _give_prompts(self, plan: StepPlan, room: StepRoom, *, may_admit: bool) -> list[ScheduledTokens]:
        """Returns chunks of the most urgent prompts, until places or blocks run out."""
        chunks: list[ScheduledTokens] = []
        num_places = plan.num_prompt_tokens
        prompts = iter(tuple(self.running.prompts))
        running = next(prompts, None)
        while num_places:
            waiting = self._admissible() if may_admit else None
            if waiting is not None and (running is None or waiting.urgency < running.urgency):
                chunk = self._give_chunk(waiting, num_places, plan, room)
                if chunk is None:  # nothing overtakes it, but running prompts continue
                    may_admit = False
                    continue
            elif running is not None:
                chunk = self._give_chunk(running, num_places, plan, room)
                running = next(prompts, None)
            else:
                break
            if chunk is None:  # no place or no block is left for the less urgent either
                break
            chunks.append(chunk)
            room.take(chunk)
            num_places -= chunk.num_tokens
            if not chunk.samples:
                break
        return chunks

    def _admissible(self) -> Sequence | None:
        """Returns the head of the queue if there is a slot, for beams one for each, and the policy admits it."""
        seq = self.waiting.head if self.running.num_free_slots else None
        if seq is None or (seq.begins_request and not self._num_opened):
            return None
        return seq if self.running.num_free_slots >= seq.request.sampling.beam_width else None

    def _give_chunk(self, seq: Sequence, num_places: int, plan: StepPlan, room: StepRoom) -> ScheduledTokens | None:
        """Returns the next pending tokens of ``seq`` with blocks for them, and a slot where it was waiting; or ``None``
        with nothing changed. ``num_places`` are left of those that the ``plan`` has for prompts.
        """
        waits = seq.status is SequenceStatus.WAITING
        if waits and (self.kv.num_free < self.kv.num_groups or not self.reservations.has_room(seq)):
            return None  # not even for cached prefixes
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
                    self.reservations.reserve(seq)
                    self._num_opened -= seq.begins_request
                chunk = ScheduledTokens(seq, seq.num_computed_tokens, num_tokens, samples=num_tokens == num_pending)
        finally:
            if waits and chunk is None:
                self.kv.detach(seq)
        return chunk

    def _close(
        self, decodes: list[Sequence], chunks: list[ScheduledTokens], preempted: list[Sequence], room: StepRoom
    ) -> Schedule:
        """Returns the schedule, with drafts as far as there is ``room``, after the cheap assertions;
        :meth:`Schedule.check` has all of them.
        """
        if self._propose_drafts is not None and decodes:
            num_places = room.limit_drafts(self.token_budget - tokens_of(decodes, chunks))
            decodes, drafted = with_drafts(decodes, num_places, self._propose_drafts, self._allocate)
            chunks += drafted
        caught_up = [seq for seq in decodes if len(seq.token_ids) - seq.num_computed_tokens != 1]
        assert not caught_up, f"neither given a token nor finished after their last step: {caught_up}"
        num_tokens = tokens_of(decodes, chunks)
        assert 0 < num_tokens <= self.token_budget, f"{self.policy} made a step of {num_tokens} tokens"
        self._is_launched = False
        self._scheduled = Schedule(
            decodes=tuple(decodes),
            positions=tuple([seq.num_computed_tokens for seq in decodes]),
            chunks=tuple(chunks),
            block_updates=self.running.block_updates,
            block_copies=self.kv.pending_copies,
            preempted=tuple(preempted),
            num_tokens=num_tokens,
            size=smallest_size(num_tokens, self.sizes),
        )
        return self._scheduled

    def _allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocates blocks for the next tokens of ``seq``, with updates for the device where it has a slot."""
        allocation = self.kv.allocate(seq, num_tokens)
        if allocation is None:
            return False
        if seq.slot is not None:
            self.running.add_blocks(seq, *allocation)
        return True

    def _note_prompt(self, seq: Sequence) -> None:
        """Handles the computed prompt of ``seq``: it may become a decode, and its siblings may be admitted."""
        if seq.num_pending_tokens <= 1:
            self.running.make_decode(seq)
        if seq.index == 0 and seq.request.has_beams:
            self.forks.release(seq)
        elif seq.index == 0:
            self.waiting.release(seq, self._now_s)
