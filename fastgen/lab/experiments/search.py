"""Search for the most load that keeps an SLO: clients of a closed loop, or requests per second of an open one.

A level keeps the SLO if at least the required share of its requests is good. Wilson's interval of the measured share
decides that. If the required share lies inside the interval, the level is measured again with other requests, a few
times. So the answer is an interval too: from the highest level that was shown to keep the SLO to the lowest that was
shown to miss it.

The search doubles the level until one misses, or halves it until one keeps the SLO, and then bisects. It takes for
granted that a higher level is not better. Wilson's interval takes requests for independent, which those of one run are
not quite. The runs of one level are pooled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.lab.experiments.pooled import pooled
from fastgen.lab.experiments.shortfall import Shortfall, shortfalls
from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.metrics.intervals import wilson
from fastgen.lab.records import Run

Verdict = Literal["kept", "missed", "undecided"]
# Levels above which nothing is tried: far more than one machine serves.
MAX_LEVEL = 1 << 16
# How far below the first level the search goes, in halvings, where levels are rates.
MAX_HALVINGS = 10


@dataclass(frozen=True)
class Level:
    """All runs at one level."""

    value: float
    num_good: int
    num_requests: int
    # Wilson's interval of the share of good requests.
    interval: tuple[float, float]
    verdict: Verdict
    runs: tuple[Run, ...] = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        return {
            "level": self.value,
            "good": self.num_good,
            "requests": self.num_requests,
            "good_share_interval": list(self.interval),
            "verdict": self.verdict,
            "runs": len(self.runs),
            "invalid": pooled(self.runs).header.invalid,
        }


@dataclass(frozen=True)
class Found:
    """The answer of a search."""

    slo: SLO
    share: float
    # In the order in which they were measured.
    levels: tuple[Level, ...]
    interrupted: bool = False

    @property
    def kept(self) -> float | None:
        """Returns the highest level that keeps the SLO, below the lowest that misses it; ``None`` if none does."""
        missed = self.missed
        kept = [one.value for one in self.levels if one.verdict == "kept" and (missed is None or one.value < missed)]
        return max(kept, default=None)

    @property
    def missed(self) -> float | None:
        """Returns the lowest level that misses the SLO; ``None`` if none does."""
        return min((one.value for one in self.levels if one.verdict == "missed"), default=None)

    @property
    def lowest(self) -> Level:
        """Returns the lowest level that was measured."""
        return min(self.levels, key=lambda level: level.value)

    @property
    def shortfalls(self) -> list[Shortfall]:
        """Returns by how much the lowest level misses each limit; empty where some level keeps the SLO."""
        return (
            []
            if self.kept is not None or not self.levels
            else shortfalls(pooled(self.lowest.runs), self.slo, self.share)
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "slo": self.slo.as_json(),
            "share": self.share,
            "highest_kept": self.kept,
            "lowest_missed": self.missed,
            "shortfalls": [one.as_json() for one in self.shortfalls],
            "interrupted": self.interrupted,
            "levels": [level.as_json() for level in self.levels],
        }


class TooFewRequestsError(FastgenError):
    """The workload has too few requests for a run at this level, and at any above it."""


class _InterruptedError(Exception):
    """A run was interrupted, so the search ends."""


def search(
    measure: Callable[[float, int], Run],
    slo: SLO,
    *,
    share: float = 0.9,
    start: float = 1.0,
    is_integer: bool = True,
    resolution: float = 0.05,
    max_repeats: int = 4,
) -> Found:
    """Returns the levels between which the SLO begins to be missed.

    :param measure: returns a run at a level; its second argument numbers the runs of that level, as a seed. Where it
        raises :class:`TooFewRequestsError`, the search goes no higher; for the first level, that is raised.
    :param share: of all requests that must be good.
    :param start: the first level.
    :param is_integer: levels are whole numbers (clients) from 1, and the answer is exact; otherwise rates.
    :param resolution: for rates, how close the two ends of the answer shall be, as a share of the lower one.
    :param max_repeats: most runs at one level.
    :raises InvalidArgumentError: for parameters out of range.
    """
    if not 0 < share < 1:
        raise InvalidArgumentError(f"a share of {share} good requests: expected a number between 0 and 1")
    if not 0 < start <= MAX_LEVEL or (is_integer and start != int(start)):
        kind = "a whole number" if is_integer else "a number"
        raise InvalidArgumentError(f"a search that starts at {start}: expected {kind} above 0, at most {MAX_LEVEL}")
    if not resolution > 0:
        raise InvalidArgumentError(f"a resolution of {resolution}: expected a number above 0")
    if max_repeats < 1:
        raise InvalidArgumentError(f"{max_repeats} repeats: expected at least 1")
    searching = _Search(measure, slo, share, is_integer, resolution, max_repeats)
    is_interrupted = False
    try:
        searching.run(start)
    except _InterruptedError:
        is_interrupted = True
    return Found(slo, share, tuple(searching.levels.values()), is_interrupted)


class _Search:
    """A search under way: the levels that were measured so far."""

    def __init__(
        self,
        measure: Callable[[float, int], Run],
        slo: SLO,
        share: float,
        is_integer: bool,
        resolution: float,
        max_repeats: int,
    ):
        self._measure, self._slo, self._share = measure, slo, share
        self._is_integer, self._resolution, self._max_repeats = is_integer, resolution, max_repeats
        self.levels: dict[float, Level] = {}

    def run(self, start: float) -> None:
        kept, missed = self._bracket(start)
        if kept is None or missed is None:
            return
        # Both edges of the answer: the highest level that is kept, and from there the lowest that is missed.
        kept = self._bisect(kept, missed, lambda verdict: verdict == "kept")
        self._bisect(kept, missed, lambda verdict: verdict != "missed")

    def _bracket(self, start: float) -> tuple[float | None, float | None]:
        """Returns a level that keeps the SLO and a higher one that misses it; ``None`` for what was not found."""
        lowest = 1.0 if self._is_integer else start / 2**MAX_HALVINGS
        kept = start
        while self._at(kept).verdict != "kept":
            if kept <= lowest:
                return None, None
            kept = max(lowest, self._whole(kept / 2))
        missed = max(2 * kept, start)
        try:
            while self._at(missed).verdict != "missed":
                if missed >= MAX_LEVEL:
                    return kept, None
                missed = min(MAX_LEVEL, 2 * missed)
        except TooFewRequestsError:
            return kept, None
        return kept, missed

    def _bisect(self, low: float, high: float, is_low: Callable[[Verdict], bool]) -> float:
        """Returns the highest level for which ``is_low`` is true, which it is for ``low`` and not for ``high``."""
        while not self._is_close(low, high):
            middle = self._whole(math.sqrt(low * high)) if high > 2 * low else self._whole((low + high) / 2)
            middle = min(max(middle, low + 1), high - 1) if self._is_integer else middle
            if is_low(self._at(middle).verdict):
                low = middle
            else:
                high = middle
        return low

    def _is_close(self, low: float, high: float) -> bool:
        return high - low <= 1 if self._is_integer else high <= low * (1 + self._resolution)

    def _whole(self, level: float) -> float:
        return float(int(level)) if self._is_integer else level

    def _at(self, value: float) -> Level:
        """Returns the level ``value``, measured until it is decided or has had all its repeats."""
        if value in self.levels:
            return self.levels[value]
        runs: list[Run] = []
        while len(runs) < self._max_repeats:
            runs.append(self._measure(value, len(runs)))
            level = self._judge(value, runs)
            if level is not None:
                self.levels[value] = level
            if runs[-1].header.interrupted:
                raise _InterruptedError
            if level is not None and level.verdict != "undecided":
                break
        return self.levels[value]

    def _judge(self, value: float, runs: list[Run]) -> Level | None:
        records = [record for run in runs for record in run.records]
        num_good = sum(self._slo.is_good(record) for record in records)
        interval = wilson(num_good, len(records))
        if interval is None:  # interrupted before anything was measured
            return None
        verdict: Verdict = "undecided"
        if interval[0] >= self._share:
            verdict = "kept"
        elif interval[1] < self._share:
            verdict = "missed"
        return Level(value, num_good, len(records), interval, verdict, tuple(runs))
