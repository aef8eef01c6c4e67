"""Replicas behind a load balancer, as in the FastGen paper's figure 8, on the simulated device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fastgen.lab.metrics.means import mean_interval
from fastgen.lab.paper.llama2 import SHAPES
from fastgen.lab.paper.reproduction import Reproduction, Result, Setting, kept, measured, rounded, value
from fastgen.lab.paper.servers import closed_loop, planned
from fastgen.lab.paper.tables import table, three
from fastgen.lab.report.plots import curve_plot
from fastgen.lab.report.points import Curve, Measured, Point
from fastgen.lab.workloads.paper import Paper

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The paper does not say how many clients it had. With 24 a replica is saturated; goodput is best with fewer.
_CLIENTS_EACH: Final = (12, 16, 20, 24)
_REQUESTS_EACH: Final = 192
_COUNTS: Final = (1, 2, 4, 8, 16)
_SEEDS: Final = (0, 1, 2, 3, 4)
# Requests a second in the paper, by replicas.
_PAPER: Final = {1: 1.46, 16: 23.7}
# Requests a second that are good by the paper's rule at 4 tokens/s.
_GOODPUT: Final = "effective_throughput_4"


def run(setting: Setting) -> dict[str, Any]:
    """Returns the figures of 1 to 16 replicas, with equal numbers of clients and requests for each replica. All are run
    with the first seed; the fewest and the most replicas, at their best numbers of clients, with every seed.
    """
    counts, clients, requests, seeds = (
        ((1, 2), (2, 4), 16, (0, 1)) if setting.small else (_COUNTS, _CLIENTS_EACH, _REQUESTS_EACH, _SEEDS)
    )
    shape = SHAPES[0]

    def figures(count: int, each: int, seed: int) -> dict[str, Any]:
        workload = Paper(
            mean_prompt_tokens=shape.prompt,
            mean_new_tokens=shape.answer,
            num_requests=count * requests,
            lengths="clamped",
        )
        return kept(closed_loop(shape.server("splitfuse"), planned(workload, seed), count * each, replicas=count))

    points = [
        {"replicas": count, "clients_each": each, **figures(count, each, seeds[0])}
        for count in counts
        for each in clients
    ]
    ends = counts[0], counts[-1]
    best = {count: _best(points, count)["clients_each"] for count in ends}
    goodput = {
        str(count): [rounded(value(figures(count, best[count], seed), _GOODPUT)) for seed in seeds] for count in ends
    }
    return {
        "shape": shape.title,
        "requests_each": requests,
        "points": points,
        "goodput": {"clients_each": list(best.values()), "seeds": list(seeds), "by_replicas": goodput},
    }


def ratios(result: Result) -> list[float]:
    """Returns the goodput of the most replicas divided by that of the fewest, for each seed."""
    fewest, most = result["goodput"]["by_replicas"].values()
    return [high / low for low, high in zip(fewest, most, strict=True)]


def section(result: Result) -> str:
    """Returns the table of replicas beside the paper's two figures."""
    counts = sorted({point["replicas"] for point in result["points"]})
    saturated = max(point["clients_each"] for point in result["points"])
    full = {point["replicas"]: point for point in result["points"] if point["clients_each"] == saturated}
    best = {count: _best(result["points"], count) for count in counts}
    one = counts[0]

    def times(points: Mapping[int, Mapping[str, Any]], count: int, name: str) -> str:
        return f"{value(points[count], name) / value(points[one], name):.2f}"

    rows = [
        (
            f"{count}",
            three(_PAPER.get(count)),
            three(value(full[count], "request_throughput")),
            times(full, count, "request_throughput"),
            three(value(full[count], "mean_e2el_ms") / 1e3),
            f"{three(value(best[count], _GOODPUT))} ({best[count]['clients_each']})",
            times(best, count, _GOODPUT),
        )
        for count in counts
    ]
    intro = (
        f"{result['shape']}, `splitfuse`, {result['requests_each']} requests for each replica, sent by `least_tokens`, "
        f"the router of `fastgen.runtime.routing`. The middle columns are with {saturated} clients for each replica. "
        "Goodput is of the requests that are good by the paper's rule at 4 tokens/s, with the number of clients for "
        "each replica that has most of them (in brackets)."
    )
    headings = (
        "replicas",
        "paper, requests/s",
        "here, requests/s",
        "times one replica",
        "mean latency (s)",
        "goodput, good requests/s (clients each)",
        "times one replica's goodput",
    )
    found = ratios(result)
    mean, low, high = mean_interval(found)
    account = (
        f"The paper's 16 replicas answer 16.2 times as much as one. Here {counts[-1]} replicas have {mean:.2f} "
        f"[{low:.2f}, {high:.2f}] times the goodput of one at the same limits (mean over {len(found)} seeds with its "
        f"95 % interval; {', '.join(f'{each:.2f}' for each in found)}). One replica must take the lengths that "
        "come; of several, the least busy takes the next request, so a little more than the number of replicas is "
        "gained. Replicas share nothing but the balancer, which takes no time in the simulation. "
        "[routing.md](routing.md) has its measured time."
    )
    return f"{intro}\n\n{table(headings, rows)}\n\n{account}"


def pictures(result: Result) -> dict[str, Figure]:
    """Returns requests a second against replicas, with the paper's two points."""
    saturated = max(point["clients_each"] for point in result["points"])
    throughputs = [
        (point["replicas"], measured(point, "request_throughput"))
        for point in result["points"]
        if point["clients_each"] == saturated
    ]
    here = [Point(Measured(count), throughput) for count, throughput in throughputs if throughput is not None]
    paper = [Point(Measured(count), Measured(throughput)) for count, throughput in _PAPER.items()]
    curves = [Curve("simulated", tuple(here)), Curve("paper", tuple(paper), is_reference=True)]
    return {"replicas": curve_plot(curves, x="replicas", y="throughput (requests/s)", diagonal=True)}


def _best(points: Sequence[Mapping[str, Any]], count: int) -> Mapping[str, Any]:
    """Returns the point with the highest goodput among those with ``count`` replicas."""
    return max((each for each in points if each["replicas"] == count), key=lambda each: value(each, _GOODPUT))


REPLICAS: Final = Reproduction("replicas", "Replicas from 1 to 16, simulated (figure 8)", run, section, pictures)
