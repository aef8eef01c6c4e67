"""The flight recorder: it always keeps the last steps of an engine, and the arrivals and ends between them.

A step's record holds numbers and references that exist already, so making it costs microseconds. The names and block
numbers of a :class:`~fastgen.runtime.flight.recording.Recording` are computed only when a recording is requested. The
ring is bounded in steps and in bytes. A request whose arrival has left the ring is kept as long as the ring holds a
later event of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from datetime import UTC, datetime
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from fastgen.runtime.flight.block_numbers import BlockNumbers
from fastgen.runtime.flight.recording import (
    Admission,
    Arrival,
    BeamMove,
    Beams,
    BlockEntry,
    Blocks,
    Copy,
    EngineFacts,
    Entry,
    Event,
    Finish,
    Header,
    Recording,
    Step,
    Withdrawal,
)
from fastgen.runtime.flight.snapshot import SchedulerState
from fastgen.runtime.requests.outputs import FinishReason
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus
from fastgen.runtime.step.observer import Observer
from fastgen.runtime.step.step import Step as EngineStep
from fastgen.version import __version__

if TYPE_CHECKING:
    from fastgen.runtime.scheduling.schedule import Schedule, ScheduledTokens
    from fastgen.runtime.scheduling.scheduler import Scheduler

_Key = tuple[int, int]
_key_of: Callable[[Sequence], _Key] = attrgetter("key")
# Memory of one element in a list of token ids: a pointer and an integer.
_BYTES_PER_TOKEN = 40


class StepRecord:
    """The record of one step. Its times and tokens are filled in as they become known."""

    __slots__ = (
        "admitted",
        "began_s",
        "blocks_cached",
        "blocks_free",
        "build_s",
        "chunks",
        "copies",
        "decodes",
        "ended_s",
        "held_back",
        "num_padding",
        "num_running",
        "num_waiting",
        "number",
        "positions",
        "postponed",
        "preempted",
        "ran_s",
        "sampled",
        "scheduled_s",
        "size",
        "updates",
    )

    def __init__(
        self,
        number: int,
        schedule: Schedule,
        scheduler: Scheduler,
        began_s: float,
        scheduled_s: float,
        held_back: SequenceOf[Sequence] | None,
    ):
        self.number, self.began_s, self.scheduled_s = number, began_s, scheduled_s
        self.held_back = None if held_back is None else [seq.key for seq in held_back]
        self.build_s, self.num_padding = 0.0, 0
        self.ran_s: float | None = None
        self.ended_s: float | None = None
        self.size, self.updates = schedule.size, schedule.block_updates
        self.copies, self.positions = schedule.block_copies, schedule.positions
        self.decodes = list(map(_key_of, schedule.decodes))
        self.chunks = [_chunk(each) for each in schedule.chunks] if schedule.chunks else []
        self.preempted = list(map(_key_of, schedule.preempted))
        self.admitted: list[tuple[_Key, int, int, int]] = []
        self.sampled: list[_Key] = []
        self.postponed: list[_Key] = []
        self.num_running, self.num_waiting = len(scheduler.running), scheduler.num_waiting
        self.blocks_free, self.blocks_cached = scheduler.reservations.num_free, scheduler.kv.pool.num_cached

    def step(self) -> Step:
        """Returns the record in its present state, with names in place of keys. The step may end meanwhile, on another
        thread.
        """
        ended_s = self.ended_s  # it is read first and set last, so that a step that has ended has its tokens
        num_sampled = Counter(() if ended_s is None else self.sampled)
        decodes = [(key, start, 1, 0) for key, start in zip(self.decodes, self.positions, strict=True)]
        return Step(
            step=self.number,
            began_s=self.began_s,
            scheduled_s=self.scheduled_s,
            build_s=self.build_s,
            ran_s=self.ran_s,
            ended_s=ended_s,
            size=self.size,
            num_padding=self.num_padding,
            num_decodes=len(decodes),
            entries=tuple(
                Entry(_name(key), start, num_tokens, num_drafts, num_sampled[key])
                for key, start, num_tokens, num_drafts in (*decodes, *self.chunks)
            ),
            admitted=tuple(Admission(_name(key), *rest) for key, *rest in self.admitted),
            preempted=tuple(map(_name, self.preempted)),
            block_entries=tuple(BlockEntry(*update) for update in self.updates),
            block_copies=tuple(Copy(*copy) for copy in self.copies),
            running=self.num_running,
            waiting=self.num_waiting,
            blocks_free=self.blocks_free,
            blocks_cached=self.blocks_cached,
            held_back=None if self.held_back is None else tuple(map(_name, self.held_back)),
            postponed=tuple(map(_name, self.postponed)),
        )

    @property
    def num_bytes(self) -> int:
        """Returns about how much memory the record takes."""
        return 600 + 20 * len(self.decodes) + 150 * (len(self.chunks) + len(self.updates) + len(self.copies))


class _Finished(NamedTuple):
    key: _Key
    clock_s: float
    reason: FinishReason
    num_tokens: int
    # Set if this was the last of its completions.
    request: Request | None
    step: int | None

    @property
    def num_bytes(self) -> int:
        num_tokens = 0 if self.request is None else sum(seq.num_tokens for seq in self.request.sequences)
        return 300 + _BYTES_PER_TOKEN * num_tokens


class _Withdrawn(NamedTuple):
    request_id: int
    step: int

    @property
    def num_bytes(self) -> int:
        return 200


class BeamMoves:
    """The changes that a beam search makes to its sequences after a step."""

    def __init__(self) -> None:
        self.request_id = self.step = -1
        # Each move: the sequence, its new parent, the tokens it had, and how many of them are prompt tokens.
        self.moves: list[tuple[_Key, _Key | None, SequenceOf[int], int]] = []
        self.given: list[_Key] = []

    def add(self, beam: Sequence, parent: Sequence | None, *, keeps_tokens: bool) -> None:
        token_ids = list(beam.token_ids) if keeps_tokens else ()
        self.moves.append((beam.key, None if parent is None else parent.key, token_ids, beam.num_prompt_tokens))

    @property
    def num_bytes(self) -> int:
        return 300 + sum(200 + _BYTES_PER_TOKEN * len(token_ids) for _, _, token_ids, _ in self.moves)


_RingEvent = StepRecord | Request | _Finished | _Withdrawn | BeamMoves | SchedulerState
# Snapshots per full turn of the ring. There are several, so that the ring always holds one.
SNAPSHOTS = 4


class Recorder(Observer):
    """Keeps the last ``max_steps`` steps of an engine, or fewer if they and the tokens of their requests would take
    more than about ``max_bytes``. Where it follows another one, ``first_step`` continues its numbers of steps.
    """

    def __init__(
        self,
        engine: EngineFacts,
        clock: Callable[[], float],
        *,
        max_steps: int = 10_000,
        max_bytes: int = 64 * 2**20,
        first_step: int = 0,
    ):
        self.engine, self.max_steps, self.max_bytes = engine, max_steps, max_bytes
        self._started, self._clock_s = datetime.now(UTC), clock()
        self._ring: deque[_RingEvent] = deque()
        self._num_bytes = 0
        self.next_step = self._first_step = first_step
        self._bytes_seen = 0
        # The step before which the last snapshot was taken, and the bytes seen by then.
        self._last_snapshot = (first_step, 0)
        self._open: dict[int, Request] = {}
        # Arrivals that left the ring before the ends of their requests.
        self._early: dict[int, Request] = {}
        self._running: set[_Key] = set()
        # The step whose tokens arrived last.
        self._ran: StepRecord | None = None
        # The records of steps that have not ended.
        self._records: dict[EngineStep, StepRecord] = {}
        self._moves = BeamMoves()

    def arrived(self, request: Request) -> None:
        self._open[request.request_id] = request
        self._append(request, _arrival_bytes(request))

    @property
    def wants_snapshot(self) -> bool:
        """Returns whether a new snapshot is due, so that the ring always holds one from which a replay can begin."""
        step, num_bytes = self._last_snapshot
        return (
            SNAPSHOTS * (self.next_step - step) >= self.max_steps
            or SNAPSHOTS * (self._bytes_seen - num_bytes) >= self.max_bytes
        )

    def snapshot(self, scheduler: Scheduler) -> None:
        """Keeps the state of ``scheduler``, which has no unfinished step. A state is not kept if it would take more of
        the ring than the events between two snapshots.
        """
        state = SchedulerState(scheduler, self.next_step)
        if SNAPSHOTS * state.num_bytes < self.max_bytes:
            self._append(state, state.num_bytes)
        self._last_snapshot = (self.next_step, self._bytes_seen)

    def begin_with(self, running: Iterable[Sequence]) -> None:
        """Starts to record at a point where the sequences ``running`` already have their slots."""
        self._running.update(seq.key for seq in running)

    def scheduled(self, step: EngineStep, scheduler: Scheduler) -> None:
        if self._records and not step.is_ahead:  # no other step is in flight: these have failed
            self._records.clear()
        self._records[step] = self.record(step.schedule, scheduler, step.began_s, step.scheduled_s, step.held_back)

    def record(
        self,
        schedule: Schedule,
        scheduler: Scheduler,
        began_s: float,
        scheduled_s: float,
        held_back: SequenceOf[Sequence] | None = None,
    ) -> StepRecord:
        """Adds the step of ``schedule``, which ``scheduler`` made between these two clock values. If the step was
        scheduled before the tokens of the previous step were known, ``held_back`` holds the sequences that must wait
        for theirs.
        """
        record = StepRecord(self.next_step, schedule, scheduler, began_s, scheduled_s, held_back)
        self._running.difference_update(record.preempted)
        for entry in schedule.chunks:
            if entry.seq.key not in self._running:
                assert entry.seq.slot is not None
                record.admitted.append((entry.seq.key, entry.seq.slot, entry.start, entry.seq.num_cached_tokens))
                self._running.add(entry.seq.key)
        self.next_step += 1
        if held_back is None:
            self._ran = None
        self._append(record, record.num_bytes)
        return record

    def ran(self, step: EngineStep) -> None:
        """Attributes every end of a sequence to the tokens of ``step``, from now until ``step`` has ended."""
        record = self._ran = self._records[step]
        record.build_s, record.num_padding, record.ran_s = step.build_s, step.num_padding, step.ran_s
        if step.postponed:
            record.postponed = sorted(seq.key for seq in step.postponed)

    def ended(self, step: EngineStep) -> None:
        record = self._records.pop(step)
        record.sampled = [sequence.key for sequence, _ in step.given]
        record.ended_s = step.ended_s

    def beam_moves(self, beam: Sequence, parent: Sequence | None) -> None:
        self._moves.add(beam, parent, keeps_tokens=self.engine.prefix_caching)

    def beams_moved(self, request: Request, step: EngineStep) -> None:
        """Records the moves since the last call, and that each running beam of ``request`` was given a token."""
        moves, self._moves = self._moves, BeamMoves()
        beams = [seq for seq in request.sequences if seq.status is SequenceStatus.RUNNING and seq.num_pending_tokens]
        moves.request_id, moves.step = request.request_id, self._records[step].number
        moves.given = [seq.key for seq in beams]
        self._append(moves, moves.num_bytes)

    def withdrawn(self, request: Request, step: EngineStep) -> None:
        event = _Withdrawn(request.request_id, self._records[step].number)
        self._append(event, event.num_bytes)

    def finished(
        self, sequence: Sequence, reason: FinishReason, now_s: float, token_times_s: SequenceOf[float], is_last: bool
    ) -> None:
        self._running.discard(sequence.key)
        request = self._open.pop(sequence.request.request_id) if is_last else None
        step = self._ran.number if self._ran is not None and self._ran.ended_s is None else None
        event = _Finished(sequence.key, now_s, reason, len(token_times_s), request, step)
        self._append(event, event.num_bytes)

    def last_steps(self, max_steps: int) -> list[StepRecord]:
        """Returns the records of the last ``max_steps`` steps, oldest first.

        It looks at a bounded number of events, and returns fewer records if many other events happened in between.
        """
        events = islice(reversed(self._ring), 8 * max_steps)
        return list(islice((event for event in events if isinstance(event, StepRecord)), max_steps))[::-1]

    def recording(self, model: str) -> Recording:
        """Returns the present contents of the ring. ``model`` is the model's name in the recording."""
        header, events = self.contents(model)
        return Recording(header, tuple(events))

    def contents(self, model: str) -> tuple[Header, Iterator[Event]]:
        """Takes the present contents of the ring, which takes microseconds for each thousand steps. Returns the header
        of their recording, and its events, which are made one by one and may be on another thread while steps continue.
        """
        header = Header(
            fastgen=__version__,
            model=model,
            started=self._started.isoformat(timespec="microseconds"),
            clock_s=self._clock_s,
            first_step=self._first_step,
            engine=self.engine,
        )
        ring, requests = (*self._early.values(), *self._ring), dict(self._open)
        # Later moves give beams other tokens; those of other sequences only become more.
        searches = [request for request in requests.values() if request.has_beams and self.engine.prefix_caching]
        beams = {seq: list(seq.token_ids) for request in searches for seq in request.made_sequences}
        return header, self._events(ring, requests, beams)

    def _append(self, event: _RingEvent, num_bytes: int) -> None:
        self._ring.append(event)
        self._num_bytes += num_bytes
        self._bytes_seen += num_bytes
        while self.next_step - self._first_step > self.max_steps or (
            self._num_bytes > self.max_bytes and len(self._ring) > 1
        ):
            self._forget(self._ring.popleft())

    def _forget(self, event: _RingEvent) -> None:
        if isinstance(event, Request):
            self._num_bytes -= _arrival_bytes(event)
            self._early[event.request_id] = event
            return
        self._num_bytes -= event.num_bytes
        if isinstance(event, StepRecord):
            self._first_step = event.number + 1
        elif isinstance(event, _Finished) and event.request is not None:
            del self._early[event.key[0]]

    def _events(
        self, ring: SequenceOf[_RingEvent], requests: dict[int, Request], beams: Mapping[Sequence, list[int]]
    ) -> Iterator[Event]:
        """Yields the events of ``ring``, given the open ``requests``, to which it adds those that have ended, and the
        tokens of their ``beams``.
        """
        numbers = BlockNumbers(self.engine.block_size)
        for event in ring:
            if isinstance(event, StepRecord):
                yield event.step()
            elif isinstance(event, Request):
                yield _arrival(event, numbers.of(event.prompt_ids) if self.engine.prefix_caching else ())
            elif isinstance(event, BeamMoves):
                yield _beams(event, numbers)
            elif isinstance(event, SchedulerState):
                yield event.snapshot(numbers.number)
            elif isinstance(event, _Withdrawn):
                yield Withdrawal(request=event.request_id, step=event.step)
            else:
                if event.request is not None:
                    requests[event.key[0]] = event.request
                yield _finish(event)
        if self.engine.prefix_caching:
            for seq in (seq for _, request in sorted(requests.items()) for seq in request.made_sequences):
                if blocks := numbers.behind_prompt(beams.get(seq, seq.token_ids), seq.num_prompt_tokens):
                    yield Blocks(sequence=seq.name, blocks=blocks)


