"""Times of forward passes from flight recordings, by their tokens and their sequences."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastgen.lab.report.points import Curve, Measured, Point
from fastgen.runtime.flight.recording import Recording

# Classes of steps between a number and its double.
_PER_OCTAVE: Final = 2
# Steps in a class, below which it is not drawn: its quartiles would mean little.
_LEAST_STEPS: Final = 5


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass."""

    num_tokens: int
    num_sequences: int
    seconds: float


_Count = Callable[[Forward], int]


def forwards(recordings: Iterable[Recording]) -> list[Forward]:
    """Returns the steps that ran. A step that was launched ahead counts from the end of the step before it."""
    found = []
    for recording in recordings:
        before_s = -math.inf
        for step in recording.steps:
            if step.ended_s is None or not step.entries:
                continue
            seconds = step.ended_s - max(step.began_s, before_s)
            before_s = step.ended_s
            found.append(Forward(step.num_tokens, len(step.entries), seconds))
    return found


def latency_by_tokens(passes: Sequence[Forward]) -> list[Curve]:
    """Returns the time in milliseconds against tokens, a curve for each class of numbers of sequences."""
    return _curves(passes, lambda each: each.num_tokens, lambda each: each.num_sequences, "sequence")


def latency_by_sequences(passes: Sequence[Forward]) -> list[Curve]:
    """Returns the time in milliseconds against sequences, a curve for each class of numbers of tokens."""
    return _curves(passes, lambda each: each.num_sequences, lambda each: each.num_tokens, "token")


def throughput_by_tokens(passes: Sequence[Forward]) -> list[Curve]:
    """Returns tokens a second against the tokens of a forward pass: one curve."""
    points = []
    for members in _classes(passes, lambda each: each.num_tokens).values():
        if len(members) >= _LEAST_STEPS:
            tokens = Measured(float(np.median([each.num_tokens for each in members])))
            points.append(Point(tokens, _quartiles([each.num_tokens / each.seconds for each in members])))
    return [Curve("forward passes", tuple(points))] if points else []


def _curves(passes: Sequence[Forward], x: _Count, other: _Count, unit: str) -> list[Curve]:
    curves = []
    for members in _classes(passes, other, per_octave=0.5).values():
        points = [
            Point(
                Measured(float(np.median([x(each) for each in cell]))),
                _quartiles([each.seconds * 1e3 for each in cell]),
            )
            for cell in _classes(members, x).values()
            if len(cell) >= _LEAST_STEPS
        ]
        low, high = min(map(other, members)), max(map(other, members))
        if points:
            label = f"{low:,} to {high:,} {unit}s" if high > low else f"{low:,} {unit}{'s' if low > 1 else ''}"
            curves.append(Curve(label, tuple(points)))
    return curves


def _classes(passes: Sequence[Forward], count: _Count, per_octave: float = _PER_OCTAVE) -> dict[int, list[Forward]]:
    """Returns the passes by the logarithm of a count, ascending."""
    classes = defaultdict(list)
    for each in passes:
        classes[round(per_octave * math.log2(count(each)))].append(each)
    return dict(sorted(classes.items()))


def _quartiles(values: Sequence[float]) -> Measured:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return Measured(float(middle), float(low), float(high))
