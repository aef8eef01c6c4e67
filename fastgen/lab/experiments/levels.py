"""The runs of a search: a workload that is long enough for each level."""

from __future__ import annotations

import math
from collections.abc import Callable

from fastgen.lab.experiments.search import TooFewRequestsError
from fastgen.lab.experiments.serve import serve
from fastgen.lab.load.generator import Runs
from fastgen.lab.load.units import units
from fastgen.lab.records import Run
from fastgen.lab.workloads.arrivals import Poisson
from fastgen.lab.workloads.request import Workload

# A level with N clients has 4 N + 32 requests or sessions, as in the scripts of the FastGen paper: so all clients are
# busy for most of the run.
REQUESTS_PER_CLIENT = 4
MORE_REQUESTS = 32

# Makes a workload of at least so many requests or sessions, or of as many as it can have.
OfSize = Callable[[int], Workload]


def by_clients(
    runs: Callable[[str], Runs], of_size: OfSize, *, vocab_size: int, seed: int = 0
) -> Callable[[float, int], Run]:
    """Returns what measures a number of clients, for :func:`~fastgen.lab.experiments.search.search`.

    ``runs`` gets a title for the progress bar.
    """

    def measure(level: float, repeat: int) -> Run:
        clients = int(level)
        workload = _checked(of_size, REQUESTS_PER_CLIENT * clients + MORE_REQUESTS, vocab_size, f"{clients} clients")
        return serve(runs(f"{clients} clients"), workload, clients, vocab_size=vocab_size, seed=seed + repeat)

    return measure


def by_rate(
    runs: Callable[[str], Runs], of_size: OfSize, *, seconds: float, vocab_size: int, seed: int = 0
) -> Callable[[float, int], Run]:
    """Returns what measures a rate in requests per second, by a Poisson process of at least ``seconds`` seconds: a
    short run at a high rate would be a single burst.
    """

    def measure(level: float, repeat: int) -> Run:
        title = f"{level:.3g} requests/s"
        workload = _checked(of_size, math.ceil(level * seconds), vocab_size, title)
        return serve(runs(title), workload, Poisson(level), vocab_size=vocab_size, seed=seed + repeat)

    return measure


def _checked(of_size: OfSize, needed: int, vocab_size: int, level: str) -> Workload:
    workload = of_size(needed)
    found = len(units(workload.requests(vocab_size=vocab_size, seed=0)))
    if found < needed:
        raise TooFewRequestsError(
            f"the workload has {found} requests or sessions, and a run with {level} needs {needed}"
        )
    return workload
