"""The events that the flight recorder keeps.

Thousands of them are alive at a time. So each consists of few objects: numbers are packed into bytes, and tuples hold
only numbers and keys, since the garbage collector does not visit these. An event knows about how many bytes it takes.
It makes the event of a :class:`~fastgen.runtime.flight.recording.Recording` when one is requested.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from fastgen.runtime.flight.block_numbers import BlockNumbers
from fastgen.runtime.flight.recording import (
    Admission,
    Arrival,
    BeamMove,
    Beams,
    BlockEntry,
    Copy,
    Entry,
    Finish,
    Step,
    Withdrawal,
)
from fastgen.runtime.requests.outputs import FinishReason
from fastgen.runtime.requests.request import Request, Sequence

if TYPE_CHECKING:
    from fastgen.runtime.scheduling.schedule import Schedule, ScheduledTokens
    from fastgen.runtime.scheduling.scheduler import Scheduler

Key = tuple[int, int]
# The type of packed numbers, four bytes each, and how many of them a :class:`BlockEntry` has.
_PACKED: Final = "i"
_NUM_IN_UPDATE = 4
_BYTES_PER_TOKEN = 4
# An arrival's time, request, prompt tokens, largest number of new tokens, completions, beam width, priority, whether it
# asks for log-probabilities of the prompt, and its time limit.
_Sizes = tuple[float, int, int, int, int, int, int, bool, float | None]


class StepRecord:
    """The record of one step. Its times and tokens are filled in as they become known."""

    __slots__ = (
        "_positions",
        "_updates",
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
        "postponed",
        "preempted",
        "ran_s",
        "sampled",
        "scheduled_s",
        "size",
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
        self.held_back = None if held_back is None else keys(held_back)
        self.build_s, self.num_padding = 0.0, 0
        self.ran_s: float | None = None
        self.ended_s: float | None = None
        self.size = schedule.size
        updates = schedule.block_updates
        self._updates = _packed(list(chain.from_iterable(updates))) if updates else b""
        self.copies = tuple([tuple(copy) for copy in schedule.block_copies])
        self.decodes, self._positions = keys(schedule.decodes), _packed(schedule.positions)
        self.chunks = tuple([_chunk(each) for each in schedule.chunks])
        self.preempted = keys(schedule.preempted)
        self.admitted: tuple[tuple[Key, int, int, int], ...] = ()
        self.sampled: tuple[Key, ...] = ()
        self.postponed: tuple[Key, ...] = ()
        self.num_running, self.num_waiting = len(scheduler.running), scheduler.num_waiting
        self.blocks_free, self.blocks_cached = scheduler.reservations.num_free, scheduler.kv.pool.num_cached

    def step(self) -> Step:
        """Returns the record in its present state, with names in place of keys. The step may end meanwhile, on another
        thread.
        """
        ended_s = self.ended_s  # it is read first and set last, so that a step that has ended has its tokens
        num_sampled = Counter(() if ended_s is None else self.sampled)
        decodes = [(key, start, 1, 0) for key, start in zip(self.decodes, _unpacked(self._positions), strict=True)]
        numbers = iter(_unpacked(self._updates))
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
            block_entries=tuple(BlockEntry(*update) for update in zip(*[numbers] * _NUM_IN_UPDATE, strict=True)),
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
        return 700 + 20 * len(self.decodes) + 200 * (len(self.chunks) + len(self.copies)) + len(self._updates)


class ArrivalRecord:
    """The record of a request from its arrival on. Once the request has ended, only its sizes and tokens are kept;
    ``keeps_tokens`` says whether a recording needs the tokens.
    """

    __slots__ = ("_keeps_tokens", "_prompt", "_sizes", "_written", "request")

    def __init__(self, request: Request, *, keeps_tokens: bool):
        # ``None`` once the request has ended; what follows is set then.
        self.request: Request | None = request
        self._keeps_tokens = keeps_tokens
        self._sizes: _Sizes
        # The prompt's tokens, and those that each sequence that was made has after it; none if they are not kept.
        self._prompt: bytes
        self._written: tuple[bytes, ...]

    @property
    def sizes(self) -> _Sizes:
        request = self.request
        return self._sizes if request is None else _sizes(request)

    @property
    def request_id(self) -> int:
        return self.sizes[1]

    @property
    def num_prompt_tokens(self) -> int:
        request = self.request
        return self._sizes[2] if request is None else len(request.prompt_ids)

    @property
    def num_bytes(self) -> int:
        """Returns about how much memory it takes, beside what the sequences have after the prompt."""
        return 600 + _BYTES_PER_TOKEN * self.num_prompt_tokens * self._keeps_tokens

    @property
    def num_written_bytes(self) -> int:
        """Returns about how much memory is taken by what the sequences of an ended request have after the prompt."""
        return sum(40 + len(written) for written in self._written)

    def end(self) -> None:
        """Drops the request, which has ended. Another thread may be making events meanwhile."""
        request = self.request
        assert request is not None
        self._sizes = _sizes(request)
        prompt_ids, sequences = (request.prompt_ids, request.made_sequences) if self._keeps_tokens else ((), ())
        self._prompt = _packed(prompt_ids)
        self._written = tuple([_packed(seq.token_ids[len(prompt_ids) :]) for seq in sequences])
        self.request = None  # last: a thread that finds no request reads the packed tokens

    def arrival(self, numbers: BlockNumbers) -> Arrival:
        """Returns the event in a recording whose blocks have ``numbers``."""
        clock_s, request_id, prompt_tokens, max_new_tokens, n, beam_width, priority, logprobs, timeout_s = self.sizes
        return Arrival(
            clock_s=clock_s,
            request=request_id,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            n=n,
            beam_width=beam_width,
            priority=priority,
            prompt_logprobs=logprobs,
            timeout_s=timeout_s,
            blocks=numbers.of(self._prompt_ids()) if self._keeps_tokens else (),
        )

    def sequences(self) -> list[tuple[str, SequenceOf[int]]]:
        """Returns the names and the present tokens of its sequences that were made. Those of an ended request are there
        if a recording needs them.
        """
        if (request := self.request) is not None:
            return [(seq.name, seq.token_ids) for seq in request.made_sequences]
        prompt = _unpacked(self._prompt)
        written = enumerate(self._written)
        return [(_name((self.request_id, index)), prompt + _unpacked(tokens)) for index, tokens in written]

    def _prompt_ids(self) -> SequenceOf[int]:
        request = self.request
        return _unpacked(self._prompt) if request is None else request.prompt_ids


class FinishRecord(NamedTuple):
    """The end of a sequence."""

    key: Key
    clock_s: float
    reason: FinishReason
    num_tokens: int
    # Set if this was the last of its request, which has ended with it.
    request: ArrivalRecord | None
    step: int | None

    @property
    def num_bytes(self) -> int:
        return 250 + (0 if self.request is None else self.request.num_written_bytes)

    def finish(self) -> Finish:
        return Finish(
            clock_s=self.clock_s,
            sequence=_name(self.key),
            reason=self.reason,
            num_tokens=self.num_tokens,
            step=self.step,
        )


class WithdrawalRecord(NamedTuple):
    """See :class:`~fastgen.runtime.flight.recording.Withdrawal`."""

    request_id: int
    step: int

    @property
    def num_bytes(self) -> int:
        return 200

    def withdrawal(self) -> Withdrawal:
        return Withdrawal(request=self.request_id, step=self.step)


class BeamMoves:
    """The changes that a beam search makes to its sequences after a step."""

    __slots__ = ("given", "moves", "request_id", "step")

    def __init__(self) -> None:
        self.request_id = self.step = -1
        # Each move: the sequence, its new parent, the tokens it had, packed, and how many of them are prompt tokens.
        self.moves: list[tuple[Key, Key | None, bytes, int]] = []
        self.given: tuple[Key, ...] = ()

    def add(self, beam: Sequence, parent: Sequence | None, *, keeps_tokens: bool) -> None:
        tokens = _packed(beam.token_ids) if keeps_tokens else b""
        self.moves.append((beam.key, None if parent is None else parent.key, tokens, beam.num_prompt_tokens))

    @property
    def num_bytes(self) -> int:
        return 300 + sum(200 + len(tokens) for _, _, tokens, _ in self.moves)

    def beams(self, numbers: BlockNumbers) -> Beams:
        """Returns the event in a recording whose blocks have ``numbers``."""
        moves = tuple(
            BeamMove(
                _name(key),
                None if parent is None else _name(parent),
                numbers.behind_prompt(_unpacked(tokens), num_prompt),
            )
            for key, parent, tokens, num_prompt in self.moves
        )
        return Beams(request=self.request_id, step=self.step, moves=moves, given=tuple(map(_name, self.given)))


def keys(sequences: Iterable[Sequence]) -> tuple[Key, ...]:
    """Returns the keys of ``sequences``."""
    return tuple([seq.key for seq in sequences])


def _sizes(request: Request) -> _Sizes:
    sampling = request.sampling
    return (
        request.arrival_s,
        request.request_id,
        len(request.prompt_ids),
        sampling.max_new_tokens,
        sampling.n,
        sampling.beam_width,
        sampling.priority,
        sampling.prompt_logprobs is not None,
        sampling.timeout_s,
    )


def _chunk(chunk: ScheduledTokens) -> tuple[Key, int, int, int]:
    return chunk.seq.key, chunk.start, chunk.num_tokens, len(chunk.drafts)


def _name(key: Key) -> str:
    return f"{key[0]}.{key[1]}"


def _packed(numbers: SequenceOf[int]) -> bytes:
    return array(_PACKED, numbers).tobytes()


def _unpacked(packed: bytes) -> list[int]:
    return memoryview(packed).cast(_PACKED).tolist()
