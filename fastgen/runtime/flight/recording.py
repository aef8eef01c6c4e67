"""The contents of a flight recording: the engine's sizes, then arrivals, steps and ends in the order they happened.

A recording suffices to explain where a request's time went (:mod:`fastgen.runtime.flight.why`), to run the scheduler
again (:mod:`fastgen.runtime.flight.replay`) and to draw a timeline (:mod:`fastgen.runtime.flight.timeline`). Clock
values are seconds of the engine's monotonic clock; ``Header.clock_s`` and ``Header.started`` relate one of them to wall
time.

A recording contains no text and no token ids. If the engine has a prefix cache, it contains one number for each full
block of a sequence's tokens. Two blocks have the same number if their tokens and all tokens before them are the same.
The numbers follow the order of first appearance. A recording therefore reveals which prompts share a beginning, how
long that beginning is, and how long each prompt is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.outputs import FinishReason

FORMAT = "fastgen flight recording"
VERSION = 7
# Strict, for :mod:`fastgen.runtime.flight.recording_file`: no number as a string, and no unknown field.
_STRICT = {"extra": "forbid", "strict": True}


class Entry(NamedTuple):
    """Tokens ``start .. start + num_tokens - 1`` of the sequence ``"request.index"``, computed by one step.

    The last ``num_drafts`` of them are draft tokens. ``num_sampled`` is how many tokens the step gave the sequence:
    none before the last chunk of its prompt.
    """

    sequence: str
    start: int
    num_tokens: int
    num_drafts: int
    num_sampled: int

    @property
    def end(self) -> int:
        """Returns how many tokens of the sequence are computed after the step. Rejected drafts do not count."""
        num_accepted = self.num_sampled - 1 if self.num_drafts and self.num_sampled else 0
        return self.start + self.num_tokens - self.num_drafts + num_accepted


class Admission(NamedTuple):
    """A waiting sequence was given a slot.

    Its first ``start`` tokens were computed already, by the first sequence of its request or by other requests.
    ``cached_tokens`` were found in the prefix cache when it was first admitted.
    """

    sequence: str
    slot: int
    start: int
    cached_tokens: int


class BlockEntry(NamedTuple):
    """Entry ``table_index`` of the block table that the sequence in ``slot`` has in a KV group became ``block``."""

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
    """``sequence`` continues from ``parent``; if ``parent`` is ``None``, it gives back its blocks and waits.
    ``dropped`` are the numbers of its full blocks after those of its prompt, up to now.
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
    # For each KV group, how many positions a token sees; ``None`` for all.
    windows: tuple[int | None, ...]
    # Most tokens of one sequence in a step, if that bounds the blocks that a window holds.
    max_chunk: int | None
    # A name of :mod:`fastgen.runtime.scheduling.policies`, or the class name of a custom policy.
    policy: str
    policy_parameters: dict[str, int | float | None]
    aging_s: float
    prefix_caching: bool
    # Whether steps are launched before the tokens of those before them are known.
    runs_ahead: bool = False
    # What is reserved for a running sequence, see :mod:`fastgen.runtime.scheduling.reservations`.
    kv_reservation: str | None = None
    # Longest prompt and answer together; ``None`` where the scheduler does not need it.
    max_model_len: int | None = None
    # Processes that share the model by tensor parallelism.
    ranks: int = 1


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
    # Number of the first step in the recording; above 0 if earlier ones have left the recorder's ring.
    first_step: int
    engine: EngineFacts


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request was submitted. ``blocks`` are the numbers of its prompt's full blocks; it is empty without a prefix
    cache.
    """

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["arrival"] = "arrival"
    clock_s: float
    request: int
    prompt_tokens: int
    max_new_tokens: int
    n: int = 1
    beam_width: int = 1
    priority: int = 0
    # Whether prompt log-probabilities were requested; then the prefix cache is not used for the prompt.
    prompt_logprobs: bool = False
    timeout_s: float | None = None
    blocks: tuple[int, ...] = ()

    @property
    def sequences(self) -> tuple[str, ...]:
        """Returns the names of its sequences: its completions, or the beams that search for them."""
        return tuple(f"{self.request}.{index}" for index in range(max(self.n, self.beam_width)))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: what was decided, and the times at which it began, was scheduled, had run and ended.

    ``entries`` are in the schedule's order. The first ``num_decodes`` of them are decodes of one token; decodes with
    drafts come after the prompts. The counts hold after scheduling and before the step ran: running sequences, waiting
    sequences, and blocks that are neither held nor reserved (``blocks_cached`` blocks without a holder are kept for the
    prefix cache).
    """

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["step"] = "step"
    step: int
    began_s: float
    scheduled_s: float
    # The part of the time between ``scheduled_s`` and ``ran_s`` that building the batch took.
    build_s: float
    # ``None`` if the step failed; its requests end then.
    ran_s: float | None
    ended_s: float | None
    # The captured size that was used.
    size: int
    # Padding tokens in that size.
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
    # Set if the step was scheduled before the previous step's tokens were known: the sequences that had to wait for
    # theirs. The two forward passes run one after the other, so the times of the two steps overlap.
    held_back: tuple[str, ...] | None = None
    # Sequences whose last token did not count, because it was not known in time what their format allows next.
    postponed: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def prompts(self) -> tuple[Entry, ...]:
        """Returns the entries that are chunks of prompts, or of tokens computed again after a preemption."""
        return tuple(entry for entry in self.entries[self.num_decodes :] if not entry.num_drafts)

    @property
    def end_s(self) -> float:
        """Returns when the step ended; for a failed step, the last time that is known."""
        return self.scheduled_s if self.ended_s is None else self.ended_s

    def entry_of(self, sequence: str) -> Entry | None:
        """Returns the entry of ``sequence`` in this step, or ``None``."""
        return next((entry for entry in self.entries if entry.sequence == sequence), None)


