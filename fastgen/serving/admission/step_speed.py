"""The duration of steps of each size, learned from the engine's counters; see ``Metrics.step_seconds``.

The mean duration of each captured size is kept, with decreasing weight for old measurements. They are the table of
tokens of a :class:`~fastgen.runtime.step_cost.cost.StepCost`, which interpolates between two sizes and extrapolates
linearly from the two largest ones. Other influences on the mean, such as the context length of decodes, need not be
known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastgen.runtime.metrics import Histogram
from fastgen.runtime.step_cost.cost import StepCost

# After this many seconds of steps, earlier measurements have the weight 1/e.
_MEMORY_S = 10.0
# After this many seconds without a step, nothing is known: the cause of slow steps may be gone.
_LAST_S = 60.0
# Largest extrapolated size, as a multiple of the largest measured one.
_GROWTH = 4


class StepSpeed:
    """Learns from snapshots of an engine's ``step_seconds``, which count since the engine was started."""

    def __init__(self) -> None:
        # Steps and seconds of the last snapshot, by size.
        self._seen: dict[int, tuple[int, float]] = {}
        # Weighted steps and seconds, by size.
        self._measured: dict[int, tuple[float, float]] = {}
        # What is known of the time of steps; ``None`` before anything is.
        self.cost: StepCost | None = None
        self._last_s = -math.inf

    def observe(self, step_seconds: Mapping[int, Histogram], now_s: float) -> None:
        """Takes a snapshot made at ``now_s``."""
        new = {}
        for size, histogram in step_seconds.items():
            count, sum_s = histogram.count, histogram.sum
            seen_count, seen_sum_s = self._seen.get(size, (0, 0.0))
            if count > seen_count:
                new[size] = (count - seen_count, sum_s - seen_sum_s)
            self._seen[size] = (count, sum_s)
        if now_s - self._last_s > _LAST_S:
            self._measured.clear()
        if new:
            self._last_s = now_s
            kept = math.exp(-sum(sum_s for _, sum_s in new.values()) / _MEMORY_S)
            self._measured = {size: (kept * n, kept * sum_s) for size, (n, sum_s) in self._measured.items()}
            for size, (count, sum_s) in new.items():
                old_count, old_sum_s = self._measured.get(size, (0.0, 0.0))
                self._measured[size] = (old_count + count, old_sum_s + sum_s)
        means_s = [(size, sum_s / count) for size, (count, sum_s) in sorted(self._measured.items())]
        self.cost = StepCost(tokens=tuple(means_s)) if means_s else None

    @property
    def most_tokens(self) -> int:
        """Returns the size of the largest step whose duration can be predicted; 0 if nothing is known."""
        return 0 if self.cost is None else _GROWTH * self.cost.tokens[-1][0]

    def step_s(self, num_tokens: float) -> float:
        """Returns the duration in seconds of a step of ``num_tokens``, at most :attr:`most_tokens`."""
        assert self.cost is not None, "nothing is known of the time of steps"
        return self.cost.matrices_s(num_tokens)
