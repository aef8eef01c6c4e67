"""Steps that overlap, and which sequences can go on before the tokens that a step chose for them are known on the host.

The forward pass of the next step reads such a token where it was sampled, on the device. All else the host does with
it (text, stops, masks, penalties) it does while that forward pass runs, before it is sampled from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fastgen.runtime.flight.recorder import StepRecord
from fastgen.runtime.requests.request import TO_COME, Sequence, SequenceStatus
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.step.model_runner import LaunchedStep


@dataclass
class InFlight:
    """A step between its schedule and its tokens. What failed, of requests that are new in it or of the step itself, is
    told when all that came before has been."""

    schedule: Schedule
    record: StepRecord
    unprepared: list[tuple[Sequence, Exception]]
    launched: LaunchedStep | None = None
    error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        return bool(self.unprepared) or self.error is not None

    @property
    def sequences(self) -> list[Sequence]:
        return [entry.seq for entry in self.schedule.entries]


def awaited(schedule: Schedule, may_draft: Callable[[Sequence], bool]) -> tuple[list[Sequence], list[Sequence]]:
    """Of the running sequences that the step of ``schedule`` samples for: those that can go on, and those that are held
    back until they have their token.

    The latter are those whose inputs are made on the host (beams, which take the places of one another, and drafted
    sequences, of which nobody knows how many tokens they get), and those that end with this token for sure.
    """
    go_on: list[Sequence] = []
    held_back: list[Sequence] = []
    drafted = {chunk.seq for chunk in schedule.chunks if chunk.drafts}
    for seq in (*schedule.decodes, *(chunk.seq for chunk in schedule.chunks if chunk.samples)):
        if seq.status is not SequenceStatus.RUNNING:
            continue
        num_generated = seq.num_tokens + 1 - seq.num_prompt_tokens
        needs_host = seq.request.has_beams or seq in drafted or num_generated >= seq.request.sampling.max_new_tokens
        with tokens_to_come([seq]):
            needs_host = needs_host or may_draft(seq)
        (held_back if needs_host else go_on).append(seq)
    return go_on, held_back


@contextlib.contextmanager
def tokens_to_come(sequences: Iterable[Sequence]) -> Iterator[None]:
    """Within, each of ``sequences`` has one token more, which nobody knows."""
    given: list[Sequence] = []
    try:
        for seq in sequences:
            seq.token_ids.append(TO_COME)
            given.append(seq)
        yield
    finally:
        for seq in given:
            seq.token_ids.pop()
