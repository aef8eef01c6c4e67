"""Replays a recording: runs the scheduler again over it and checks that it makes the same decisions.

Only the scheduler runs, with its block tables. Times come from the recording. Tokens are stand-ins: every token of a
full block is the block's number in the recording, so equal blocks stay equal. The tokens after the last full block
equal no others. A step's decision is everything that the recorder keeps of it, except times and sampled tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.flight.recorder import Recorder
from fastgen.runtime.flight.recording import (
    Arrival,
    Beams,
    Blocks,
    EngineFacts,
    Event,
    Finish,
    Recording,
    Snapshot,
    Step,
    Withdrawal,
)
from fastgen.runtime.flight.snapshot import restore
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies import make_policy
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.scheduling.scheduler import Scheduler

# The fields of a :class:`Step` that the scheduler decides.
DECISIONS = (
    *("size", "num_decodes", "entries", "admitted", "preempted", "block_entries", "block_copies"),
    *("running", "waiting", "blocks_free", "blocks_cached"),
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A step that was decided differently: the names of the differing fields, and the ``recorded`` and the ``replayed``
    step.
    """

    recorded: Step
    # ``None`` if nothing was left to schedule.
    replayed: Step | None
    fields: tuple[str, ...]


def first_difference(recording: Recording) -> Difference | None:
    """Returns the first step that the scheduler now decides differently, or ``None``.

    :raises InvalidArgumentError: if :func:`replay` refuses the recording.
    """
    for recorded, replayed, _ in replay(recording):
        if replayed is None:
            return Difference(recorded=recorded, replayed=None, fields=())
        if replayed != recorded:
            fields = tuple(name for name in DECISIONS if getattr(recorded, name) != getattr(replayed, name))
            return Difference(recorded=recorded, replayed=replayed, fields=fields)
    return None


def replay(recording: Recording) -> Iterator[tuple[Step, Step | None, Scheduler]]:
    """Yields for each recorded step: the step, what is decided now (with the recorded times), and the scheduler, which
    has the step's tokens.

    If the recorder no longer had the engine's first step, the replay begins at the first snapshot, where the
    scheduler's state is known. It ends with the first step that differs.

    :raises InvalidArgumentError: if a recording without its beginning has no snapshot, or if the engine had a custom
        policy.
    """
    begin = _beginning(recording)
    player = _Player(recording, begin)
    for event in recording.events[begin:]:
        player.come_to(event)
        if isinstance(event, Arrival):
            player.arrive(event)
        elif isinstance(event, Finish):
            player.finish(event)
        elif isinstance(event, Beams):
            player.move_beams(event)
        elif isinstance(event, Withdrawal):
            player.withdraw(event)
        elif isinstance(event, Step):
            replayed = player.step(event)
            yield event, replayed, player.scheduler
            if replayed != event:
                return


def num_replayed(recording: Recording) -> int:
    """Returns how many steps of ``recording`` a replay covers if none differs.

    :raises InvalidArgumentError: if there is no event from which a replay can begin.
    """
    return sum(isinstance(event, Step) for event in recording.events[_beginning(recording) :])


def _beginning(recording: Recording) -> int:
    """Returns the index of the event with which a replay begins."""
    if not recording.header.first_step:
        return 0
    for place, event in enumerate(recording.events):
        if isinstance(event, Snapshot):
            return place
    raise InvalidArgumentError(
        f"the recording begins at step {recording.header.first_step}, since the recorder had dropped earlier "
        "ones, and has no snapshot to begin with: its ring was too small for the scheduler's state"
    )


@dataclass
class _Played:
    """A recorded step with the same decision now. ``given`` are the sequences that had their token ahead of
    the others.
    """

    event: Step
    schedule: Schedule
    given: set[str] = field(default_factory=set)
    has_given: bool = False

    def has_outcome(self, event: Event) -> bool:
        """Returns whether ``event`` happened while the tokens of this step were handed out."""
        return isinstance(event, Beams | Finish | Withdrawal) and event.step == self.event.step


