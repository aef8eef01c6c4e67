"""The work and the time of each recorded step, for models of step time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fastgen.runtime.flight.recording import Recording, Step
from fastgen.runtime.step_cost.fit import MeasuredStep
from fastgen.runtime.step_cost.work import StepWork, decode_work


def work_of(step: Step) -> StepWork:
    """Returns the work of ``step``, as its schedule stated it."""
    work = decode_work([entry.start for entry in step.entries[: step.num_decodes]])
    for entry in step.entries[step.num_decodes :]:
        work = work.with_chunk(entry.start, entry.num_tokens, 1 + entry.num_drafts if entry.num_sampled else 0)
    return work


def measured_steps(recording: Recording) -> Iterator[tuple[Step, MeasuredStep]]:
    """Yields each step that completed, with the time that it took: since it began, or since the one before ended if
    that was later.
    """
    last_end_s = -math.inf
    for step in recording.steps:
        if step.ended_s is not None:
            yield step, MeasuredStep(work_of(step), step.ended_s - max(step.began_s, last_end_s), step.num_decodes)
            last_end_s = step.ended_s
