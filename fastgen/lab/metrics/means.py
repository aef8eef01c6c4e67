"""The mean of a few runs that differ by chance, such as by their seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Final

from fastgen.errors import InvalidArgumentError

# Student's t, 97.5 %, for 1, 2 … degrees of freedom.
_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
# The most values of which there is an interval.
MAX_VALUES: Final = len(_T) + 1


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean of 2 to 12 values and the ends of its 95 % interval, by Student's t (1908).

    :raises InvalidArgumentError: for another number of values.
    """
    if not 2 <= len(values) <= MAX_VALUES:
        raise InvalidArgumentError(f"{len(values)} values: expected 2 to {MAX_VALUES}")
    mean = fmean(values)
    half = _T[len(values) - 2] * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half
