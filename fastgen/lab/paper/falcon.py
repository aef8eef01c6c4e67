"""Falcon-40B on GPUs of 24 GB, as in AWS's post: memory, and three ways of batching on the simulated device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fastgen.lab.models import describe
from fastgen.lab.paper.reproduction import Reproduction, Result, Setting, kept, measured, value
from fastgen.lab.paper.servers import Server, closed_loop, planned
from fastgen.lab.paper.tables import table, three
from fastgen.lab.plan.sheet import preset
from fastgen.lab.report.plots import panel_plot
from fastgen.lab.report.points import Curve, Measured, Point
from fastgen.lab.workloads.synthetic import AWSLongPrompts, AWSShortPrompts, FixedLengths
from fastgen.runtime.scheduling.policies import DynamicBatching

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GB: Final = 10**9
# Prompt and answer tokens of the two scenarios; by way of batching tokens/s and P90 of the latency in seconds.
AWS: Final = {
    "32/128": {"dynamic": (5.53, 58.34), "continuous": (56.04, 4.74), "paged": (59.18, 4.76)},
    "256/32": {"dynamic": (19.96, 59.31), "continuous": (46.69, 3.88), "paged": (44.75, 2.67)},
}
_WORKLOADS: Final[dict[str, type[FixedLengths]]] = {"32/128": AWSShortPrompts, "256/32": AWSLongPrompts}
_CLIENTS: Final = (1, 2, 4, 8, 16, 32)
_NUM_REQUESTS: Final = 128
# The post's settings: max_rolling_batch_size, max_rolling_batch_prefill_tokens, batch_size and max_batch_delay.
_BATCH: Final = 32
_PREFILL_TOKENS: Final = 1024
_DELAY_S: Final = 0.1
_WAYS: Final = {
    "dynamic": f"`dynamic`: batches of up to {_BATCH}, or what came within {1000 * _DELAY_S:.0f} ms",
    "continuous": "`prefill_first`, and each request reserves the whole context",
    "paged": "`splitfuse` with blocks",
}


def server(way: str) -> Server:
    """Returns Falcon-40B on 8 × A10G with one of the three ways of batching."""
    policies: dict[str, Any] = {
        "dynamic": DynamicBatching(batch_size=_BATCH, max_delay_s=_DELAY_S),
        "continuous": "prefill_first",
        "paged": "splitfuse",
    }
    return Server(
        model="falcon-40b",
        device="A10G",
        tensor_parallel=8,
        policy=policies[way],
        token_budget=_PREFILL_TOKENS,
        max_num_seqs=_BATCH,
        max_model_len=2048,
        reserves_context=way == "continuous",
    )


def run(setting: Setting) -> dict[str, Any]:
    """Returns the memory arithmetic and the figures of every scenario, way of batching and number of clients."""
    clients, count = ((2,), 16) if setting.small else (_CLIENTS, _NUM_REQUESTS)
    curves = []
    for scenario, workload in _WORKLOADS.items():
        requests = planned(workload(num_requests=count))
        for way in _WAYS:
            points = [{"clients": each, **kept(closed_loop(server(way), requests, each))} for each in clients]
            curves.append({"scenario": scenario, "way": way, "points": points})
    settings, _ = server("paged").build()
    spec = describe("falcon-40b").spec
    return {
        "num_requests": count,
        "parameters": spec.num_parameters,
        "num_blocks": settings.num_blocks,
        "sheet": preset("falcon-40b-4x24gb").sheet.lines(),
        "curves": curves,
    }


def section(result: Result) -> str:
    """Returns memory, AWS's table beside ours, and where they differ."""
    parts = [_memory(result)]
    for scenario, ways in _curves(result).items():
        parts += [f"**{scenario.replace('/', ' tokens in, ')} out**", _table(scenario, ways)]
    return "\n\n".join([*parts, _account(result)])


def _memory(result: Result) -> str:
    parameters = result["parameters"]
    exact_gb = parameters * 2 / GB
    sheet = "\n".join(result["sheet"])
    return (
        f"The post's arithmetic, from 40 billion parameters:\n\n```\n{sheet}\n```\n\n"
        f"Counted from the configuration there are {parameters / GB:.1f} billion: {2 * exact_gb:.0f} GB in fp32, "
        f"{exact_gb:.0f} GB in bf16, and {exact_gb / 4:.1f} GB, {exact_gb / 4 / 24:.0%} of 24 GB, on each of four. The "
        f"load ran on 8 × A10G. There the engine takes {result['num_blocks'] - 1:,} blocks of 16 tokens: enough for "
        f"{_BATCH} requests of the whole context of 2,048 tokens."
    )


