"""A request and its sequences: the host's record of what is to be computed and how far it has come."""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from typing import Final

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.constraint import Constraint
from fastgen.runtime.requests.sampling_params import SamplingParams

# Stands for a sequence's newest token while that token has been sampled and is not known on the host.
TO_COME: Final = -1


class SequenceStatus(enum.Enum):
    """The state of a sequence; a preempted one is waiting again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One prompt and its sampling parameters, with ``sampling.n`` sequences that start from the prompt, or as many as
    its ``beam_width`` where that is above 1.

    ``request_id`` numbers requests in order of arrival; ``arrival_s`` is when this one came (seconds).
    ``constraint`` is its compiled ``response_format``, if it has one.

    Its sequences are created at first use, when the request is near the head of the queue. While it waits, a request
    is one object.
    """

    __slots__ = ("_sequences", "arrival_s", "constraint", "prompt_ids", "request_id", "sampling", "turn")

    def __init__(
        self,
        request_id: int,
        prompt_ids: SequenceOf[int],
        sampling: SamplingParams,
        arrival_s: float,
        constraint: Constraint | None = None,
    ):
        if not prompt_ids:
            raise InvalidArgumentError(f"request {request_id}: the prompt has no tokens; give it at least one")
        self.request_id = request_id
        self.prompt_ids = tuple(prompt_ids)  # the garbage collector does not visit a tuple of integers
        self.sampling = sampling
        self.arrival_s = arrival_s
        self.constraint = constraint
        self.turn = 0
        self._sequences: tuple[Sequence, ...] | None = None

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        if self._sequences is None:
            self._sequences = tuple([Sequence(self, index) for index in range(self.num_sequences)])
        return self._sequences

    @property
    def made_sequences(self) -> tuple[Sequence, ...]:
        """Returns its sequences, or none if they were not created yet. Unlike :attr:`sequences`, any thread may read
        it: a second one would create other objects than those that the scheduler has.
        """
        return self._sequences or ()

    def queue(self, turn: int) -> None:
        """Notes that the request waits as number ``turn``."""
        self.turn = turn
        for seq in self.made_sequences:
            seq.urgency = (self.sampling.priority, turn, seq.index)

    @property
    def num_sequences(self) -> int:
        return max(self.sampling.n, self.sampling.beam_width)

    @property
    def has_beams(self) -> bool:
        """Returns whether the sequences are the beams of one search, which only move together."""
        return self.sampling.beam_width > 1

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {len(self.prompt_ids)} prompt tokens, {self.num_sequences} sequences)"


class Sequence:
    """The tokens of one answer: the prompt and what was generated, of which the first ``num_computed_tokens`` have
    their keys and values in the KV cache.

    There is no prefill or decode phase. The scheduler closes the gap between ``num_computed_tokens`` and
    ``num_tokens``. A step that closes it samples the next token. So the newest token is never computed yet, and a
    preempted sequence has a wide gap again.

    The engine appends to ``token_ids``. The scheduler and the KV cache manager write every other field.
    ``block_tables`` holds one list of block ids per KV group, and ``slot`` is the row of the device-side arrays; a
    sequence holds both from admission until it finishes or is preempted. ``matcher`` knows which tokens a constrained
    sequence may have next. It survives preemption and advances with each token.
    """

    __slots__ = (
        "block_tables",
        "index",
        "key",
        "matcher",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "request",
        "slot",
        "status",
        "token_ids",
        "urgency",
    )

    def __init__(self, request: Request, index: int):
        self.request = request
        self.index = index
        # Order of arrival: the smaller key came first.
        self.key = (request.request_id, index)
        # The smaller is the more urgent: class, turn in it, index; :mod:`fastgen.runtime.scheduling.waiting_queue`.
        self.urgency = (request.sampling.priority, request.turn, index)
        self.token_ids = list(request.prompt_ids)
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_computed_tokens = 0
        self.block_tables: list[list[int]] = []
        self.slot: int | None = None
        self.status = SequenceStatus.WAITING
        self.num_preemptions = 0
        # Tokens that the prefix cache held when the sequence was first admitted.
        self.num_cached_tokens = 0
        self.matcher = None if request.constraint is None else request.constraint.matcher()

    @property
    def name(self) -> str:
        """Returns the key as recordings spell it."""
        return f"{self.key[0]}.{self.index}"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Returns how many tokens are known and not computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def begins_request(self) -> bool:
        """Returns whether this is the first sequence of its request and was never preempted."""
        return not self.index and not self.num_preemptions

    def __repr__(self) -> str:
        return (
            f"Sequence({self.key[0]}.{self.index}, {self.status.name.lower()}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed)"
        )
