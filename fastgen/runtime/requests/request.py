"""A request and its sequences: the host's record of what is to be computed and how far it has come."""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Final

from fastgen.errors import InvalidArgumentError

if TYPE_CHECKING:
    from fastgen.runtime.sampling.sampling_params import SamplingParams
    from fastgen.runtime.sampling.structured_output import Constraint


# Stands for a sequence's newest token while that has been sampled and is not known on the host.
TO_COME: Final = -1


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life; a preempted one is waiting again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One prompt and its sampling parameters, with ``sampling.n`` sequences that start from the prompt, or as many as
    its ``beam_width`` where that is above 1.

    ``request_id`` numbers requests in order of arrival; ``arrival_s`` is when this one came (seconds).
    ``constraint`` is its compiled ``response_format``, if it has one.

    Its sequences are made when somebody asks for them, which is when its turn is near: however many wait, a request is
    one object.
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
        self.prompt_ids = tuple(prompt_ids)  # which the garbage collector passes by, however many wait
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

    def queue(self, turn: int) -> None:
        """It came to wait as number ``turn``."""
        self.turn = turn
        for seq in self._sequences or ():
            seq.urgency = (self.sampling.priority, turn, seq.index)

    @property
    def num_sequences(self) -> int:
        return max(self.sampling.n, self.sampling.beam_width)

    @property
    def has_beams(self) -> bool:
        """Whether its sequences are the beams of one search, which only move together."""
        return self.sampling.beam_width > 1

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {len(self.prompt_ids)} prompt tokens, {self.num_sequences} sequences)"


class Sequence:
    """The tokens of one answer: the prompt and what was generated, of which the first ``num_computed_tokens`` have
    their keys and values in the KV cache.

    There is no prefill or decode phase. The scheduler closes the gap between ``num_computed_tokens`` and
    ``num_tokens``, and a step that closes it wants a token sampled. The newest token is therefore never computed yet,
    and a preempted sequence simply has a wide gap again.

    ``token_ids`` is appended to by the engine; every other field is the scheduler's and its KV cache manager's to
    write. ``block_tables`` holds one list of block ids per KV group, and ``slot`` the row of the device-side arrays;
    both are held from admission until the sequence finishes or is preempted. ``matcher`` says what a constrained
    sequence may have next; it stays, whatever becomes of slot and blocks, and moves on with each token.
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
        # Of the tokens it came with, those that the prefix cache had when it was first admitted.
        self.num_cached_tokens = 0
        self.matcher = None if request.constraint is None else request.constraint.matcher()

    @property
    def name(self) -> str:
        """The key as recordings spell it."""
        return f"{self.key[0]}.{self.index}"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decode(self) -> bool:
        """Whether only the token generated last is pending, so that the sequence costs one token a step.

        False while any of the prompt is pending, though it be one token, and while more of a preempted sequence is.
        """
        return self.num_computed_tokens >= self.num_prompt_tokens and self.num_pending_tokens == 1

    @property
    def begins_request(self) -> bool:
        """Whether nothing of its request was ever admitted: it is the first sequence, and was not preempted."""
        return not self.index and not self.num_preemptions

    def __repr__(self) -> str:
        return (
            f"Sequence({self.key[0]}.{self.index}, {self.status.name.lower()}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed)"
        )
