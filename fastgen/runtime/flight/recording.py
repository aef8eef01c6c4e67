"""What a flight recording holds: the engine's sizes, and in the order they happened, arrivals, steps and ends.

It is enough to tell where a request's time went (:mod:`fastgen.runtime.flight.why`), to run the scheduler again
(:mod:`fastgen.runtime.flight.replay`) and to draw what happened (:mod:`fastgen.runtime.flight.timeline`). Clock values
are seconds of the engine's clock, a monotonic one; ``Header.clock_s`` and ``Header.started`` say which wall time one of
them was.

No text and no token id is in it. Of the tokens of a sequence it keeps, where the engine has a prefix cache, one number
for each full block: two blocks have the same number where their tokens and all before them are the same, and numbers
follow the order of first appearance. So it tells which prompts begin alike and for how long, and how long each is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.outputs import FinishReason

FORMAT = "fastgen flight recording"
VERSION = 5
# For :mod:`fastgen.runtime.flight.recording_file`: a number is no string, and an unknown field is an error.
_STRICT = {"extra": "forbid", "strict": True}


class Entry(NamedTuple):
    """Tokens ``start .. start + num_tokens - 1`` of a sequence, named ``"request.index"``, that a step computed, the
    last ``num_drafts`` of them guesses; and how many tokens the step gave it: none while its prompt goes on.
    """

    sequence: str
    start: int
    num_tokens: int
    num_drafts: int
    num_sampled: int

    @property
    def end(self) -> int:
        """How many tokens of the sequence were computed behind it: all of these but the guesses that were wrong."""
        num_accepted = self.num_sampled - 1 if self.num_drafts and self.num_sampled else 0
        return self.start + self.num_tokens - self.num_drafts + num_accepted


class Admission(NamedTuple):
    """A waiting sequence was given a slot. Its first ``start`` tokens were computed already, for the first sequence of
    its request or by others; ``cached_tokens`` were found in the prefix cache the first time it was admitted.
    """

    sequence: str
    slot: int
    start: int
    cached_tokens: int


class BlockEntry(NamedTuple):
    """Entry ``table_index`` of the block table that the sequence on ``slot`` has in a KV group became ``block``."""

    slot: int
    group: int
    table_index: int
    block: int


class Copy(NamedTuple):
    """Entry ``table_index`` of a table in ``group`` was the shared block ``source`` and became its copy."""

    group: int
    table_index: int
    source: int
    destination: int


class BeamMove(NamedTuple):
    """``sequence`` goes on from ``parent``, or where that is ``None`` gives back its blocks and waits. ``dropped`` are
    the numbers of the full blocks behind its prompt's that it had come to before.
    """

    sequence: str
    parent: str | None
    dropped: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The sizes and rules that the scheduler decides by. ``num_blocks`` counts the padding block."""

    __pydantic_config__: ClassVar = _STRICT
    token_budget: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    # Of each KV group, how many positions a token sees; ``None`` for all.
    windows: tuple[int | None, ...]
    # Most tokens of a sequence in a step, where that bounds what a window holds.
    max_chunk: int | None
    # A name of :mod:`fastgen.runtime.scheduling.policies`, or for a policy of another's the name of its class.
    policy: str
    policy_parameters: dict[str, int | float | None]
    aging_s: float
    prefix_caching: bool
    # Whether steps are launched before the tokens of those before them are known.
    runs_ahead: bool = False


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first line. ``started`` is the wall time, ISO 8601, at which the clock showed ``clock_s``."""

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["header"] = "header"
    format: str = FORMAT
    version: int = VERSION
    fastgen: str
    model: str
    started: str
    clock_s: float
    # Number of the first step that is still there; above 0 where the recorder's ring let earlier ones go.
    first_step: int
    engine: EngineFacts


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request was submitted. ``blocks`` are the numbers of its prompt's full blocks; none without a prefix cache."""

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["arrival"] = "arrival"
    clock_s: float
    request: int
    prompt_tokens: int
    max_new_tokens: int
    n: int = 1
    beam_width: int = 1
    priority: int = 0
    # Asked for, so that nothing of the prompt is taken from the prefix cache.
    prompt_logprobs: bool = False
    timeout_s: float | None = None
    blocks: tuple[int, ...] = ()

    @property
    def sequences(self) -> tuple[str, ...]:
        """The names of its sequences: its completions, or the beams that search for them."""
        return tuple(f"{self.request}.{index}" for index in range(max(self.n, self.beam_width)))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: what was decided, and when it began, was scheduled, had run, and ended.

    ``entries`` are in the schedule's order, the first ``num_decodes`` of them decodes of one token; decodes with drafts
    stand behind the prompts. Counts are those after scheduling and before the step ran: sequences running and waiting,
    blocks held by no one (``blocks_cached`` of which keep what the prefix cache may use again).
    """

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["step"] = "step"
    step: int
    began_s: float
    scheduled_s: float
    # Of the time between ``scheduled_s`` and ``ran_s``, what building the batch took.
    build_s: float
    # ``None`` where the step failed; its requests end then.
    ran_s: float | None
    ended_s: float | None
    # The captured size that holds its tokens.
    size: int
    # Tokens that it was filled up with.
    num_padding: int
    num_decodes: int
    entries: tuple[Entry, ...]
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[str, ...] = ()
    block_entries: tuple[BlockEntry, ...] = ()
    block_copies: tuple[Copy, ...] = ()
    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int = 0
    # Of a step that was scheduled ahead of the tokens of the step before: whoever had to wait for theirs. Its forward
    # pass runs behind that step's, so its times overlap with that one's.
    held_back: tuple[str, ...] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def prompts(self) -> tuple[Entry, ...]:
        """The entries that are chunks of prompts, or of what is computed again after a preemption."""
        return tuple(entry for entry in self.entries[self.num_decodes :] if not entry.num_drafts)

    @property
    def end_s(self) -> float:
        """When it was over; of a step that failed, the last that is known."""
        return self.scheduled_s if self.ended_s is None else self.ended_s

    def entry_of(self, sequence: str) -> Entry | None:
        """What it computed of ``sequence``, if anything."""
        return next((entry for entry in self.entries if entry.sequence == sequence), None)


@dataclass(frozen=True, kw_only=True)
class Finish:
    """A sequence ended, and its blocks and its slot came free."""

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["finish"] = "finish"
    clock_s: float
    sequence: str
    reason: FinishReason
    # Generated tokens.
    num_tokens: int
    # The step whose outcome ended it; ``None`` where it was ended between steps.
    step: int | None


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Numbers of the full blocks of a sequence that follow those of its prompt, as far as it had come."""

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["blocks"] = "blocks"
    sequence: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Beams:
    """The beams of a request moved by a token after a step: ``moves`` in their order, those that go on in another's
    place before those that give back their blocks, and between them each of ``given`` was given its token. With the
    last token of a search nothing moves.
    """

    kind: Literal["beams"] = "beams"
    __pydantic_config__: ClassVar = _STRICT

    request: int
    step: int
    moves: tuple[BeamMove, ...]
    given: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Withdrawal:
    """What was computed for a request proved to be wrong after a step, and left the prefix cache, with all that begins
    like it. Its sequences end next."""

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["withdrawal"] = "withdrawal"
    request: int
    step: int


