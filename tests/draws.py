"""The number of cases that a property draws: all of them in `make test-all` and `make matrix`, fewer in `make test`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def number(cases: int, *, in_short: int) -> int:
    """Returns ``cases``, or ``in_short`` where the same cases are drawn every time: see :func:`drawn`."""
    return in_short if settings().derandomize else cases


def drawn(cases: int, *, in_short: int) -> settings:
    """Returns settings for ``cases`` drawn cases, or for ``in_short`` of them where the same ones are drawn every time.

    `make test-all` and `make matrix` draw afresh, with ``--hypothesis-profile=fresh``, and have the time for all.
    """
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=number(cases, in_short=in_short), suppress_health_check=slow)
