"""The work and the time of each recorded step, for models of step time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from fastgen.runtime.flight.recording import Recording, Step
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.fit import MeasuredStep, fit_step_cost
from fastgen.runtime.step_cost.sight import Sight, seen_work
from fastgen.runtime.step_cost.work import StepWork, decode_work

# Steps from which a recording says what one of them is expected to take.
_LEAST_STEPS = 50


def work_of(step: Step, before: Step | None, sights: SequenceOf[Sight] = ()) -> StepWork:
    """Returns the work of ``step``, which followed ``before``, on layers with these ``sights``."""
    positions = [entry.start for entry in step.entries[: step.num_decodes]]
    chunks = step.entries[step.num_decodes :]
    work = decode_work(positions)
    for entry in chunks:
        work = work.with_chunk(entry.start, entry.num_tokens, 1 + entry.num_drafts if entry.num_sampled else 0)
    work = seen_work(work, positions, [(entry.start, entry.num_tokens) for entry in chunks], sights)
    if work.num_chunks or before is None or before.prompts or _names(before) != _names(step):
        work = work._replace(num_built=1)
    return work


def _names(step: Step) -> list[str]:
    return [entry.sequence for entry in step.entries]


class ExpectedTimes:
    """The time that each step of a recording took, and the time that ``cost`` expects of it.

    Without a ``cost`` it is fitted to the recording itself, if that has enough steps; else nothing is expected.
    """

    def __init__(self, recording: Recording, cost: StepCost | None = None):
        sights = () if cost is None else cost.sights
        self._measured = {step.step: measured for step, measured in measured_steps(recording, sights)}
        if cost is None and len(self._measured) >= _LEAST_STEPS:
            cost = fit_step_cost(self._measured.values())
        self._cost = cost

    def took_s(self, step: Step) -> float:
        """Returns the time that ``step`` took; 0 for one that failed."""
        return self._measured[step.step].seconds if step.step in self._measured else 0.0

    def of(self, step: Step) -> float | None:
        """Returns the expected time of ``step``, or ``None`` where nothing is known."""
        if self._cost is None or step.step not in self._measured:
            return None
        return self._cost.seconds(self._measured[step.step].work)

    def sum_of(self, steps: Iterable[Step]) -> float | None:
        """Returns the expected time of all ``steps`` together, or ``None`` where nothing is known."""
        return None if self._cost is None else sum(self.of(step) or 0.0 for step in steps)


def measured_steps(recording: Recording, sights: SequenceOf[Sight] = ()) -> Iterator[tuple[Step, MeasuredStep]]:
    """Yields each step that completed, with its work on layers with these ``sights`` and its time. That begins with
    the step, or at the end of the step before if that was later.
    """
    last_end_s, before = -math.inf, None
    for step in recording.steps:
        if step.ended_s is not None:
            yield (
                step,
                MeasuredStep(
                    work_of(step, before, sights), step.ended_s - max(step.began_s, last_end_s), step.num_decodes
                ),
            )
            last_end_s = step.ended_s
        before = step
