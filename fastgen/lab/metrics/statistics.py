"""The statistics of one latency."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.lab.metrics.figures import PERCENTS, UNKNOWN, Figure
from fastgen.lab.metrics.intervals import Interval, latency_intervals
from fastgen.lab.metrics.percentiles import percentile
from fastgen.lab.metrics.samples import Samples


def described(samples: Samples, percents: Sequence[int] = PERCENTS) -> dict[str, Figure]:
    """Returns ``mean``, ``median``, ``std`` and a ``pNN`` for each of ``percents``.

    The standard deviation is that of the sample (divided by n, as NumPy and vLLM do). A percentile of too few values is
    unknown, and so is its interval; the median is P50.
    """
    names = ["mean", "std", *(f"p{percent}" for percent in percents)]
    if not samples.values.size:
        return dict.fromkeys([*names, "median"], UNKNOWN)
    values = [
        float(samples.values.mean()),
        float(samples.values.std()),
        *(percentile(samples.values, percent) for percent in percents),
    ]
    intervals: Sequence[Interval | None] = latency_intervals(samples, percents) or [None] * len(names)
    found = {
        name: UNKNOWN if value is None else Figure(value, interval)
        for name, value, interval in zip(names, values, intervals, strict=True)
    }
    return found | {"median": found.get("p50", UNKNOWN)}
