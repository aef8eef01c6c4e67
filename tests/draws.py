"""The number of cases that a property draws: all of them in `make test-all` and `make matrix`, fewer in `make test`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def drawn(cases: int, *, in_short: int) -> settings:
    """Returns settings for ``cases`` drawn cases, or for ``in_short`` of them where the same ones are drawn every time.

    `make test-all` and `make matrix` draw afresh, with ``--hypothesis-profile=fresh``, and have the time for all.
    """
    repeats = settings().derandomize
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=in_short if repeats else cases, suppress_health_check=slow)
