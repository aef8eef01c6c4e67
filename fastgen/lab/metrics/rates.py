"""Throughput and goodput: work done in a second of wall clock, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fastgen.lab.metrics.figures import UNKNOWN, Figure
from fastgen.lab.metrics.intervals import Interval, rate_intervals
from fastgen.lab.records import RequestRecord


def max_concurrent_requests(records: Sequence[RequestRecord]) -> int:
    """Returns the most requests that had been sent and had not ended at one time, failed ones included.

    A request that is sent at the time at which another ends does not run beside it.
    """
    sent = np.sort([record.sent_s for record in records])
    ended = np.sort([record.ended_s for record in records])
    running = np.arange(1, len(sent) + 1) - np.searchsorted(ended, sent, side="right")
    return int(np.max(running, initial=0))


def rates(
    amounts: Mapping[str, Callable[[RequestRecord], float]],
    records: Sequence[RequestRecord],
    *,
    duration_s: float,
    begin_s: float,
) -> dict[str, Figure]:
    """Returns, by name, the sum of each amount over ``records`` divided by ``duration_s``.

    :param amounts: what an answer counts for, e.g. its tokens.
    :param records: answered requests.
    :param begin_s: when the first answer could have begun.
    """
    if duration_s <= 0:
        return dict.fromkeys(amounts, UNKNOWN)
    ordered = sorted(records, key=lambda record: record.ended_s)
    brought = np.array([[amount(record) for record in ordered] for amount in amounts.values()]).reshape(
        len(amounts), len(ordered)
    )
    waits_s = np.diff([record.ended_s for record in ordered], prepend=begin_s)
    block = max(math.isqrt(len(ordered)), max_concurrent_requests(ordered), 1)
    intervals: Sequence[Interval | None] = rate_intervals(brought, waits_s, block) or [None] * len(amounts)
    scale = waits_s.sum() / duration_s
    return {
        name: Figure(float(sums) / duration_s, None if interval is None else (interval[0] * scale, interval[1] * scale))
        for name, sums, interval in zip(amounts, brought.sum(axis=1), intervals, strict=True)
    }
