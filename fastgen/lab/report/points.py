"""Values with intervals, and curves of them: all that the plots know of a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.lab.metrics.summary import Summary


@dataclass(frozen=True, slots=True)
class Measured:
    """A value, and the ends of its confidence interval where there is one."""

    value: float
    low: float | None = None
    high: float | None = None

    def scaled(self, factor: float) -> Measured:
        """Returns the value and its interval times ``factor``."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Measured(self.value * factor, low, high)

    @property
    def errors(self) -> tuple[float, float]:
        """Returns how far the interval reaches below and above the value: 0 without an interval."""
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        return max(self.value - low, 0.0), max(high - self.value, 0.0)


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve."""

    x: Measured
    y: Measured
    # A short text beside the point, such as the number of clients.
    note: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points that belong together, in the order in which a line joins them."""

    label: str
    points: tuple[Point, ...]
    # Whether its points come from the literature or from a model and not from these runs; drawn hollow and dashed.
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """One value for each group of a bar chart; ``None`` where it is not known."""

    label: str
    values: tuple[Measured | None, ...]


def measured(summary: Summary, name: str) -> Measured | None:
    """Returns the figure ``name`` with its interval; ``None`` if it is not known."""
    figure = summary[name]
    return None if figure.value is None else Measured(figure.value, *(figure.interval or (None, None)))
