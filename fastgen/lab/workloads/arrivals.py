"""Arrival processes: when the requests of an open loop are sent."""

# Annotations are not postponed: the registry reads the types of the fields.

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np

from fastgen.arguments import ABOVE_0, Check, Option
from fastgen.lab.workloads.named import checked, make, stated
from fastgen.lab.workloads.prompts import generator
from fastgen.lab.workloads.request import PlannedRequest

_Rate = Annotated[float, Option("Requests per second.", check=ABOVE_0)]
_SHAPES = ("linear", "exponential")


class Arrivals(Protocol):
    """An arrival process."""

    @property
    def name(self) -> str:
        """Returns the name by which commands and results call it."""
        ...

    def times_s(self, count: int, seed: int) -> list[float]:
        """Returns when the first ``count`` requests arrive, in seconds and in order."""
        ...

    def facts(self) -> dict[str, Any]:
        """Returns its name and parameters as JSON."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Requests that arrive independently of each other; the time between two is exponentially distributed."""

    name: ClassVar[str] = "poisson"
    rate: _Rate

    def __post_init__(self) -> None:
        checked(self)

    def times_s(self, count: int, seed: int) -> list[float]:
        return Gamma(self.rate, 1.0).times_s(count, seed)

    def facts(self) -> dict[str, Any]:
        return stated(self)


@dataclass(frozen=True)
class Constant:
    """Requests at even intervals, the first at 0."""

    name: ClassVar[str] = "constant"
    rate: _Rate

    def __post_init__(self) -> None:
        checked(self)

    def times_s(self, count: int, seed: int) -> list[float]:
        return [number / self.rate for number in range(count)]

    def facts(self) -> dict[str, Any]:
        return stated(self)


@dataclass(frozen=True)
class Gamma:
    """Requests between which times are gamma distributed, with the shape ``burstiness`` and the mean ``1 / rate``.

    1 is a Poisson process, less is more bursty, more is more even, as ``--burstiness`` of ``vllm bench serve``. That
    tool then stretches the times so that the last request comes at exactly ``count / rate``; this does not.
    """

    name: ClassVar[str] = "gamma"
    rate: _Rate
    burstiness: Annotated[float, Option("Shape of the gamma distribution.", check=ABOVE_0)] = 1.0

    def __post_init__(self) -> None:
        checked(self)

    def times_s(self, count: int, seed: int) -> list[float]:
        gaps = generator(seed, "arrivals").gamma(self.burstiness, 1 / (self.rate * self.burstiness), count)
        times: list[float] = np.cumsum(gaps).tolist()
        return times

    def facts(self) -> dict[str, Any]:
        return stated(self)


@dataclass(frozen=True)
class Ramp:
    """Requests whose rate changes from the first to the last, linearly or exponentially in a request's number, as
    ``--ramp-up-strategy`` of ``vllm bench serve``.
    """

    name: ClassVar[str] = "ramp"
    start: Annotated[float, Option("Requests per second at the beginning.", check=ABOVE_0)]
    end: Annotated[float, Option("Requests per second at the end.", check=ABOVE_0)]
    shape: Annotated[
        str,
        Option("linear or exponential.", check=Check("linear or exponential", lambda value: value in _SHAPES)),
    ] = "linear"
    burstiness: Annotated[float, Option("Shape of the gamma distribution of times between.", check=ABOVE_0)] = 1.0

    def __post_init__(self) -> None:
        checked(self)

    def times_s(self, count: int, seed: int) -> list[float]:
        progress = np.arange(count) / max(count - 1, 1)
        if self.shape == "linear":
            rates = self.start + (self.end - self.start) * progress
        else:
            rates = self.start * (self.end / self.start) ** progress
        gaps = generator(seed, "arrivals").gamma(self.burstiness, 1 / self.burstiness, count) / rates
        times: list[float] = np.cumsum(gaps).tolist()
        return times

    def facts(self) -> dict[str, Any]:
        return stated(self)


ARRIVALS: dict[str, type] = {kind.name: kind for kind in (Poisson, Constant, Gamma, Ramp)}


def make_arrivals(text: str) -> Arrivals:
    """Returns the process that ``text`` names, such as ``poisson:rate=4`` or ``ramp:start=1,end=8``.

    :raises InvalidArgumentError: for an unknown name or parameter, or a value out of range.
    """
    arrivals: Arrivals = make(text, ARRIVALS, what="arrivals", first="rate")
    return arrivals


def with_arrivals(requests: Sequence[PlannedRequest], arrivals: Arrivals, seed: int) -> list[PlannedRequest]:
    """Returns ``requests`` with the times of ``arrivals``, in the same order.

    Of a session only the first request arrives. The others follow ``think_s`` after the answer before them, so they
    have no time.
    """
    seen: set[str] = set()
    first = []
    for request in requests:
        first.append(request.session is None or request.session not in seen)
        if request.session is not None:
            seen.add(request.session)
    times = iter(arrivals.times_s(sum(first), seed))
    return [
        replace(request, due_s=next(times) if begins else None) for request, begins in zip(requests, first, strict=True)
    ]
