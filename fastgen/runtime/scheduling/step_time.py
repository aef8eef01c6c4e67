"""How long a step takes, learned from those that ran.

Four things make a step: that it is one at all, the tokens it multiplies with the weights, the context that its decodes
read, and the pairs of tokens in the attention of its chunks, whose number grows with the position in a prompt::

    seconds = a + b * tokens + c * context + d * pairs

The coefficients are fitted by recursive least squares with exponential forgetting (Ljung, "System Identification",
1999). An error far beyond the usual one counts less, by Huber's weights, so that a pause of the machine
does not spoil the fit while a lasting change is learned. Steps of one kind tell little about others, so forgetting
stops where it has made the coefficients uncertain: what is not seen for long is still known.

What nearly all steps stay below is found beside it, by a quantile of the errors that is moved up by much where a step
took longer and down by little where it did not (Robbins and Monro, "A stochastic approximation method", 1951).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class StepWork(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    num_tokens: int
    num_context: int
    """Tokens of context that the decodes read, their own included."""
    num_pairs: int
    """For the tokens of all chunks, how many each reads, summed."""


def chunk_pairs(start: int, num_tokens: int) -> int:
    """How many tokens those from ``start`` to ``start + num_tokens - 1`` of a sequence read, each its own included."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


_SCALES = np.array([1.0, 1 / 256, 1 / 16_384, 1 / (256 * 16_384)])
"""They bring the features of usual steps near 1."""
_FORGETTING = 0.99
_FIRST_VARIANCE = 1e4
_MOST_VARIANCE = 4.0
"""Of the coefficients, the error of one step being 1: forgetting stops where they are known no better."""
_LEAST_SEEN = 4
"""Steps before the model is asked for anything but the smallest step."""
_GROWTH = 2
"""How many times larger than any seen a step may be. The model is not trusted further."""
_HUBER = 3.0
"""Usual errors beyond which a step counts less."""
_LEAST_ERROR = 0.01
"""Of a step's time, what is no error to speak of."""
_ERROR_GAIN = 0.05
_EXCEEDED = 0.01
"""The share of steps that may take longer than the upper bound."""


class StepTimeModel:
    """Learns from :meth:`observe`, in about ten microseconds a step."""

    def __init__(self) -> None:
        self._coefficients = np.zeros(4)
        self._variance = np.eye(4) * _FIRST_VARIANCE
        self._error_s = 0.0
        """The usual error: an exponential mean of its absolute value, at first a tenth of a step."""
        self._margin_s = 0.0
        """What all but a share of :data:`_EXCEEDED` of the errors stay below."""
        self._num_seen = self._most_seen = 0

    def observe(self, work: StepWork, step_s: float) -> None:
        """A step with ``work`` took ``step_s`` seconds."""
        features = np.array((1, *work)) * _SCALES
        expected_s = float(features @ self._coefficients)
        error_s = step_s - expected_s
        weight = 1.0
        if self._num_seen < _LEAST_SEEN:
            self._error_s = 0.1 * step_s
            self._margin_s = 2 * self._error_s
        elif error_s:
            limit_s = _HUBER * max(self._error_s, _LEAST_ERROR * expected_s)
            weight = min(1.0, limit_s / abs(error_s))
            self._error_s += _ERROR_GAIN * (min(abs(error_s), 2 * limit_s) - self._error_s)
            self._margin_s += self._error_s * ((error_s > self._margin_s) - _EXCEEDED)
        forgetting = _FORGETTING if np.trace(self._variance) < _MOST_VARIANCE else 1.0
        spread = self._variance @ features
        gain = spread / (forgetting / weight + features @ spread)
        self._coefficients += gain * error_s
        self._variance = (self._variance - np.outer(gain, spread)) / forgetting
        self._num_seen += 1
        self._most_seen = max(self._most_seen, work.num_tokens)

    @property
    def learned(self) -> tuple[float, ...]:
        """All that it has learned, to be :meth:`recalled <recall>` to the bit."""
        numbers = (self._error_s, self._margin_s, float(self._num_seen), float(self._most_seen))
        return (*self._coefficients.tolist(), *self._variance.ravel().tolist(), *numbers)

    def recall(self, learned: tuple[float, ...]) -> None:
        """Know what another has learned."""
        self._coefficients, self._variance = np.array(learned[:4]), np.array(learned[4:20]).reshape(4, 4)
        self._error_s, self._margin_s = learned[20:22]
        self._num_seen, self._most_seen = int(learned[22]), int(learned[23])

    def predict_s(self, work: StepWork) -> float:
        """The time that a step with ``work`` is expected to take, in seconds. More work never takes less."""
        return float(np.array((1, *work)) * _SCALES @ np.maximum(self._coefficients, 0.0))

    def upper_bound_s(self, work: StepWork) -> float:
        """What 99 of 100 such steps stay below; at most twice what they are expected to take, so that a machine that
        often pauses still works.
        """
        expected_s = self.predict_s(work)
        return expected_s + min(max(self._margin_s, 0.0), expected_s)

    def most_tokens(self, token_budget: int) -> int:
        """The largest step that the model can tell anything about, at most ``token_budget``; 0 before it can at all."""
        return min(token_budget, _GROWTH * self._most_seen) if self._num_seen >= _LEAST_SEEN else 0
