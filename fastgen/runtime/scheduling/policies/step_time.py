"""The time that a step takes, learned from the steps that ran.

Four things make up a step: a constant, the tokens that are multiplied with the weights, the context that its sequences
read, and the pairs of tokens in the attention of its chunks, whose number grows with the position in a prompt::

    seconds = a + b * tokens + c * context + d * pairs

That is a :meth:`linear cost <fastgen.runtime.step_cost.cost.StepCost.linear>`, the parts of a step that some hundred
steps of traffic tell apart. The coefficients are fitted by recursive least squares of relative errors, and are never
below 0. An error far beyond the usual one counts less, by Huber's weights, so a pause of the machine does not spoil the
fit while a lasting change is learned. Steps of one kind say little about others. So the fit forgets only in the
direction of the step that is seen (Cao and Schwartz, "A directional forgetting algorithm based on the decomposition of
the information matrix", 2000), and forgets overall only at steps with chunks, of which there are many kinds. However
long only decodes are seen, chunks stay known.

A bound that nearly all steps with chunks stay below is learned beside the fit, by a quantile of the errors that moves
up by much where a step took longer and down by little where it did not (Robbins and Monro, "A stochastic approximation
method", 1951). For kinds of steps not seen yet, the uncertainty of the fit is added.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.work import StepWork

# Scales that bring the features of usual steps near 1.
_SCALES = np.array([1.0, 1 / 256, 1 / 16_384, 1 / (256 * 16_384)])
# Share of the knowledge about a step that remains when another of its kind is seen.
_KEPT = 0.98
# Share of all knowledge that remains when a step with chunks is seen.
_KEPT_OF_ALL = 0.99
_FIRST_INFORMATION = np.eye(4) * 1e-4
# Steps seen before the model predicts more than the smallest step.
_LEAST_SEEN = 4
# How many times larger than the largest step seen a predicted step may be.
_GROWTH = 2
# An error beyond this multiple of the usual one counts less.
_HUBER = 3.0
_FIRST_ERROR = 0.1
# Relative errors below this share of a step's time are ignored.
_LEAST_ERROR = 0.01
_ERROR_GAIN = 0.05
# Step size of the quantile, in usual errors; it recovers from a few pauses.
_MOST_MARGIN = 8.0
# Share of steps that may take longer than the upper bound.
_EXCEEDED = 0.005
# Seconds; less than any step takes.
_LEAST_STEP_S = 1e-6
# Passes over the coefficients at each step; the next step continues from there.
_SWEEPS = 4
Features = NDArray[np.float64]


class StepTimeModel:
    """Learns from :meth:`observe`, which takes some tens of microseconds a step."""

    def __init__(self) -> None:
        self._fit = np.zeros(4)
        # The fit, or the nearest coefficients at or above 0.
        self._coefficients = np.zeros(4)
        # The cost with these coefficients; made when it is asked for.
        self._cost: StepCost | None = None
        # The inverse of the fit's variance, in units of the usual relative error.
        self._information = _FIRST_INFORMATION.copy()
        # The usual relative error of steps with chunks: an exponential mean of its absolute value.
        self._error = _FIRST_ERROR
        # The bound that all but a share of :data:`_EXCEEDED` of these errors stay below.
        self._margin = 2 * _FIRST_ERROR
        self._num_seen = self._most_seen = 0

    def observe(self, work: StepWork, step_s: float) -> None:
        """Learns that a step with ``work`` took ``step_s`` seconds, unless the clock is too coarse for it."""
        if step_s < _LEAST_STEP_S:
            return
        features = _features(work)
        expected_s, weight = float(features @ self._coefficients), 1.0
        if self._num_seen < _LEAST_SEEN or expected_s <= 0.0:
            expected_s = step_s
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
        if (share := features @ known) > 1:  # the information of one step is always kept
            self._information -= (1 - _KEPT) / share * np.outer(known, known)
        self._information += weight * np.outer(features, features)
        error = value - features @ self._fit
        self._fit = self._fit + np.linalg.solve(self._information, weight * error * features)
        self._coefficients = _not_negative(self._fit, self._information, self._coefficients)
        self._cost = None

    @property
    def learned(self) -> tuple[float, ...]:
        """Returns everything learned, for :meth:`recall`, exact to the bit."""
        numbers = (self._error, self._margin, float(self._num_seen), float(self._most_seen))
        arrays = (self._fit, self._coefficients, self._information.ravel())
        return (*(number for array in arrays for number in array.tolist()), *numbers)

    def recall(self, learned: tuple[float, ...]) -> None:
        """Sets what another model has learned."""
        self._fit, self._coefficients = np.array(learned[:4]), np.array(learned[4:8])
        self._information = np.array(learned[8:24]).reshape(4, 4)
        self._error, self._margin = learned[24:26]
        self._num_seen, self._most_seen = int(learned[26]), int(learned[27])
        self._cost = None

    @property
    def cost(self) -> StepCost:
        """Returns the model of step times learned so far."""
        if self._cost is None:
            self._cost = StepCost.linear(*(self._coefficients * _SCALES).tolist())
        return self._cost

    def predict_s(self, work: StepWork) -> float:
        """Returns the expected time of a step with ``work``, in seconds. More work never takes less."""
        return self.cost.seconds(work)

    @property
    def scatter(self) -> float:
        """Returns by which factor 199 of 200 steps with chunks stay below their expected time. It is never above 2, so
        that prompts make progress on a machine that pauses often.
        """
        return 1 + min(max(self._margin, 0.0), 1.0)

    def upper_bound_s(self, work: StepWork) -> float:
        """Returns a time that 199 of 200 such steps stay below, and more where no such steps were seen so far."""
        features = _features(work)
        expected_s = self.cost.seconds(work)
        unknown_s = self._error * math.sqrt(max(0.0, float(features @ np.linalg.solve(self._information, features))))
        return expected_s * self.scatter + unknown_s

    def most_tokens(self, token_budget: int) -> int:
        """Returns the largest step that the model can predict, at most ``token_budget``; 0 before it can predict
        any."""
        return min(token_budget, _GROWTH * self._most_seen) if self._num_seen >= _LEAST_SEEN else 0


def _features(work: StepWork) -> Features:
    features: Features = np.array((1, work.num_tokens, work.num_context, work.num_pairs)) * _SCALES
    return features


def _not_negative(fit: Features, information: Features, start: Features) -> Features:
    """Returns the coefficients at or above 0 that lose the least beside ``fit``, by coordinate descent from the last
    ones.
    """
    if np.min(fit) >= 0:
        return fit
    found = start.copy()
    for _ in range(_SWEEPS):
        for place in range(len(fit)):
            slope = information[place] @ (found - fit)
            found[place] = max(0.0, found[place] - slope / information[place, place])
    return found
