"""Replicas behind a load balancer, as in the FastGen paper's figure 8, on the simulated device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastgen.lab.paper.llama2 import SHAPES
from fastgen.lab.paper.reproduction import Reproduction, Result, Setting, kept, measured, value
from fastgen.lab.paper.servers import closed_loop, planned
from fastgen.lab.paper.tables import table, three
from fastgen.lab.report.plots import curve_plot
from fastgen.lab.report.points import Curve, Measured, Point
from fastgen.lab.workloads.paper import Paper

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The paper does not say how many clients it had; with so many a replica is saturated.
_CLIENTS_EACH: Final = 24
_REQUESTS_EACH: Final = 192
# Requests a second in the paper, by replicas.
_PAPER: Final = {1: 1.46, 16: 23.7}


def run(setting: Setting) -> dict[str, Any]:
    """Returns the figures of 1 to 16 replicas, each with as many clients and requests."""
    counts, clients, requests = ((1, 2), 4, 16) if setting.small else ((1, 2, 4, 8, 16), _CLIENTS_EACH, _REQUESTS_EACH)
    shape = SHAPES[0]
    points = []
    for count in counts:
        workload = Paper(
            mean_prompt_tokens=shape.prompt,
            mean_new_tokens=shape.answer,
            num_requests=count * requests,
            lengths="clamped",
        )
        found = closed_loop(shape.server("splitfuse"), planned(workload), count * clients, replicas=count)
        points.append({"replicas": count, **kept(found)})
    return {"shape": shape.title, "clients_each": clients, "requests_each": requests, "points": points}


def section(result: Result) -> str:
    """Returns the table of replicas beside the paper's two figures."""
    first = value(result["points"][0], "request_throughput")
    rows = [
        (
            f"{point['replicas']}",
            three(_PAPER.get(point["replicas"])),
            three(value(point, "request_throughput")),
            f"{value(point, 'request_throughput') / first:.2f}",
            three(value(point, "mean_e2el_ms") / 1e3),
        )
        for point in result["points"]
    ]
    intro = (
        f"{result['shape']}, `splitfuse`, {result['clients_each']} clients and {result['requests_each']} requests for "
        "each replica. Requests go to the replica whose open requests have the fewest tokens."
    )
    headings = ("replicas", "paper, requests/s", "here, requests/s", "times one replica", "mean latency (s)")
    account = (
        "The paper's 16 replicas answer 16.2 times as much as one. Replicas share nothing but the balancer, so growth "
        "is proportional by construction, here as there, as long as the balancer is not the limit. The simulation has "
        "a balancer that takes no time, so it cannot find that limit; it does show what uneven lengths cost."
    )
    return f"{intro}\n\n{table(headings, rows)}\n\n{account}"


def pictures(result: Result) -> dict[str, Figure]:
    """Returns requests a second against replicas, with the paper's two points."""
    throughputs = [(point["replicas"], measured(point, "request_throughput")) for point in result["points"]]
    here = [Point(Measured(count), throughput) for count, throughput in throughputs if throughput is not None]
    paper = [Point(Measured(count), Measured(throughput)) for count, throughput in _PAPER.items()]
    curves = [Curve("simulated", tuple(here)), Curve("paper", tuple(paper), is_reference=True)]
    return {"replicas": curve_plot(curves, x="replicas", y="throughput (requests/s)", diagonal=True)}


REPLICAS: Final = Reproduction("replicas", "Replicas from 1 to 16, simulated (figure 8)", run, section, pictures)