def _chunk(chunk: ScheduledTokens) -> tuple[_Key, int, int, int]:
    return chunk.seq.key, chunk.start, chunk.num_tokens, len(chunk.drafts)


def _name(key: _Key) -> str:
    return f"{key[0]}.{key[1]}"


def _arrival_bytes(request: Request) -> int:
    """Returns about how much memory ``request`` takes from its arrival on."""
    return 300 + _BYTES_PER_TOKEN * len(request.prompt_ids)


def _arrival(request: Request, blocks: tuple[int, ...]) -> Arrival:
    sampling = request.sampling
    return Arrival(
        clock_s=request.arrival_s,
        request=request.request_id,
        prompt_tokens=len(request.prompt_ids),
        max_new_tokens=sampling.max_new_tokens,
        n=sampling.n,
        beam_width=sampling.beam_width,
        priority=sampling.priority,
        prompt_logprobs=sampling.prompt_logprobs is not None,
        timeout_s=sampling.timeout_s,
        blocks=blocks,
    )


def _beams(event: BeamMoves, numbers: BlockNumbers) -> Beams:
    moves = [
        BeamMove(_name(key), None if parent is None else _name(parent), numbers.behind_prompt(token_ids, num_prompt))
        for key, parent, token_ids, num_prompt in event.moves
    ]
    return Beams(request=event.request_id, step=event.step, moves=tuple(moves), given=tuple(map(_name, event.given)))


def _finish(event: _Finished) -> Finish:
    return Finish(
        clock_s=event.clock_s,
        sequence=_name(event.key),
        reason=event.reason,
        num_tokens=event.num_tokens,
        step=event.step,
    )
