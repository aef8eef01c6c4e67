"""How long a step takes, learned from those that ran.

Four things make a step: that it is one at all, the tokens it multiplies with the weights, the context that its
sequences read, and the pairs of tokens in the attention of its chunks, whose number grows with the position in a
prompt::

    seconds = a + b * tokens + c * context + d * pairs

The coefficients are fitted by recursive least squares of relative errors, and are never below 0. An error far beyond
the usual one counts less, by Huber's weights, so that a pause of the machine does not spoil the fit while a lasting
change is learned. Steps of one kind tell little about others, so what was learned is forgotten in the direction of the
step that is seen (Cao and Schwartz, "A directional forgetting algorithm based on the decomposition of the information
matrix", 2000), and in all only with chunks, of which there are many kinds: however long nothing but decodes is seen,
chunks are still known.

What nearly all steps with chunks stay below is found beside it, by a quantile of the errors that is moved up by much
where a step took longer and down by little where it did not (Robbins and Monro, "A stochastic approximation method",
1951). Where steps were of another kind so far, what the fit does not know yet is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StepWork(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    num_tokens: int
    # For all sequences, how many tokens each reads from its context, its own included, summed.
    num_context: int
    # For the tokens of all chunks, how many each reads, summed.
    num_pairs: int

    def with_chunk(self, start: int, num_tokens: int) -> StepWork:
        """The same, and tokens ``start .. start + num_tokens - 1`` of one sequence more."""
        num_context = self.num_context + start + num_tokens
        return StepWork(self.num_tokens + num_tokens, num_context, self.num_pairs + chunk_pairs(start, num_tokens))


def chunk_pairs(start: int, num_tokens: int) -> int:
    """How many tokens those from ``start`` to ``start + num_tokens - 1`` of a sequence read, each its own included."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def decode_work(positions: SequenceOf[int]) -> StepWork:
    """That of decodes at these positions, and nothing else."""
    return StepWork(len(positions), sum(positions) + len(positions), 0)


# They bring the features of usual steps near 1.
_SCALES = np.array([1.0, 1 / 256, 1 / 16_384, 1 / (256 * 16_384)])
# What remains of what was known of a step when another of its kind is seen.
_KEPT = 0.98
# What remains of everything known when a step with chunks is seen.
_KEPT_OF_ALL = 0.99
_FIRST_INFORMATION = np.eye(4) * 1e-4
# Steps before the model is asked for anything but the smallest step.
_LEAST_SEEN = 4
# How many times larger than any seen a step may be. The model is not trusted further.
_GROWTH = 2
# Usual errors beyond which a step counts less.
_HUBER = 3.0
_FIRST_ERROR = 0.1
# Of a step's time, what is no error to speak of.
_LEAST_ERROR = 0.01
_ERROR_GAIN = 0.05
# In usual errors; so it does not stay where some bad moments have brought it.
_MOST_MARGIN = 8.0
# The share of steps that may take longer than the upper bound.
_EXCEEDED = 0.005
# Less than any step takes.
_LEAST_STEP_S = 1e-6
# Over the coefficients at each step; the next one goes on from there.
_SWEEPS = 4
Features = NDArray[np.float64]


class StepTimeModel:
    """Learns from :meth:`observe`, in some tens of microseconds a step."""

    def __init__(self) -> None:
        self._fit = np.zeros(4)
        # The fit, or where that is below 0 somewhere, what comes next to it and is not.
        self._coefficients = np.zeros(4)
        # The inverse of the fit's variance, in units of the usual relative error.
        self._information = _FIRST_INFORMATION.copy()
        # The usual relative error of steps with chunks: an exponential mean of its absolute value.
        self._error = _FIRST_ERROR
        # What all but a share of :data:`_EXCEEDED` of these errors stay below.
        self._margin = 2 * _FIRST_ERROR
        self._num_seen = self._most_seen = 0

    def observe(self, work: StepWork, step_s: float) -> None:
        """A step with ``work`` took ``step_s`` seconds."""
        features = np.array((1, *work)) * _SCALES
        expected_s, weight = float(features @ self._coefficients), 1.0
        if self._num_seen < _LEAST_SEEN or expected_s <= 0.0:
            expected_s = max(step_s, _LEAST_STEP_S)
        else:
            error = step_s / expected_s - 1
            limit = _HUBER * max(self._error, _LEAST_ERROR)
            weight = limit / max(limit, abs(error))
            if work.num_pairs:
                self._error += _ERROR_GAIN * (min(abs(error), 2 * limit) - self._error)
                margin = self._margin + self._error * ((error > self._margin) - _EXCEEDED)
                self._margin = min(margin, _MOST_MARGIN * self._error)
                self._information += (1 - _KEPT_OF_ALL) * (_FIRST_INFORMATION - self._information)
        self._learn(features / expected_s, step_s / expected_s, weight)
        self._num_seen += 1
        self._most_seen = max(self._most_seen, work.num_tokens)

    def _learn(self, features: Features, value: float, weight: float) -> None:
        known = self._information @ features
        if (share := features @ known) > 1:  # what one step tells is kept at any rate
            self._information -= (1 - _KEPT) / share * np.outer(known, known)
        self._information += weight * np.outer(features, features)
        error = value - features @ self._fit
        self._fit = self._fit + np.linalg.solve(self._information, weight * error * features)
        self._coefficients = _not_negative(self._fit, self._information, self._coefficients)

    @property
    def learned(self) -> tuple[float, ...]:
        """All that it has learned, to be :meth:`recalled <recall>` to the bit."""
        numbers = (self._error, self._margin, float(self._num_seen), float(self._most_seen))
        arrays = (self._fit, self._coefficients, self._information.ravel())
        return (*(number for array in arrays for number in array.tolist()), *numbers)

    def recall(self, learned: tuple[float, ...]) -> None:
        """Know what another has learned."""
        self._fit, self._coefficients = np.array(learned[:4]), np.array(learned[4:8])
        self._information = np.array(learned[8:24]).reshape(4, 4)
        self._error, self._margin = learned[24:26]
        self._num_seen, self._most_seen = int(learned[26]), int(learned[27])

    def predict_s(self, work: StepWork) -> float:
        """The time that a step with ``work`` is expected to take, in seconds. More work never takes less."""
        return float(np.array((1, *work)) * _SCALES @ self._coefficients)

    @property
    def scatter(self) -> float:
        """How many times longer than expected 199 of 200 steps with chunks take at most. Never above 2, so that prompts
        get on where the machine often pauses.
        """
        return 1 + min(max(self._margin, 0.0), 1.0)

    def upper_bound_s(self, work: StepWork) -> float:
        """What 199 of 200 such steps stay below, and more where no such steps were seen so far."""
        features = np.array((1, *work)) * _SCALES
        expected_s = float(features @ self._coefficients)
        unknown_s = self._error * math.sqrt(max(0.0, features @ np.linalg.solve(self._information, features)))
        return expected_s * self.scatter + unknown_s

    def most_tokens(self, token_budget: int) -> int:
        """The largest step that the model can tell anything about, at most ``token_budget``; 0 before it can at all."""
        return min(token_budget, _GROWTH * self._most_seen) if self._num_seen >= _LEAST_SEEN else 0


def _not_negative(fit: Features, information: Features, start: Features) -> Features:
    """What of all that is not below 0 loses the least beside ``fit``: by coordinate descent, from what it was."""
    if fit.min() >= 0:
        return fit
    found = start.copy()
    for _ in range(_SWEEPS):
        for place in range(len(fit)):
            slope = information[place] @ (found - fit)
            found[place] = max(0.0, found[place] - slope / information[place, place])
    return found
