"""One step of the engine, as a record that each phase fills in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampled import PromptLogprobs, SampledToken
from fastgen.runtime.scheduling.drafts import SampledSequence
from fastgen.runtime.scheduling.schedule import Schedule

if TYPE_CHECKING:  # the host's part of a step needs no torch
    from torch import Tensor

    from fastgen.layers.ragged_batch import RaggedBatch


class Step:
    """A step on its way from a schedule to tokens. Times are the engine clock's. Each phase sets its own fields; until
    then they have their defaults.
    """

    # Schedule: requests whose first token this step computes.
    admitted: tuple[Request, ...] = ()

    # Launch. A step that runs in one native call has no batch.
    batch: RaggedBatch | None = None
    # What each row of logits is sampled for.
    rows: SequenceOf[SampledSequence] = ()
    hidden: Tensor | None = None
    # The row at which the tokens of each chunk begin whose log-probabilities are asked for.
    first_rows: Mapping[Sequence, int] = {}
    # Seconds to build the batch.
    build_s: float = 0.0
    # Tokens that fill the batch up to its size.
    num_padding: int = 0
    # Whether the scheduler counts on it: then it is committed even if it fails.
    counts: bool = False

    # Sample. Waits for the tokens of the rows, and returns them.
    tokens: Callable[[], list[SampledToken]] | None = None
    # Waits for log-probabilities of prompt tokens, and returns them.
    scores: Callable[[], list[PromptLogprobs]] | None = None
    # Sequences whose token is dropped, because it was not known in time what their format allows.
    postponed: frozenset[Sequence] = frozenset()

    # Collect: a token for every sequence that caught up, and one more for each of its drafts that was accepted.
    sampled: SequenceOf[tuple[Sequence, SampledToken]] = ()
    # How many drafts were accepted, for each sequence that had some.
    num_accepted: Mapping[Sequence, int] | None = None
    prompt_logprobs: SequenceOf[PromptLogprobs] = ()
    ran_s: float | None = None

    # Update. Each token that a sequence was given, and the time of the token before it, ``None`` for its first.
    given: list[tuple[Sequence, float | None]]
    ended_s: float | None = None
    # Seconds since it began, or since the step before ended if that was later.
    took_s: float = 0.0

    # Whether it cannot complete, and why: requests that could not be prepared, or the failure of the step itself.
    has_failed: bool = False
    unprepared: tuple[tuple[Sequence, Exception], ...] = ()
    error: Exception | None = None

    def __init__(
        self, schedule: Schedule, began_s: float, scheduled_s: float, held_back: SequenceOf[Sequence] | None = None
    ):
        self.schedule, self.began_s, self.scheduled_s = schedule, began_s, scheduled_s
        # A step is ahead if it is scheduled and launched before the tokens of the step before are known. It has the
        # sequences that have to wait for their tokens.
        self.is_ahead, self.held_back = held_back is not None, held_back
        self.given = []

    @property
    def sequences(self) -> list[Sequence]:
        """Returns all sequences that have tokens in it."""
        return [*self.schedule.decodes, *(chunk.seq for chunk in self.schedule.chunks)]
