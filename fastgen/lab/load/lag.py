"""The load generator's own delays, and the bound beyond which a run's figures must not be used.

Two delays are measured. *Send lag* is ``sent_s - due_s`` of each request: late requests are another workload than the
one that was asked for, with its bursts smoothed. *Loop lag* is how late the event loop serves a timer: tokens that
arrive meanwhile get times that are as late, so the target looks slower than it is. A loop that stalls for a second
misses many ticks of its timer; all of them count, else a long stall would be one sample among many good ones.

A run is invalid if the P99 of either is above ``MAX_LAG_S`` and above ``MAX_LAG_OF_TTFT`` of the median TTFT. 10 ms is
what a healthy process keeps on a busy machine (timers of 1 ms, time slices of a few), so less would mark good runs.
A tenth of the median TTFT is less than the uncertainty of most TTFTs, so a longer lag beside answers that take seconds
changes no conclusion.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

import numpy as np

from fastgen.lab.records import RequestRecord

MAX_LAG_S = 0.010
MAX_LAG_OF_TTFT = 0.1
# Seconds between two ticks of the timer that measures loop lag.
_TICK_S = 0.010
_PERCENTILES = (50, 90, 99)


class LoopLag:
    """Measures how late the event loop serves timers, between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.samples_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._tick())

    def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            late_s = max(0.0, time.perf_counter() - due)
            self.samples_s += [late_s - missed * _TICK_S for missed in range(int(late_s / _TICK_S) + 1)]


def lag_percentiles(records: Sequence[RequestRecord], loop_samples_s: Sequence[float]) -> dict[str, float]:
    """Returns P50, P90 and P99 of the send lag, and of the loop lag with names such as ``"loop_p99"``, in seconds. Each
    is a value that was measured (the nearest rank above), so that few samples do not soften it."""
    kinds = {"": [max(0.0, record.sent_s - record.due_s) for record in records], "loop_": loop_samples_s}
    return {
        f"{kind}p{percent}": float(np.percentile(samples, percent, method="inverted_cdf"))
        for kind, samples in kinds.items()
        if len(samples)
        for percent in _PERCENTILES
    }


def why_invalid(lag_s: dict[str, float], records: Sequence[RequestRecord]) -> str | None:
    """Returns why the figures of a run with these delays must not be used; ``None`` if they may."""
    ttfts_s = [record.ttft_s for record in records if record.error is None and record.ttft_s is not None]
    bound_s = max(MAX_LAG_S, MAX_LAG_OF_TTFT * statistics.median(ttfts_s)) if ttfts_s else MAX_LAG_S
    for name, delay in (("p99", "sent requests up to"), ("loop_p99", "noticed what arrived up to")):
        if lag_s.get(name, 0.0) > bound_s:
            return (
                f"the load generator {delay} {1000 * lag_s[name]:.1f} ms late (P99), more than the "
                f"{1000 * bound_s:.1f} ms that leave the figures as they are; give it a core of its own or lighten the "
                "load"
            )
    return None
