"""One run of a workload: open loop, closed loop, or everything at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fastgen.lab.load.closed_loop import ClosedLoop
from fastgen.lab.load.generator import Runs
from fastgen.lab.load.open_loop import OpenLoop
from fastgen.lab.records import Run
from fastgen.lab.workloads.arrivals import Arrivals, with_arrivals
from fastgen.lab.workloads.request import Workload


@dataclass(frozen=True)
class AtOnce:
    """All requests at the beginning: an :class:`~fastgen.lab.workloads.arrivals.Arrivals`."""

    name: ClassVar[str] = "at once"

    def times_s(self, count: int, seed: int) -> list[float]:
        return [0.0] * count

    def facts(self) -> dict[str, Any]:
        return {"name": self.name}


def serve(
    runs: Runs,
    workload: Workload,
    when: Arrivals | int | None,
    *,
    vocab_size: int,
    seed: int = 0,
    num_warm_ups: int = 1,
) -> Run:
    """Returns a run of ``workload``.

    ``when`` is an arrival process for an open loop, a number of clients for a closed one, or ``None`` for an open loop
    with the times that the workload has itself. ``num_warm_ups`` is for open loops; clients send one each.
    """
    requests = workload.requests(vocab_size=vocab_size, seed=seed)
    facts = {**workload.facts(), "seed": seed, "requests": len(requests)}
    if isinstance(when, int):
        return runs(requests, ClosedLoop(when, seed=seed), facts)
    if when is None:
        return runs(requests, OpenLoop({"name": "the workload's own"}, num_warm_ups), facts)
    arrivals = {**when.facts(), "seed": seed}
    return runs(with_arrivals(requests, when, seed), OpenLoop(arrivals, num_warm_ups), facts)
