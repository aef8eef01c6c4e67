"""Means of a few runs: intervals by Student's t."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.lab.metrics.means import mean_interval


def test_the_interval_is_that_of_a_worked_example() -> None:
    # 4 values, standard deviation 1.29099, t(3) = 3.182: 2.5 ± 3.182 * 1.29099 / 2
    assert mean_interval([1, 2, 3, 4]) == pytest.approx((2.5, 0.4460, 4.5540), abs=1e-4)
    assert mean_interval([2, 2]) == (2, 2, 2)


@pytest.mark.parametrize("count", [2, 5, 12])
def test_nineteen_intervals_of_twenty_hold_the_truth(count: int) -> None:
    draw = random.Random(count)
    intervals = [mean_interval([draw.gauss(3, 2) for _ in range(count)]) for _ in range(2000)]
    assert fmean(low <= 3 <= high for _, low, high in intervals) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("count", [0, 1, 13])
def test_too_few_or_too_many_values_are_refused(count: int) -> None:
    with pytest.raises(InvalidArgumentError, match="expected 2 to 12"):
        mean_interval([1.0] * count)
