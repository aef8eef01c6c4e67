"""Percentiles, and how many samples one needs to mean something."""

from __future__ import annotations

import math

import numpy as np

# Samples that must lie beyond a percentile, on its nearer side. With 5 beyond, the chance that the true percentile lies
# outside the sample altogether is below 1 in 140, so that an interval of 95 % can exist.
MIN_BEYOND = 5


def samples_needed(percent: float) -> int:
    """Returns the fewest samples of which the percentile is reported: 10 for P50, 50 for P90, 100 for P95, 500 for P99.

    ``percent`` lies between 0 and 100, both excluded.
    """
    return math.ceil(MIN_BEYOND * 100 / min(percent, 100 - percent) - 1e-9)


def percentile(values: np.ndarray, percent: float) -> float | None:
    """Returns the percentile of ``values``, interpolated between its two neighbours; ``None`` of too few values."""
    if values.size < samples_needed(percent):
        return None
    return float(np.percentile(values, percent))
