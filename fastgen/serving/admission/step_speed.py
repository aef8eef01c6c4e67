"""The duration of steps of each size, learned from the engine's counters; see ``Metrics.step_seconds``.

The mean duration of each captured size is kept, with decreasing weight for old measurements. Durations are interpolated
between two sizes, and extrapolated linearly from the two largest ones. Other influences on the mean, such as the
context length of decodes, need not be known.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

from fastgen.runtime.metrics import Histogram

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
        self._sizes: list[int] = []
        self._times_s: list[float] = []
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
        self._sizes = sorted(self._measured)
        self._times_s = [self._measured[size][1] / self._measured[size][0] for size in self._sizes]

    @property
    def most_tokens(self) -> int:
        """Returns the size of the largest step whose duration can be predicted; 0 if nothing is known."""
        return _GROWTH * self._sizes[-1] if self._sizes else 0

    def step_s(self, num_tokens: float) -> float:
        """Returns the duration in seconds of a step of ``num_tokens``, at most :attr:`most_tokens`."""
        sizes, times_s = self._sizes, self._times_s
        above = min(bisect_left(sizes, num_tokens), len(sizes) - 1)
        if above == 0:
            return times_s[0]
        slope = (times_s[above] - times_s[above - 1]) / (sizes[above] - sizes[above - 1])
        if num_tokens > sizes[-1]:
            slope = max(slope, 0.0)
        return times_s[above] + slope * (num_tokens - sizes[above])
