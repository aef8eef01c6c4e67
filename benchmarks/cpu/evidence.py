"""The rule by which measurements become figures.

A measurement is steady if the machine's own limits, taken before and after it, moved by at most 15 %. A turn is a run
of fastgen and one of another engine, side by side. Both must be steady, and the memory's speed beside the two must
differ by at most 15 %. A figure is the median over at least :data:`LEAST_STEADY` steady measurements of one build, with
the least and the greatest of them. Where there are fewer there is no figure, and the reason says how many there are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.cpu.machine_limits import Limits, is_steady

Data = dict[str, Any]
LEAST_STEADY = 6
CLOSE = 0.85  # Two speeds of the machine are comparable if the smaller is at least this share of the greater.


@dataclass(frozen=True)
class Figure:
    """A median with its spread, and what it was taken from."""

    value: float
    least: float
    most: float
    # So many of the ``num_measured`` measurements of the build, such as "turns", were steady.
    num_steady: int
    num_measured: int
    unit: str
    # The commit that was measured, or that none was recorded.
    build: str
    # The other engine, where the figure compares with one.
    engine: str = ""

    @property
    def basis(self) -> str:
        engine = f"{self.engine}, " if self.engine else ""
        return f"{engine}{self.num_steady} of {self.num_measured} {self.unit} steady, build {self.build}"

    def beside(self, engine: str) -> Figure:
        return replace(self, engine=engine)


@dataclass(frozen=True)
class Lack:
    """Says why there is no figure."""

    reason: str


@dataclass(frozen=True)
class Evidence:
    """Holds the measurements of one build; a figure may be made of the steady ones."""

    build: str
    measured: list[Data]
    steady: list[Data]
    unit: str

    @property
    def num_measured(self) -> int:
        return len(self.measured)

    @property
    def lack(self) -> Lack:
        return Lack(f"{len(self.steady)} of {self.num_measured} {self.unit} steady, build {self.build}")

    def figure(self, value: Callable[[Data], float | None]) -> Figure | Lack:
        """Returns the median of ``value`` over the steady measurements that have one."""
        values = [found for each in self.steady if (found := value(each)) is not None]
        if len(values) < LEAST_STEADY:
            return self.lack
        median = statistics.median(values)
        return Figure(median, min(values), max(values), len(values), self.num_measured, self.unit, self.build)


def build_of(measured: Data) -> str:
    """Returns the commit that was measured. Measurements without one count as one build if they are of the same day."""
    return measured.get("commit") or f"not recorded ({measured['date'][:10]})"


def evidence(measured: Iterable[Data], is_steady: Callable[[Data], bool], unit: str) -> Evidence | None:
    """Returns the evidence of the newest build that has enough, or of the one with the most; ``None`` without any."""
    builds: dict[str, list[Data]] = {}
    for each in sorted(measured, key=lambda each: str(each["date"]), reverse=True):
        builds.setdefault(build_of(each), []).append(each)
    found = [
        Evidence(build, every, [each for each in every if is_steady(each)], unit) for build, every in builds.items()
    ]
    enough = [each for each in found if len(each.steady) >= LEAST_STEADY]
    return enough[0] if enough else max(found, key=lambda each: len(each.steady), default=None)


def was_steady(measured: Data) -> bool:
    """Returns true if the machine's speed moved by at most 15 % from before to after."""
    return is_steady(_limits(measured["before"]), _limits(measured["after"]))


def is_steady_turn(turn: Data) -> bool:
    """Returns true if the machine stayed the same during both runs of a turn, and from one run to the other."""
    ours, theirs = turn["ours"], turn["theirs"]
    return was_steady(ours) and was_steady(theirs) and is_close(around(ours, "read"), around(theirs, "read"))


def is_close(one: float, other: float) -> bool:
    return min(one, other) >= CLOSE * max(one, other)


def around(measured: Data, name: str) -> float:
    """Returns a limit of the machine while the measurement was taken."""
    return float(measured["before"][name] + measured["after"][name]) / 2


def _limits(measured: dict[str, float]) -> Limits:
    return Limits(measured["read"], measured["fp32"], measured["int8"])
