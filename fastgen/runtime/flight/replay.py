"""The scheduler run again over a recording, to see that it decides the same.

Only the scheduler runs, with its block tables; times come from the recording, and tokens are stand-ins: every token of
a full block is the block's number in the recording, so blocks are equal where they were, and the tokens after the last
full block equal no others. A step's decision is all that the recorder keeps of it but times and what was sampled.
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
    """A step that was decided otherwise: the names of the fields, and what was ``recorded`` and ``replayed``."""

    recorded: Step
    # ``None`` where nothing was left to schedule.
    replayed: Step | None
    fields: tuple[str, ...]


def first_difference(recording: Recording) -> Difference | None:
    """The first step that the scheduler now decides otherwise, or ``None`` where there is none.

    :raises InvalidArgumentError: where :func:`replay` refuses the recording.
    """
    for recorded, replayed, _ in replay(recording):
        if replayed is None:
            return Difference(recorded=recorded, replayed=None, fields=())
        if replayed != recorded:
            fields = tuple(name for name in DECISIONS if getattr(recorded, name) != getattr(replayed, name))
            return Difference(recorded=recorded, replayed=replayed, fields=fields)
    return None


def replay(recording: Recording) -> Iterator[tuple[Step, Step | None, Scheduler]]:
    """Each recorded step, what is decided now (with the recorded times), and the scheduler, with the step's tokens.

    Where the recorder had let go of the engine's first step, those from the first snapshot on: there it is known again
    what the scheduler decided by. There is no way on after the first step that differs.

    :raises InvalidArgumentError: where a recording without its beginning has no snapshot, or the engine had a policy
        that is not one of fastgen's own.
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
    """How many steps of ``recording`` a replay makes again, if none differs.

    :raises InvalidArgumentError: where there can be no replay, for want of a beginning.
    """
    return sum(isinstance(event, Step) for event in recording.events[_beginning(recording) :])


def _beginning(recording: Recording) -> int:
    """With which event a replay begins."""
    if not recording.header.first_step:
        return 0
    for place, event in enumerate(recording.events):
        if isinstance(event, Snapshot):
            return place
    raise InvalidArgumentError(
        f"the recording begins at step {recording.header.first_step}, since the recorder had let go of earlier "
        "ones, and has no snapshot to begin with: its ring was too small for the scheduler's state"
    )


@dataclass
class _Played:
    """A recorded step that was decided alike. ``given`` are the sequences that had their token ahead of the others."""

    event: Step
    schedule: Schedule
    given: set[str] = field(default_factory=set)
    has_given: bool = False

    def has_outcome(self, event: Event) -> bool:
        """Whether ``event`` happened while the tokens of this step were handed out."""
        return isinstance(event, Beams | Finish | Withdrawal) and event.step == self.event.step


class _Player:
    """``_blocks`` has for each sequence the numbers of all its full blocks, and for a beam that moves those of each of
    the lives it had, the present one first.
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
        # The step committed last, as long as it is not over.
        self._last: _Played | None = None
        # The step that was scheduled ahead of the tokens of the last, and is committed when that is over.
        self._ahead: _Played | None = None
        self._last_end_s = -math.inf
        if begin:
            self._begin_with(recording, begin)

    def _begin_with(self, recording: Recording, begin: int) -> None:
        """Be where the engine was at the snapshot at this place."""
        snapshot = recording.events[begin]
        assert isinstance(snapshot, Snapshot)
        num_tokens = {state.sequence: state.num_tokens for state in snapshot.sequences}
        for event in recording.events[:begin]:
            if isinstance(event, Arrival):
                self._request(event, num_tokens)
        restore(self.scheduler, snapshot, self.sequences)
        self._recorder.begin_with(self.scheduler.running)

    def come_to(self, event: Event) -> None:
        """``event`` is next: end what is over by now."""
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
        """The request that arrived, whose sequences have so many tokens, or else the prompt's."""
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
        """Schedules a step; where it is the recorded one, runs it."""
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
        """Where ``step`` ran, its tokens are computed."""
        if step.event.ran_s is None:
            return
        self.scheduler.commit(step.schedule)
        self._last = step
        if not self._runs_ahead:
            self._give_tokens(step)

    def _give_awaited(self, held_back: tuple[str, ...]) -> None:
        """Of the last step's tokens those that are only awaited when the next one is scheduled."""
        assert self._last is not None
        for entry in self._last.event.entries:
            seq = self.sequences[entry.sequence]
            awaits = seq.status is SequenceStatus.RUNNING and not seq.num_pending_tokens
            if awaits and entry.sequence not in held_back:
                self._give_token(entry.sequence)
                self._last.given.add(entry.sequence)

    def _give_tokens(self, step: _Played) -> None:
        """The tokens of ``step`` that were not given yet."""
        for entry in step.event.entries:
            for _ in range(entry.num_sampled - (entry.sequence in step.given)):
                self._give_token(entry.sequence)
        step.has_given = True

    def _end_last(self) -> None:
        """What the engine does when all tokens of a step have been handed out: accept the drafts of the sequences that
        go on, and tell the policy how long it took.
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
        """What was drafted is not recorded, only how much of it was scheduled; nor does the scheduler look at it."""
        return [0] * min(max_tokens, self._num_drafts.get(f"{seq.key[0]}.{seq.index}", 0))

    def _give_token(self, sequence: str) -> None:
        token_ids = self.sequences[sequence].token_ids
        token_ids.append(self._stand_in(sequence, len(token_ids)))

    def _begin_life(self, sequence: str) -> None:
        """From here on ``sequence`` has the tokens that it has next."""
        self._blocks[sequence].popleft()
        token_ids = self.sequences[sequence].token_ids
        token_ids[:] = self._stand_ins(sequence, len(token_ids))

    def _stand_ins(self, sequence: str, num_tokens: int) -> list[int]:
        return [self._stand_in(sequence, position) for position in range(num_tokens)]

    def _stand_in(self, sequence: str, position: int) -> int:
        blocks, index = self._blocks[sequence][0], position // self._block_size
        return blocks[index] if index < len(blocks) else next(self._unlike_others)


def build_scheduler(engine: EngineFacts, propose_drafts: Callable[[Sequence, int], list[int]]) -> Scheduler:
    """A scheduler that decides as the one that ``engine`` tells of, at its beginning.

    :raises InvalidArgumentError: where it had a policy that is not one of fastgen's own.
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
    )