class SequenceState(NamedTuple):
    """A sequence between two steps. ``node`` is where it publishes its next block, the root being 0 and the nodes of
    the snapshot following; ``None`` where nothing of it is published. ``slot`` is ``None`` where it waits.
    """

    sequence: str
    num_tokens: int
    num_computed: int
    cached_tokens: int
    num_preemptions: int
    urgency: tuple[int, int, int]
    slot: int | None
    tables: tuple[tuple[int, ...], ...]
    node: int | None


class PrefixState(NamedTuple):
    """A block of the prefix cache: behind which other (0 is the beginning), the number of its tokens, and which block
    has them in each KV group; 0 for none."""

    parent: int
    number: int
    blocks: tuple[int, ...]


class Waiting(NamedTuple):
    """Who waits for a slot, since when in its class, and its urgency: class, turn, index."""

    sequence: str
    since_s: float
    urgency: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The scheduler's state before ``step``, from where a replay can begin; :mod:`fastgen.runtime.flight.snapshot`
    has what each field is made of. Order matters everywhere, also of free and of cached blocks.
    """

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["snapshot"] = "snapshot"
    step: int
    num_opened: int
    next_lookahead: int
    now_s: float
    # What the policy has learned.
    policy: tuple[float, ...]
    free: tuple[int, ...]
    cached: tuple[int, ...]
    nodes: tuple[PrefixState, ...]
    # All that run, and of those that wait who has run before or is not the first of its request.
    sequences: tuple[SequenceState, ...]
    decodes: tuple[str, ...]
    prompts: tuple[str, ...]
    free_slots: tuple[int, ...]
    updates: tuple[BlockEntry, ...]
    waiting: tuple[Waiting, ...]
    held: tuple[str, ...]
    forked: tuple[str, ...]
    copies: tuple[tuple[str, Copy], ...]
    private: tuple[str, ...]
    may_share: tuple[str, ...]
    deferred: tuple[str, ...]
    lookahead: tuple[str, ...]


Event = Arrival | Step | Finish | Blocks | Beams | Withdrawal | Snapshot


@dataclass(frozen=True)
class Recording:
    """A recording, whole: the header, and the events in the order they happened."""

    header: Header
    events: tuple[Event, ...] = field(repr=False)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple(event for event in self.events if isinstance(event, Step))

    @cached_property
    def arrivals(self) -> dict[int, Arrival]:
        return {event.request: event for event in self.events if isinstance(event, Arrival)}

    @cached_property
    def finishes(self) -> dict[str, Finish]:
        return {event.sequence: event for event in self.events if isinstance(event, Finish)}

    def together(self, sequence: str) -> tuple[str, ...]:
        """The sequences that are admitted and end with this one: all beams of its search, or it alone."""
        arrival = self.arrivals[request_of(sequence)]
        return arrival.sequences if arrival.beam_width > 1 else (sequence,)

    @property
    def end_s(self) -> float:
        """The last moment that the recording knows of."""
        times_s = [self.header.clock_s, *(step.end_s for step in self.steps)]
        return max(times_s + [event.clock_s for event in self.events if isinstance(event, Arrival | Finish)])

    def arrival(self, sequence: str) -> Arrival:
        """When the request of ``sequence`` came.

        :raises InvalidArgumentError: where the recording knows no such sequence.
        """
        request, _, _ = sequence.partition(".")
        found = self.arrivals.get(int(request)) if request.isdecimal() else None
        if found is None or sequence not in found.sequences:
            held = f"requests {min(self.arrivals)} to {max(self.arrivals)}" if self.arrivals else "no request"
            raise InvalidArgumentError(f"the recording holds {held}, but no sequence {sequence!r}")
        return found


def request_of(sequence: str) -> int:
    """The request that a sequence belongs to."""
    return int(sequence.partition(".")[0])