def _table(scenario: str, ways: Mapping[str, Any]) -> str:
    answer = int(scenario.partition("/")[2])
    rows = []
    for way, points in ways.items():
        throughput, latency_s = AWS[scenario][way]
        in_flight = throughput * latency_s / answer
        nearest = min(points, key=lambda point: abs(point["clients"] - in_flight))
        best = points[-1]
        rows.append(
            (
                _WAYS[way],
                f"{throughput:g} ({latency_s:g})",
                f"{in_flight:.1f}",
                f"{nearest['clients']}: {_rate_and_p90(nearest)}",
                f"{best['clients']}: {_rate_and_p90(best)}",
            )
        )
    headings = (
        "batching",
        "AWS: tokens/s (P90, s)",
        "requests in flight, from these",
        "here at about as many clients",
        "here at most clients",
    )
    return table(headings, rows)


def _rate_and_p90(point: Mapping[str, Any]) -> str:
    return f"{three(value(point, 'output_throughput'))} ({three(value(point, 'p90_e2el_ms') / 1e3)})"


def _account(result: Result) -> str:
    weights_gb = result["parameters"] * 2 / GB
    token_s = weights_gb / 600
    return (
        "The post does not say how many clients it had. Tokens a second times the P90 latency, divided by the tokens "
        "of an answer, are about the requests in flight (Little's law), and there were few: two to six for the "
        "continuous kinds. At such a load the simulated device gives 1.4 times AWS's tokens a second with short "
        "prompts, and 2.4 times with long ones. It has no HTTP endpoint, no cloud in between, and kernels as good as "
        "on other devices. The post does not say which of these makes the difference.\n\n"
        "`dynamic` is far from AWS's figure. With two clients a batch of two loses little here, so the factor of ten "
        "in the post's table does not come from batching. It does cost up to half of the throughput with 16 clients "
        "and more, when answers of one batch wait for each other. Its listing names the engine with tensor "
        "parallelism only for the two continuous kinds. If the layers lie on the eight GPUs one after another "
        "instead, each token reads "
        f"all {weights_gb:.0f} GB at 600 GB/s, which takes {token_s:.2f} s, so an answer of 128 tokens takes at least "
        f"{128 * token_s:.0f} s. That would explain a P90 of 58 s by two or three batches in a row; it is a guess, as "
        "the post has too little to check it.\n\n"
        f"Paging changes nothing here. The memory left beside the weights holds {_BATCH} requests, the most that run, "
        "even if each reserves the whole context of 2,048 tokens. AWS's two rows differ by 5 % too. Paging shows with "
        "long contexts and little memory: see the chats below."
    )


def pictures(result: Result) -> dict[str, Figure]:
    """Returns tokens a second against clients, one plot a scenario, with AWS's figures at the requests in flight."""
    panels = {}
    for scenario, ways in _curves(result).items():
        curves = []
        for way, points in ways.items():
            drawn = [(point["clients"], measured(point, "output_throughput")) for point in points]
            curves.append(Curve(way, tuple(Point(Measured(at), rate) for at, rate in drawn if rate is not None)))
        answer = int(scenario.partition("/")[2])
        aws = [
            Point(Measured(rate * latency_s / answer), Measured(rate))
            for rate, latency_s in AWS[scenario].values()
            if rate * latency_s / answer <= _BATCH
        ]
        curves.append(Curve("AWS", tuple(sorted(aws, key=lambda point: point.x.value)), is_reference=True))
        panels[f"{scenario.replace('/', ' in, ')} out"] = curves
    return {"falcon": panel_plot(panels, x="clients", y="generated tokens/s", share_y=False)}


def _curves(result: Result) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for curve in result["curves"]:
        found.setdefault(curve["scenario"], {})[curve["way"]] = curve["points"]
    return found


FALCON: Final = Reproduction("falcon", "Falcon-40B on GPUs of 24 GB: AWS's post, simulated", run, section, pictures)