class _Player:
    """Applies the recorded events to a new scheduler.

    ``_blocks`` has the numbers of all full blocks of each sequence. A beam that moves has one such list for each of its
    lives, the present one first.
    """

    def __init__(self, recording: Recording, begin: int):
        self.scheduler = build_scheduler(recording.header.engine, self._drafts)
        self.sequences: dict[str, Sequence] = {}
        self._recorder = Recorder(recording.header.engine, lambda: recording.header.clock_s)
        self._block_size = recording.header.engine.block_size
        self._blocks: dict[str, deque[tuple[int, ...]]] = {}
        self._dropped: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        self._final: dict[str, tuple[int, ...]] = {}
        for event in recording.events[begin:]:
            if isinstance(event, Beams):
                for move in event.moves:
                    self._dropped[move.sequence].append(move.dropped)
            elif isinstance(event, Blocks):
                self._final[event.sequence] = event.blocks
        self._unlike_others = count(2**31)
        self._num_drafts: dict[str, int] = {}
        self._runs_ahead = recording.header.engine.runs_ahead
        # The step committed last, until it is over.
        self._last: _Played | None = None
        # The step scheduled before the tokens of the last one were known. It is committed when that one is over.
        self._ahead: _Played | None = None
        self._last_end_s = -math.inf
        if recording.events and isinstance(recording.events[begin], Snapshot):
            self._begin_with(recording, begin)

    def _begin_with(self, recording: Recording, begin: int) -> None:
        """Brings the scheduler to the state of the snapshot at this index."""
        snapshot = recording.events[begin]
        assert isinstance(snapshot, Snapshot)
        num_tokens = {state.sequence: state.num_tokens for state in snapshot.sequences}
        for event in recording.events[:begin]:
            if isinstance(event, Arrival):
                self._request(event, num_tokens)
        restore(self.scheduler, snapshot, self.sequences)
        self._recorder.begin_with(self.scheduler.running)

    def come_to(self, event: Event) -> None:
        """Ends everything that is over by the time of ``event``, the next one."""
        is_over = self._last is not None and not self._last.has_outcome(event)
        if is_over and (self._ahead is not None or not self._runs_ahead):
            self._end_last()
        if self._last is None and self._ahead is not None:
            self._commit(self._ahead)
            self._ahead = None
        if self._runs_ahead and isinstance(event, Step) and event.held_back is None:
            self._end_last()

    def arrive(self, event: Arrival) -> None:
        self.scheduler.add(self._request(event, {}))

    def _request(self, event: Arrival, num_tokens: Mapping[str, int]) -> Request:
        """Builds the request that arrived. Its sequences have the given numbers of tokens, by default those of the
        prompt.
        """
        sampling = SamplingParams(
            max_new_tokens=event.max_new_tokens,
            n=event.n,
            beam_width=event.beam_width,
            priority=event.priority,
            prompt_logprobs=0 if event.prompt_logprobs else None,
        )
        request = Request(event.request, [0] * event.prompt_tokens, sampling, event.clock_s)
        for name, seq in zip(event.sequences, request.sequences, strict=True):
            self.sequences[name] = seq
            lives = (*self._dropped[name], self._final.get(name, ()))
            self._blocks[name] = deque(event.blocks + later for later in lives)
            seq.token_ids = self._stand_ins(name, num_tokens.get(name, event.prompt_tokens))
        return request

    def finish(self, event: Finish) -> None:
        seq = self.sequences[event.sequence]
        for each in seq.request.sequences if seq.request.has_beams else [seq]:
            self.scheduler.finish(each)

    def withdraw(self, event: Withdrawal) -> None:
        for seq in self.sequences[f"{event.request}.0"].request.sequences:
            self.scheduler.kv.withdraw(seq)

    def move_beams(self, event: Beams) -> None:
        forks = [(move.sequence, move.parent) for move in event.moves if move.parent is not None]
        suspended = [move.sequence for move in event.moves if move.parent is None]
        for name, parent in forks:
            self.scheduler.forks.fork(self.sequences[parent], self.sequences[name])
            self._begin_life(name)
        for name in event.given:
            self._give_token(name)
        for name in suspended:
            self.scheduler.forks.suspend(self.sequences[name])
            self._begin_life(name)

    def step(self, event: Step) -> Step | None:
        """Schedules a step; if it is the recorded one, runs it."""
        self._num_drafts = {entry.sequence: entry.num_drafts for entry in event.entries}
        if event.held_back is None:
            schedule = self.scheduler.schedule(event.began_s)
        else:
            self._give_awaited(event.held_back)
            schedule = self.scheduler.schedule_ahead(event.began_s)
        if schedule is None:
            return None
        decided = self._recorder.record(schedule, self.scheduler, event.began_s, event.scheduled_s).step()
        given = {entry.sequence: entry.num_sampled for entry in event.entries}
        entries = tuple(entry._replace(num_sampled=given.get(entry.sequence, 0)) for entry in decided.entries)
        rest = {name: getattr(decided, name) for name in DECISIONS if name != "entries"}
        replayed = replace(event, entries=entries, **rest)
        if replayed == event and event.held_back is None:
            self._commit(_Played(event, schedule))
        elif replayed == event:
            if event.ran_s is not None:
                self.scheduler.launched(schedule)
            self._ahead = _Played(event, schedule)
            if self._last is not None:
                self._give_tokens(self._last)
        return replayed

    def _commit(self, step: _Played) -> None:
        """Marks the tokens of ``step`` as computed, if it ran."""
        if step.event.ran_s is None:
            return
        self.scheduler.commit(step.schedule, [self.sequences[name] for name in step.event.postponed])
        self._last = step
        if not self._runs_ahead:
            self._give_tokens(step)

    def _give_awaited(self, held_back: tuple[str, ...]) -> None:
        """Gives those tokens of the last step that were still awaited when the next one was scheduled."""
        assert self._last is not None
        for entry in self._last.event.entries:
            seq = self.sequences[entry.sequence]
            awaits = seq.status is SequenceStatus.RUNNING and not seq.num_pending_tokens
            if awaits and entry.sequence not in held_back:
                self._give_token(entry.sequence)
                self._last.given.add(entry.sequence)

    def _give_tokens(self, step: _Played) -> None:
        """Gives the tokens of ``step`` that were not given yet."""
        for entry in step.event.entries:
            for _ in range(entry.num_sampled - (entry.sequence in step.given)):
                self._give_token(entry.sequence)
        step.has_given = True

    def _end_last(self) -> None:
        """Does what the engine does when all tokens of a step have been handed out: accepts the drafts of the sequences
        that continue, and reports the step time to the policy.
        """
        step, self._last = self._last, None
        if step is None:
            return
        if not step.has_given:
            self._give_tokens(step)
        event = step.event
        for entry in event.entries:
            seq = self.sequences[entry.sequence]
            if entry.num_drafts and entry.num_sampled > 1 and seq.status is SequenceStatus.RUNNING:
                self.scheduler.accept(seq, entry.num_sampled - 1)
        if event.ended_s is not None:
            self.scheduler.observe(step.schedule, event.ended_s - max(event.began_s, self._last_end_s))
            self._last_end_s = event.ended_s

    def _drafts(self, seq: Sequence, max_tokens: int) -> list[int]:
        """Returns stand-ins for the drafts. Only the number of scheduled drafts is recorded, and the scheduler needs no
        more.
        """
        return [0] * min(max_tokens, self._num_drafts.get(f"{seq.key[0]}.{seq.index}", 0))

    def _give_token(self, sequence: str) -> None:
        token_ids = self.sequences[sequence].token_ids
        token_ids.append(self._stand_in(sequence, len(token_ids)))

    def _begin_life(self, sequence: str) -> None:
        """Gives ``sequence`` the tokens of its next life."""
        self._blocks[sequence].popleft()
        token_ids = self.sequences[sequence].token_ids
        token_ids[:] = self._stand_ins(sequence, len(token_ids))

    def _stand_ins(self, sequence: str, num_tokens: int) -> list[int]:
        return [self._stand_in(sequence, position) for position in range(num_tokens)]

    def _stand_in(self, sequence: str, position: int) -> int:
        blocks, index = self._blocks[sequence][0], position // self._block_size
        return blocks[index] if index < len(blocks) else next(self._unlike_others)


def build_scheduler(engine: EngineFacts, propose_drafts: Callable[[Sequence, int], list[int]]) -> Scheduler:
    """Returns a new scheduler with the sizes and rules of ``engine``.

    :raises InvalidArgumentError: if the engine had a custom policy.
    """
    kv = KVCacheManager(
        engine.num_blocks,
        engine.block_size,
        engine.windows,
        max_chunk=engine.max_chunk,
        prefix_caching=engine.prefix_caching,
    )
    return Scheduler(
        kv,
        token_budget=engine.token_budget,
        max_num_seqs=engine.max_num_seqs,
        policy=make_policy(engine.policy, engine.policy_parameters),
        aging_s=engine.aging_s,
        propose_drafts=propose_drafts,
        kv_reservation=engine.kv_reservation,
        max_model_len=engine.max_model_len,
    )
