"""The chi-square test of drawn numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def chi_square(observed: Sequence[float], expected: Sequence[float], *, least: float = 5.0) -> tuple[float, float]:
    """Returns chi-square, and about its 1 − 1e-6 quantile (Wilson and Hilferty), for cells that
    expect at least ``least`` each.
    """
    assert min(expected) >= least
    statistic = sum((seen - due) ** 2 / due for seen, due in zip(observed, expected, strict=True))
    freedom = len(expected) - 1
    return statistic, freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
