"""Fits a :class:`~fastgen.runtime.step_cost.cost.StepCost` to measured steps.

The time of the matrices rises with the number of tokens, in a table whose points are the captured sizes that occur.
The first point is the exception: it may take longer than the second. On CPUs one row has a kernel of its own, and with
a model of 110M parameters a step with one token took 23 ms, one with two to six tokens 18 to 20 ms.

Each part of a step has a coefficient of at least 0. The coefficients are found by least squares of relative errors
(Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23). Large errors count less, by Huber's weights,
which are found by repeating the fit, so pauses of the machine do not distort it. This gives the usual time of a step.
A last fit starts from there and finds the mean time. Then all is scaled to the sum of the measured times, pauses
included, because that is what many steps add up to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.sight import Sight
from fastgen.runtime.step_cost.work import StepWork

# Points of the table of tokens, as far as there are steps about them.
_POINTS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
# Fewest steps between two points.
_LEAST_STEPS = 5
# Fewest steps of a fit.
LEAST_STEPS: Final = 20
# An error beyond this multiple of the usual one counts less.
_HUBER = 2.0
_REPETITIONS = 12
_LEAST_ERROR = 0.002
# Most that a step counts in the mean, as a multiple of what is expected of it.
_MOST_RATIO = 4.0
_Matrix = NDArray[np.float64]


class MeasuredStep(NamedTuple):
    """A step's work, the seconds that it took, and how many decodes it had."""

    work: StepWork
    seconds: float
    num_decodes: int

    @property
    def kind(self) -> str:
        """Returns what it has: ``"decodes"``, ``"prompts"``, or ``"mixed"`` for both."""
        if not self.work.num_chunks:
            return "decodes"
        return "mixed" if self.num_decodes else "prompts"


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Errors of a fit, as shares of the measured time."""

    num_steps: int
    median: float
    p90: float
    # Expected over measured time, all steps together, less 1.
    bias: float


def fit_step_cost(
    steps: Iterable[MeasuredStep],
    *,
    sizes: SequenceOf[int] = (),
    recorded: SequenceOf[int] = (),
    sights: SequenceOf[Sight] = (),
) -> StepCost:
    """Returns the cost that explains ``steps`` best.

    :param sizes: the captured sizes that steps are padded to; empty if steps are not padded.
    :param recorded: the sizes that have tapes, if steps are not padded.
    :param sights: the windows of the layers, by which the work of ``steps`` was counted.
    :raises InvalidArgumentError: for fewer than :data:`LEAST_STEPS` steps.
    """
    measured = [step for step in steps if step.seconds > 0]
    if len(measured) < LEAST_STEPS:
        raise InvalidArgumentError(f"{len(measured)} steps are too few to fit their cost; at least {LEAST_STEPS}")
    seconds = np.array([step.seconds for step in measured])
    tokens = np.array([_padded(step.work.num_tokens, sizes) for step in measured], np.float64)
    points = _points(tokens)
    table = np.stack([np.ones_like(tokens), *_rises(tokens, points), _fewest(tokens, points)], axis=1)
    linear = np.array([_linear(step.work, recorded) for step in measured], np.float64)
    found = _robust(np.concatenate([table, linear], axis=1), seconds)
    times_s = np.cumsum(found[: len(points)]).tolist()
    extra_s, row_s, chunk_s, context_s, pair_s, built_s, called_s = found[len(points) :].tolist()
    times_s[0] += extra_s
    cost = StepCost(
        tokens=tuple(zip(points, times_s, strict=True)),
        row_s=row_s,
        chunk_s=chunk_s,
        context_s=context_s,
        pair_s=pair_s,
        built_s=built_s,
        called_s=called_s,
        recorded=tuple(recorded),
        sizes=tuple(sizes),
        sights=tuple(sights),
    )
    return cost.scattered([(cost.seconds(step.work), step.seconds) for step in measured])


def residuals(cost: StepCost, steps: Iterable[MeasuredStep]) -> Mapping[str, Residuals]:
    """Returns the errors of ``cost`` on ``steps``, by kind of step."""
    by_kind: dict[str, list[MeasuredStep]] = {}
    for step in steps:
        by_kind.setdefault(step.kind, []).append(step)
    return {kind: _residuals(cost, own) for kind, own in sorted(by_kind.items())}


def _residuals(cost: StepCost, steps: list[MeasuredStep]) -> Residuals:
    errors = sorted(abs(cost.seconds(step.work) / step.seconds - 1) for step in steps)
    expected_s, measured_s = sum(cost.seconds(step.work) for step in steps), sum(step.seconds for step in steps)
    return Residuals(
        num_steps=len(steps),
        median=median(errors),
        p90=errors[int(0.9 * (len(errors) - 1))],
        bias=expected_s / measured_s - 1,
    )


def _linear(work: StepWork, recorded: SequenceOf[int]) -> tuple[float, ...]:
    """Returns the counts of ``work`` that a cost is linear in."""
    is_called = bool(recorded) and work.num_tokens not in recorded
    return (work.num_rows, work.num_chunks, work.num_context, work.num_pairs, work.num_built, is_called)


def _padded(num_tokens: int, sizes: SequenceOf[int]) -> int:
    return sizes[bisect_left(sizes, num_tokens)] if sizes and num_tokens <= sizes[-1] else num_tokens


def _points(tokens: _Matrix) -> list[int]:
    """Returns the points of the table: between each two there are a few steps."""
    least, most = int(tokens.min()), int(tokens.max())
    points = [least]
    for point in (*(point for point in _POINTS if least < point < most), most):
        num_between = int(np.sum((tokens > points[-1]) & (tokens <= point)))
        if num_between >= _LEAST_STEPS or (point == most and len(points) == 1 and most > least):
            points.append(point)
    if points[-1] != most and len(points) > 1:
        points[-1] = most
    return points


def _rises(tokens: _Matrix, points: list[int]) -> list[_Matrix]:
    """Returns for each point but the first how far the tokens of each step are from the point before to this one."""
    return [np.clip((tokens - before) / (point - before), 0.0, 1.0) for before, point in pairwise(points)]


def _fewest(tokens: _Matrix, points: list[int]) -> _Matrix:
    """Returns 1 for steps at the first point and 0 from the second point on, with a line between them."""
    return np.clip((points[1] - tokens) / (points[1] - points[0]), 0.0, 1.0) if len(points) > 1 else 0.0 * tokens


def _robust(features: _Matrix, seconds: _Matrix) -> _Matrix:
    """Returns coefficients of at least 0 for ``features``, which explain ``seconds`` up to relative errors."""
    scales = np.maximum(np.abs(features).max(axis=0), 1e-300)
    relative = features / scales / seconds[:, None]
    weights = np.ones_like(seconds)
    found = np.zeros(features.shape[1])
    for _ in range(_REPETITIONS):
        found = nonnegative_least_squares(relative * weights[:, None], weights)
        errors = np.abs(relative @ found - 1)
        limit = _HUBER * max(float(np.median(errors)), _LEAST_ERROR)
        weights = np.sqrt(limit / np.maximum(limit, errors))
    # That is the usual time. The mean is longer, most of all for short steps: it is fitted once more, shares of what is
    # expected by now, with a bound on each error so that single pauses have no leverage.
    expected_s = np.maximum(features / scales @ found, 1e-300)
    bounded = np.minimum(seconds / expected_s, _MOST_RATIO)
    found = nonnegative_least_squares(features / scales / expected_s[:, None], bounded)
    coefficients: _Matrix = found / scales
    return coefficients


def nonnegative_least_squares(matrix: _Matrix, values: _Matrix) -> _Matrix:
    """Returns the ``x`` at or above 0 for which ``|matrix @ x - values|`` is least, by Lawson and Hanson's active
    sets.
    """
    gram, target = matrix.T @ matrix, matrix.T @ values
    num = len(target)
    found, is_free = np.zeros(num), np.zeros(num, bool)
    tolerance = 1e-12 * max(float(np.abs(target).max()), 1e-300)
    for _ in range(3 * num):
        slope = target - gram @ found
        if is_free.all() or slope[~is_free].max() <= tolerance:
            break
        is_free[np.flatnonzero(~is_free)[slope[~is_free].argmax()]] = True
        while True:
            tried = np.zeros(num)
            tried[is_free] = np.linalg.lstsq(gram[np.ix_(is_free, is_free)], target[is_free], rcond=None)[0]
            if not is_free.any() or tried[is_free].min() > 0:
                break
            below = is_free & (tried <= 0)
            step = float((found[below] / np.maximum(found[below] - tried[below], 1e-300)).min())
            found = found + step * (tried - found)
            is_free &= found > 1e-15
            found[~is_free] = 0.0
        found = tried
    return found
