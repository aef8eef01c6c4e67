"""The performance targets, and how the figures of fastgen alone are computed from a file of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.cpu.comparison import against_best, our_format, prompt_rate
from benchmarks.cpu.evidence import CLOSE, Data, Evidence, Figure, Lack, around, evidence, is_close, was_steady
from benchmarks.cpu.models import SHAPES

Result = Figure | Lack


@dataclass(frozen=True)
class Target:
    """A figure that was to be reached, with a floor and a goal for each weight format."""

    what: str
    figure: Callable[[Data, str, str], Result]  # from a file, a model and a weight format
    floors: dict[str, float]
    goals: dict[str, float]
    less_is_better: bool = False
    # A value outside these bounds cannot be right, whatever it was measured with.
    possible: tuple[float, float] = (0.0, float("inf"))

    def reached(self, value: float, bound: float) -> bool:
        return value <= bound if self.less_is_better else value >= bound

    def result(self, data: Data, model: str, weight_format: str) -> Result:
        """Returns the figure, unless it is not possible."""
        found = self.figure(data, model, weight_format)
        least, most = self.possible
        if isinstance(found, Figure) and not least <= found.value <= most:
            return Lack(f"{found.value:.2f} is not possible: the limits beside it are of another speed of the machine")
        return found


def steps_of(data: Data, model: str, weight_format: str, requests: int, cached: int) -> Evidence | None:
    """Returns measurements of a decode step, each with the ``bytes`` of weights and KV that the step needs."""
    found = []
    for entry in data["steps"]:
        if (entry["model"], entry["format"]) == (model, weight_format):
            about = {name: entry[name] for name in ("date", "commit") if name in entry}
            for case in entry["cases"]:
                if (case["requests"], case["cached"]) == (requests, cached):
                    size = entry["weight_bytes"] + requests * case["mean_length"] * entry["kv_bytes_per_token"]
                    found += [{**pair, **about, "bytes": size} for pair in case["pairs"]]
    return evidence(found, was_steady, "steps")


def _step_figure(
    data: Data, model: str, weight_format: str, requests: int, cached: int, value: Callable[[Data], float]
) -> Result:
    found = steps_of(data, model, weight_format, requests, cached)
    return Lack("not measured") if found is None else found.figure(value)


def step_seconds(data: Data, model: str, weight_format: str, requests: int, cached: int) -> Result:
    return _step_figure(data, model, weight_format, requests, cached, lambda pair: float(pair["step_s"]))


def outside_kernels(data: Data, model: str, weight_format: str, requests: int = 1, cached: int = 16) -> Result:
    """Returns the share of a decode step's time during which no kernel runs."""
    share = _without_kernel
    return _step_figure(data, model, weight_format, requests, cached, share)


def _without_kernel(pair: Data) -> float:
    return 1 - float(pair["kernel_s"] / pair["step_s"])


def share_of_read(data: Data, model: str, weight_format: str) -> Result:
    """Returns the bytes of weights and KV a second that decoding one request reads, over the read bandwidth."""
    return _step_figure(
        data, model, weight_format, 1, 16, lambda pair: pair["bytes"] / float(pair["step_s"]) / around(pair, "read")
    )


def _between(of: Evidence | None, over: Evidence | None, value: Callable[[Data], float], limit: str) -> Result:
    """Returns the ratio of two medians of one build, with the spread that follows from the two.

    ``limit`` names the limit of the machine that must have been the same beside both.
    """
    if of is None or over is None:
        return Lack("not measured")
    figures, limits = [], []
    for each in (of, over):
        figure, speed = each.figure(value), each.figure(lambda found: around(found, limit))
        if isinstance(figure, Lack) or isinstance(speed, Lack):
            return each.lack
        figures.append(figure)
        limits.append(speed.value)
    if of.build != over.build:
        return Lack(f"the two are of different builds, {of.build} and {over.build}")
    if not is_close(*limits):
        return Lack(f"{limit} was {limits[0] / 1e9:.0f} and {limits[1] / 1e9:.0f} G/s beside the two")
    one, other = figures
    num_steady, num_measured = min((each.num_steady, each.num_measured) for each in figures)
    spread = (one.value / other.value, one.least / other.most, one.most / other.least)
    return Figure(*spread, num_steady, num_measured, one.unit, one.build)


def eight_over_one(data: Data, model: str, weight_format: str) -> Result:
    """Returns the tokens a second of eight requests over those of one."""
    one, eight = (steps_of(data, model, weight_format, requests, 16) for requests in (1, 8))
    return _scaled(_between(one, eight, lambda pair: float(pair["step_s"]), "read"), 8)


