"""One model of the time of a step, for the scheduler, admission, the simulated device and the planner.

A step is a sum of parts. The matrices are a table over the number of tokens, because few tokens cost as much as reading
the weights, and many cost their arithmetic. What attention reads, and the pairs of tokens that it multiplies, are
linear, and so is what each row of logits and each chunk adds::

    seconds = host + matrices(padded tokens) + row * rows + chunk * chunks + context * context tokens + pair * pairs
              + built (where the batch is built) + called (where no tape or graph of that size is replayed)

Who makes one: the scheduler learns the four coefficients of :meth:`StepCost.linear` while it runs, admission learns the
table, a calibration fits all of it to measured steps, and the planner computes it from the datasheet of a device.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import fmean
from typing import ClassVar

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.step_cost.sight import Sight
from fastgen.runtime.step_cost.work import StepWork

# Quantiles by which a scatter is stated.
_NUM_QUANTILES = 201


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The expected time of a step, and how much single steps scatter around it. Durations are in seconds."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}
    # The matrices: points (tokens, seconds), ascending in tokens. Between two points the time is interpolated. Below
    # the first it is that of the first, and beyond the last it grows as it did between the last two.
    tokens: tuple[tuple[int, float], ...]
    # Host time of a step that the device waits for. With run-ahead it passes while the step before is computed.
    host_s: float = 0.0
    row_s: float = 0.0
    chunk_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0
    # Time to build a batch that is not the one before, a token further.
    built_s: float = 0.0
    # Time that a step takes longer whose number of tokens is none of ``recorded``, for which there are tapes or graphs.
    called_s: float = 0.0
    recorded: tuple[int, ...] = ()
    # Captured sizes that steps are padded to, ascending; empty where steps are not padded.
    sizes: tuple[int, ...] = ()
    # The windows of the layers, by which the work of a step must be counted (:func:`.sight.seen_work`). Empty where
    # every layer reads all of its context.
    sights: tuple[Sight, ...] = ()
    # Quantiles, evenly spaced, of measured over expected time. Their mean is 1. Empty where not measured.
    scatter: tuple[float, ...] = ()
    # Standard deviation of the logarithm of measured over expected time. Unused if there is a scatter.
    noise: float = 0.0

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.tokens]
        if not counts or any(later <= earlier for earlier, later in pairwise(counts)):
            raise InvalidArgumentError(f"tokens={self.tokens}: expected points in ascending order, at least one")

    @classmethod
    def linear(
        cls, step_s: float, token_s: float, context_s: float = 0.0, pair_s: float = 0.0, *, noise: float = 0.0
    ) -> StepCost:
        """Returns ``step_s + token_s * tokens + context_s * context + pair_s * pairs``, times a log-normal factor whose
        logarithm has the standard deviation ``noise``.
        """
        return cls(
            tokens=((0, step_s), (1, step_s + token_s)),
            context_s=context_s,
            pair_s=pair_s,
            noise=noise,
        )

    def seconds(self, work: StepWork) -> float:
        """Returns the expected time of a step with ``work``."""
        return self.host_s + self.device_s(work)

    def device_s(self, work: StepWork) -> float:
        """Returns the expected time of the device's part of a step with ``work``."""
        num_tokens, num_context, num_pairs, num_rows, num_chunks, num_built = work
        known_s = self._known_s
        if num_tokens not in known_s:
            known_s[num_tokens] = self.matrices_s(num_tokens)
        return (
            known_s[num_tokens]
            + self.context_s * num_context
            + self.pair_s * num_pairs
            + self.row_s * num_rows
            + self.chunk_s * num_chunks
            + self.built_s * num_built
            + (self.called_s if self.called_s and num_tokens not in self._recorded else 0.0)
        )

    def matrices_s(self, num_tokens: float) -> float:
        """Returns the time that the matrices take for ``num_tokens``, padded to a captured size."""
        sizes = self.sizes
        if sizes and num_tokens <= sizes[-1]:
            num_tokens = sizes[bisect_left(sizes, num_tokens)]
        return interpolated(*self._table, num_tokens)

    def draw_ratio(self, draw: random.Random) -> float:
        """Returns a factor by which one step takes longer than expected."""
        scatter = self.scatter
        if scatter:
            return interpolated(range(len(scatter)), scatter, draw.random() * (len(scatter) - 1))
        return draw.lognormvariate(0.0, self.noise) if self.noise else 1.0

    def scattered(self, times_s: SequenceOf[tuple[float, float]]) -> StepCost:
        """Returns this cost scaled so that all steps together take as long as measured, with the scatter of the single
        ones. ``times_s`` has the expected and the measured time of each step.

        A ratio counts by its expected time: a pause of 10 ms is a small share of the time, but a hundredfold for the
        short step that it hits.
        """
        expected_s, measured_s = (sum(each) for each in zip(*times_s, strict=True))
        ratios = sorted((measured / expected, expected) for expected, measured in times_s)
        ends_s = list(accumulate(expected for _, expected in ratios))
        wanted_s = [expected_s * (place + 0.5) / _NUM_QUANTILES for place in range(_NUM_QUANTILES)]
        quantiles = [ratios[min(bisect_left(ends_s, each_s), len(ratios) - 1)][0] for each_s in wanted_s]
        mean, factor = fmean(quantiles), measured_s / expected_s
        return replace(
            self,
            tokens=tuple((count, factor * time_s) for count, time_s in self.tokens),
            host_s=factor * self.host_s,
            row_s=factor * self.row_s,
            chunk_s=factor * self.chunk_s,
            context_s=factor * self.context_s,
            pair_s=factor * self.pair_s,
            built_s=factor * self.built_s,
            called_s=factor * self.called_s,
            scatter=tuple(quantile / mean for quantile in quantiles),
        )

    @cached_property
    def _known_s(self) -> dict[int, float]:
        """Returns the times of the matrices by the number of tokens, as far as they were computed."""
        return {}

    @cached_property
    def _recorded(self) -> frozenset[int]:
        return frozenset(self.recorded)

    @cached_property
    def _table(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        counts, times_s = zip(*self.tokens, strict=True)
        return counts, times_s


def interpolated(counts: SequenceOf[float], times_s: SequenceOf[float], count: float) -> float:
    """Returns the time at ``count`` from a table as :attr:`StepCost.tokens` describes it. It never falls beyond the
    last point.
    """
    above = min(bisect_left(counts, count), len(counts) - 1)
    if above == 0:
        return times_s[0]
    slope = (times_s[above] - times_s[above - 1]) / (counts[above] - counts[above - 1])
    if count > counts[-1]:
        slope = max(slope, 0.0)
    return times_s[above] + slope * (count - counts[above])