@dataclass(frozen=True, kw_only=True)
class Finish:
    """A sequence ended; its blocks and its slot became free."""

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["finish"] = "finish"
    clock_s: float
    sequence: str
    reason: FinishReason
    # Generated tokens.
    num_tokens: int
    # The step whose outcome ended it; ``None`` if it was ended between steps.
    step: int | None


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The numbers of the full blocks of a sequence that follow those of its prompt, up to now."""

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["blocks"] = "blocks"
    sequence: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Beams:
    """The beams of a request moved on by one token after a step.

    ``moves`` are in their order: first the beams that continue from another beam, then those that give back their
    blocks. Between the two, each of ``given`` was given its token. The last token of a search causes no moves.
    """

    kind: Literal["beams"] = "beams"
    __pydantic_config__: ClassVar = _STRICT

    request: int
    step: int
    moves: tuple[BeamMove, ...]
    given: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Withdrawal:
    """The results computed for a request proved to be wrong after a step. They and all cached continuations of them
    left the prefix cache. The request's sequences end next.
    """

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["withdrawal"] = "withdrawal"
    request: int
    step: int


class SequenceState(NamedTuple):
    """The state of a sequence between two steps.

    ``node`` is the prefix-cache node below which it publishes its next block: 0 is the root, then come the nodes of the
    snapshot; it is ``None`` if nothing of the sequence is published. ``slot`` is ``None`` while it waits.
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
    """One block of tokens in the prefix cache: its parent (0 is the root), the number of its tokens, and the block that
    holds it in each KV group (0 for none).
    """

    parent: int
    number: int
    blocks: tuple[int, ...]


class Waiting(NamedTuple):
    """A sequence that waits for a slot: since when it waits in its class, and its urgency (class, turn, index)."""

    sequence: str
    since_s: float
    urgency: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The scheduler's state before ``step``, from which a replay can begin. :mod:`fastgen.runtime.flight.snapshot`
    builds each field. Every order matters, also that of free and cached blocks.
    """

    __pydantic_config__: ClassVar = _STRICT
    kind: Literal["snapshot"] = "snapshot"
    step: int
    num_opened: int
    now_s: float
    # The policy's learned state.
    policy: tuple[float, ...]
    free: tuple[int, ...]
    cached: tuple[int, ...]
    nodes: tuple[PrefixState, ...]
    # All running sequences, and the waiting ones that have run before or are not the first of their request.
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


Event = Arrival | Step | Finish | Blocks | Beams | Withdrawal | Snapshot


@dataclass(frozen=True)
class Recording:
    """A complete recording: the header, and the events in the order they happened."""

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
        """Returns the sequences that are admitted and end with this one: all beams of its search, or it alone."""
        arrival = self.arrivals[request_of(sequence)]
        return arrival.sequences if arrival.beam_width > 1 else (sequence,)

    @property
    def end_s(self) -> float:
        """Returns the latest time in the recording."""
        times_s = [self.header.clock_s, *(step.end_s for step in self.steps)]
        return max(times_s + [event.clock_s for event in self.events if isinstance(event, Arrival | Finish)])

    def arrival(self, sequence: str) -> Arrival:
        """Returns the arrival of the request that ``sequence`` belongs to.

        :raises InvalidArgumentError: if the recording has no such sequence.
        """
        request, _, _ = sequence.partition(".")
        found = self.arrivals.get(int(request)) if request.isdecimal() else None
        if found is None or sequence not in found.sequences:
            held = f"requests {min(self.arrivals)} to {max(self.arrivals)}" if self.arrivals else "no request"
            raise InvalidArgumentError(f"the recording holds {held}, but no sequence {sequence!r}")
        return found


def request_of(sequence: str) -> int:
    """Returns the number of the request that a sequence belongs to."""
    return int(sequence.partition(".")[0])