def long_over_short(data: Data, model: str, weight_format: str) -> Result:
    """Returns how much longer a step takes with 4,000 tokens cached, over how many more bytes it needs."""
    short, long = (steps_of(data, model, weight_format, 1, cached) for cached in (16, 4000))
    return _between(long, short, lambda pair: float(pair["step_s"] / pair["bytes"]), "read")


def _scaled(found: Result, factor: float) -> Result:
    if isinstance(found, Lack):
        return found
    values = (factor * found.value, factor * found.least, factor * found.most)
    return Figure(*values, found.num_steady, found.num_measured, found.unit, found.build)


def prompt_operations(model: str, num_tokens: int) -> int:
    """Returns the multiplications and additions of a prompt: matrices, causal attention, one row of the head."""
    shape = SHAPES[model]
    attention = 4 * shape.hidden * shape.layers * num_tokens * (num_tokens + 1) // 2
    return 2 * shape.layer_weights * num_tokens + attention + 2 * shape.head_weights


def runs_of(data: Data, model: str, weight_format: str, workload: str) -> Evidence | None:
    """Returns every run of a workload by fastgen, in turns with another engine or alone."""
    key = {"model": model, "workload": workload}
    alone = [
        each
        for each in data["samples"]
        if (key | {"engine": "fastgen", "format": weight_format}).items() <= each.items()
    ]
    in_turns = [
        {**turn["ours"], **{name: turn[name] for name in ("date", "commit") if name in turn}}
        for turn in data.get("turns", ())
        if key.items() <= turn.items() and our_format(turn["format"]) == weight_format
    ]
    return evidence([*alone, *in_turns], was_steady, "runs")


def share_of_mkl(data: Data, model: str, weight_format: str) -> Result:
    """Returns the operations a second of a prompt of 2048 over those of torch's own fp32 product."""
    found = runs_of(data, model, weight_format, "W2")
    if found is None:
        return Lack("not measured")
    return found.figure(
        lambda run: prompt_operations(model, run["prompt_tokens"]) / float(run["seconds"]) / around(run, "mkl")
    )


def over_own_fp32(data: Data, model: str, weight_format: str) -> Result:
    """Returns the prompt tokens a second over those of fastgen in fp32."""
    ours, fp32 = (runs_of(data, model, each, "W2") for each in (weight_format, "fp32"))
    return _between(ours, fp32, prompt_rate, "mkl")


def _by_format(*values: float) -> dict[str, float]:
    return dict(zip(("fp32", "bf16", "int8", "int4"), values, strict=False))


TARGETS = (
    Target(
        "decode, one request: bytes a second over read bandwidth",
        share_of_read,
        _by_format(0.80, 0.80, 0.80, 0.75),
        _by_format(0.92, 0.92, 0.92, 0.86),
        possible=(0.0, 1 / CLOSE),
    ),
    Target(
        "decode, one request (W1), over the best engine",
        against_best("W1"),
        _by_format(1.0, 1.3, 1.6, 1.6),
        _by_format(1.1, 1.5, 2.0, 2.2),
    ),
    Target(
        "decode, 8 requests: tokens a second over one request's",
        eight_over_one,
        _by_format(6, 5, 6, 4.5),
        _by_format(7, 6.3, 7, 5.5),
        possible=(0.0, 8.0),
    ),
    Target(
        "sixteen streams (W4), over the best engine",
        against_best("W4"),
        {"fp32": 1.2, "int8": 1.2, "int4": 1.2},
        {"fp32": 1.5, "int8": 1.7, "int4": 1.7},
    ),
    Target(
        "prompt of 2048 (W2): FLOP/s over MKL's",
        share_of_mkl,
        _by_format(0.85, 0.85),
        _by_format(0.95, 0.95),
    ),
    Target("prompt of 2048 (W2): int8 over fastgen's fp32", over_own_fp32, {"int8": 2.0}, {"int8": 2.5}),
    Target(
        "mixed serving (W3), over the best engine",
        against_best("W3"),
        {"fp32": 1.0, "int8": 1.3},
        {"fp32": 1.25, "int8": 1.8},
    ),
    Target(
        "decode with 4,000 tokens cached over with 16, per token, over the ratio of bytes",
        long_over_short,
        _by_format(1.20, 1.20, 1.20, 1.20),
        _by_format(1.12, 1.12, 1.12, 1.12),
        less_is_better=True,
        possible=(CLOSE, float("inf")),
    ),
    Target(
        "decode, one request: share of a step without a kernel",
        outside_kernels,
        _by_format(0.05, 0.05, 0.05, 0.05),
        _by_format(0.05, 0.05, 0.05, 0.05),
        less_is_better=True,
    ),
)
