"""The flight recorder: it always keeps the last steps of an engine, and the arrivals and ends between them.

A step's record is made of numbers that exist already, which costs microseconds. The names and block numbers of a
:class:`~fastgen.runtime.flight.recording.Recording` are computed only when a recording is requested. The ring is
bounded in steps and in bytes. A request whose arrival has left the ring is kept as long as the ring holds a later event
of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from fastgen.runtime.flight.block_numbers import BlockNumbers
from fastgen.runtime.flight.recording import Blocks, EngineFacts, Event, Header, Recording
from fastgen.runtime.flight.ring_events import (
    ArrivalRecord,
    BeamMoves,
    FinishRecord,
    Key,
    StepRecord,
    WithdrawalRecord,
    keys,
)
from fastgen.runtime.flight.snapshot import SchedulerState
from fastgen.runtime.requests.outputs import FinishReason
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus
from fastgen.runtime.step.observer import Observer
from fastgen.runtime.step.step import Step as EngineStep
from fastgen.version import __version__

if TYPE_CHECKING:
    from fastgen.runtime.scheduling.schedule import Schedule
    from fastgen.runtime.scheduling.scheduler import Scheduler

_RingEvent = StepRecord | ArrivalRecord | FinishRecord | WithdrawalRecord | BeamMoves | SchedulerState
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
        self._open: dict[int, ArrivalRecord] = {}
        # Arrivals that left the ring before the ends of their requests.
        self._early: dict[int, ArrivalRecord] = {}
        self._running: set[Key] = set()
        # The step whose tokens arrived last.
        self._ran: StepRecord | None = None
        # The records of steps that have not ended.
        self._records: dict[EngineStep, StepRecord] = {}
        self._moves = BeamMoves()

    def arrived(self, request: Request) -> None:
        record = ArrivalRecord(request, keeps_tokens=self.engine.prefix_caching)
        self._open[request.request_id] = record
        self._append(record)

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
            self._append(state)
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
                record.admitted += ((entry.seq.key, entry.seq.slot, entry.start, entry.seq.num_cached_tokens),)
                self._running.add(entry.seq.key)
        self.next_step += 1
        if held_back is None:
            self._ran = None
        self._append(record)
        return record

    def ran(self, step: EngineStep) -> None:
        """Attributes every end of a sequence to the tokens of ``step``, from now until ``step`` has ended."""
        record = self._ran = self._records[step]
        record.build_s, record.num_padding, record.ran_s = step.build_s, step.num_padding, step.ran_s
        if step.postponed:
            record.postponed = tuple(sorted(keys(step.postponed)))

    def ended(self, step: EngineStep) -> None:
        record = self._records.pop(step)
        record.sampled = keys(sequence for sequence, _ in step.given)
        record.ended_s = step.ended_s

    def beam_moves(self, beam: Sequence, parent: Sequence | None) -> None:
        self._moves.add(beam, parent, keeps_tokens=self.engine.prefix_caching)

    def beams_moved(self, request: Request, step: EngineStep) -> None:
        """Records the moves since the last call, and that each running beam of ``request`` was given a token."""
        moves, self._moves = self._moves, BeamMoves()
        beams = [seq for seq in request.sequences if seq.status is SequenceStatus.RUNNING and seq.num_pending_tokens]
        moves.request_id, moves.step = request.request_id, self._records[step].number
        moves.given = keys(beams)
        self._append(moves)

    def withdrawn(self, request: Request, step: EngineStep) -> None:
        self._append(WithdrawalRecord(request.request_id, self._records[step].number))

    def finished(
        self, sequence: Sequence, reason: FinishReason, now_s: float, token_times_s: SequenceOf[float], is_last: bool
    ) -> None:
        self._running.discard(sequence.key)
        request = None
        if is_last:
            request = self._open.pop(sequence.request.request_id)
            request.end()
        step = self._ran.number if self._ran is not None and self._ran.ended_s is None else None
        self._append(FinishRecord(sequence.key, now_s, reason, len(token_times_s), request, step))

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
        beams = {
            name: list(token_ids)
            for record in (requests.values() if self.engine.prefix_caching else ())
            if record.request is not None and record.request.has_beams
            for name, token_ids in record.sequences()
        }
        return header, self._events(ring, requests, beams)

    def _append(self, event: _RingEvent) -> None:
        num_bytes = event.num_bytes
        self._ring.append(event)
        self._num_bytes += num_bytes
        self._bytes_seen += num_bytes
        while self.next_step - self._first_step > self.max_steps or (
            self._num_bytes > self.max_bytes and len(self._ring) > 1
        ):
            self._forget(self._ring.popleft())

    def _forget(self, event: _RingEvent) -> None:
        self._num_bytes -= event.num_bytes
        if isinstance(event, ArrivalRecord):
            self._early[event.request_id] = event
        elif isinstance(event, StepRecord):
            self._first_step = event.number + 1
        elif isinstance(event, FinishRecord) and event.request is not None:
            del self._early[event.key[0]]

    def _events(
        self,
        ring: SequenceOf[_RingEvent],
        requests: dict[int, ArrivalRecord],
        beams: Mapping[str, SequenceOf[int]],
    ) -> Iterator[Event]:
        """Yields the events of ``ring``, given the open ``requests``, to which it adds those that have ended, and the
        tokens of their ``beams``.
        """
        numbers = BlockNumbers(self.engine.block_size)
        for event in ring:
            if isinstance(event, StepRecord):
                yield event.step()
            elif isinstance(event, ArrivalRecord):
                yield event.arrival(numbers)
            elif isinstance(event, BeamMoves):
                yield event.beams(numbers)
            elif isinstance(event, SchedulerState):
                yield event.snapshot(numbers.number)
            elif isinstance(event, WithdrawalRecord):
                yield event.withdrawal()
            else:
                if event.request is not None:
                    requests[event.key[0]] = event.request
                yield event.finish()
        if self.engine.prefix_caching:
            for _, record in sorted(requests.items()):
                for name, token_ids in record.sequences():
                    if blocks := numbers.behind_prompt(beams.get(name, token_ids), record.num_prompt_tokens):
                        yield Blocks(sequence=name, blocks=blocks)
