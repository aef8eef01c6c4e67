"""The performance targets, and how each figure is computed from a file of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.cpu.engines.protocol import BITS
from benchmarks.cpu.machine_limits import Limits, is_steady
from benchmarks.cpu.models import SHAPES

Data = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """Holds ``floors`` and ``goals`` by weight format.

    ``figure`` returns the measured value, or ``None``; ``most`` the value at the limit of the machine's memory, where
    that is known.
    """

    what: str
    figure: Callable[[Data, str, str], float | None]
    floors: dict[str, float]
    goals: dict[str, float]
    less_is_better: bool = False
    most: Callable[[Data, str, str], float | None] | None = None

    def reached(self, value: float, bound: float) -> bool:
        return value <= bound if self.less_is_better else value >= bound


def steady(samples: Iterable[Data]) -> list[Data]:
    """Returns the samples during which the machine was steady, or all where there are none."""
    found = list(samples)
    return [each for each in found if is_steady(_limits(each["before"]), _limits(each["after"]))] or found


def _limits(measured: dict[str, float]) -> Limits:
    return Limits(measured["read"], measured["fp32"], measured["int8"])


def around(sample: Data, name: str) -> float:
    """Returns a limit of the machine while the sample was taken."""
    return float(sample["before"][name] + sample["after"][name]) / 2


def samples_of(data: Data, model: str, engine: str, weight_format: str, workload: str) -> list[Data]:
    key = {"model": model, "engine": engine, "format": weight_format, "workload": workload}
    return steady(each for each in data["samples"] if key.items() <= each.items())


def median_of(samples: list[Data], figure: Callable[[Data], float | None]) -> float | None:
    values = [value for each in samples if (value := figure(each)) is not None]
    return statistics.median(values) if values else None


def decode_rate(sample: Data) -> float | None:
    return None if sample["decode_rate"] is None else float(sample["decode_rate"])


def new_rate(sample: Data) -> float:
    return float(sample["new_tokens"] / sample["seconds"])


def prompt_rate(sample: Data) -> float:
    return float(sample["prompt_tokens"] / sample["seconds"])


def request_rate(sample: Data) -> float:
    """Returns a workload's total work a second."""
    return float(1 / sample["seconds"])


# By which figure engines are compared; more is better.
RATES: dict[str, Callable[[Data], float | None]] = {
    "W1": decode_rate,
    "W2": prompt_rate,
    "W3": request_rate,
    "W4": new_rate,
}


def rate(data: Data, model: str, engine: str, weight_format: str, workload: str) -> float | None:
    return median_of(samples_of(data, model, engine, weight_format, workload), RATES[workload])


def best_other(data: Data, model: str, weight_format: str, workload: str) -> tuple[float, str] | None:
    """Returns the best rate among other engines with as many bits a weight, and that engine."""
    rows = {(each["engine"], each["format"]) for each in data["samples"] if each["model"] == model}
    found = [
        (value, engine)
        for engine, other in sorted(rows)
        if engine != "fastgen" and BITS[other] == BITS[weight_format]
        if (value := rate(data, model, engine, other, workload)) is not None
    ]
    return max(found, default=None)


def turns_of(data: Data, model: str, engine: str, weight_format: str, workload: str) -> list[Data]:
    key = {"model": model, "engine": engine, "format": weight_format, "workload": workload}
    return [each for each in data.get("turns", ()) if key.items() <= each.items()]


def ratios_in_turns(data: Data, model: str, engine: str, weight_format: str, workload: str) -> list[float]:
    """Returns for each turn fastgen's speed over that of the other engine in its format."""
    found = []
    for turn in turns_of(data, model, engine, weight_format, workload):
        ours, theirs = (RATES[workload](turn[side]) for side in ("ours", "theirs"))
        if ours is not None and theirs is not None:
            found.append(ours / theirs)
    return found


def ratio_in_turns(data: Data, model: str, engine: str, weight_format: str, workload: str) -> float | None:
    """Returns the median ratio over turns."""
    found = ratios_in_turns(data, model, engine, weight_format, workload)
    return statistics.median(found) if found else None


def _against_best_in_turns(data: Data, model: str, weight_format: str, workload: str) -> float | None:
    """Returns the ratio to the best engine in turns, if all engines that ran in rounds ran in turns as well."""
    every = [*data["samples"], *data.get("turns", ())]
    rows = {(each["engine"], each["format"]) for each in every if each["model"] == model}
    found = [
        ratio_in_turns(data, model, engine, other, workload)
        for engine, other in rows
        if engine != "fastgen" and BITS[other] == BITS[weight_format]
    ]
    ratios = [each for each in found if each is not None]
    return min(ratios) if ratios and len(ratios) == len(found) else None


def _against_best(workload: str) -> Callable[[Data, str, str], float | None]:
    """Returns the ratio in turns where that was measured, else in rounds."""

    def figure(data: Data, model: str, weight_format: str) -> float | None:
        in_turns = _against_best_in_turns(data, model, weight_format, workload)
        if in_turns is not None:
            return in_turns
        ours, best = (
            rate(data, model, "fastgen", weight_format, workload),
            best_other(data, model, weight_format, workload),
        )
        return None if ours is None or best is None else ours / best[0]

    return figure


def _cases(data: Data, model: str, weight_format: str, requests: int, cached: int) -> list[tuple[Data, Data]]:
    """Yields steady pairs of steps with their case and their entry in the file."""
    found = []
    for entry in data["steps"]:
        if (entry["model"], entry["format"]) == (model, weight_format):
            for case in entry["cases"]:
                if (case["requests"], case["cached"]) == (requests, cached):
                    size = entry["weight_bytes"] + requests * case["mean_length"] * entry["kv_bytes_per_token"]
                    found += [(pair, {"bytes": size}) for pair in steady(case["pairs"])]
    return found


def _median_case(
    data: Data, model: str, weight_format: str, requests: int, cached: int, figure: Callable[[Data, float], float]
) -> float | None:
    cases = _cases(data, model, weight_format, requests, cached)
    return statistics.median(figure(pair, about["bytes"]) for pair, about in cases) if cases else None


def step_seconds(data: Data, model: str, weight_format: str, requests: int, cached: int) -> float | None:
    return _median_case(data, model, weight_format, requests, cached, lambda pair, _: float(pair["step_s"]))


def outside_kernels(data: Data, model: str, weight_format: str, requests: int = 1, cached: int = 16) -> float | None:
    """Returns the share of a decode step's time during which no kernel runs."""
    return _median_case(
        data, model, weight_format, requests, cached, lambda pair, _: 1 - float(pair["kernel_s"] / pair["step_s"])
    )


def share_of_read(data: Data, model: str, weight_format: str) -> float | None:
    """Returns the bytes of weights and KV a second that decoding one request reads, over the read bandwidth."""
    return _median_case(
        data, model, weight_format, 1, 16, lambda pair, size: size / float(pair["step_s"]) / around(pair, "read")
    )


def read_by_stream(data: Data, model: str, engine: str, weight_format: str) -> float | None:
    """Returns the bytes a second that one stream (W1) of an engine reads, over the read bandwidth while it ran.

    Weights are taken to be as large as fastgen's of as many bits, and the KV cache is not counted.
    """
    sizes = {BITS[each["format"]]: each["weight_bytes"] for each in data["steps"] if each["model"] == model}
    size = sizes.get(BITS[weight_format])
    if size is None:
        return None
    samples = samples_of(data, model, engine, weight_format, "W1")
    return median_of(
        samples, lambda each: size * rate_ / around(each, "read") if (rate_ := decode_rate(each)) else None
    )


def eight_over_one(data: Data, model: str, weight_format: str) -> float | None:
    one, eight = (step_seconds(data, model, weight_format, requests, 16) for requests in (1, 8))
    return None if one is None or eight is None else 8 * one / eight


def long_over_short(data: Data, model: str, weight_format: str) -> float | None:
    """Returns how much longer a step takes with 4,000 cached tokens, over how many more bytes it reads."""
    ratios = []
    for figure in (lambda pair, _: float(pair["step_s"]), lambda _, size: float(size)):
        short, long = (_median_case(data, model, weight_format, 1, cached, figure) for cached in (16, 4000))
        if short is None or long is None:
            return None
        ratios.append(long / short)
    return ratios[0] / ratios[1]


def prompt_operations(model: str, num_tokens: int) -> int:
    """Returns the multiplications and additions of a prompt: matrices, causal attention, one row of the head."""
    shape = SHAPES[model]
    attention = 4 * shape.hidden * shape.layers * num_tokens * (num_tokens + 1) // 2
    return 2 * shape.layer_weights * num_tokens + attention + 2 * shape.head_weights


def share_of_mkl(data: Data, model: str, weight_format: str) -> float | None:
    samples = samples_of(data, model, "fastgen", weight_format, "W2")
    return median_of(
        samples,
        lambda each: prompt_operations(model, each["prompt_tokens"]) / each["seconds"] / around(each, "mkl"),
    )


def over_own_fp32(data: Data, model: str, weight_format: str) -> float | None:
    ours, fp32 = (rate(data, model, "fastgen", each, "W2") for each in (weight_format, "fp32"))
    return None if ours is None or fp32 is None else ours / fp32


def _stream_at_full_bandwidth(data: Data, model: str, weight_format: str) -> float | None:
    """Returns the speed of one stream over the best engine's, if its steps read at the memory's speed."""
    ratio, share = _against_best("W1")(data, model, weight_format), share_of_read(data, model, weight_format)
    return None if ratio is None or share is None else ratio / min(1.0, share)


def _by_format(*values: float) -> dict[str, float]:
    return dict(zip(("fp32", "bf16", "int8", "int4"), values, strict=False))


TARGETS = (
    Target(
        "decode, one request: bytes a second over read bandwidth",
        share_of_read,
        _by_format(0.80, 0.80, 0.80, 0.75),
        _by_format(0.92, 0.92, 0.92, 0.86),
    ),
    Target(
        "decode, one request (W1), over the best engine",
        _against_best("W1"),
        _by_format(1.0, 1.3, 1.6, 1.6),
        _by_format(1.1, 1.5, 2.0, 2.2),
        most=_stream_at_full_bandwidth,
    ),
    Target(
        "decode, 8 requests: tokens a second over one request's",
        eight_over_one,
        _by_format(6, 5, 6, 4.5),
        _by_format(7, 6.3, 7, 5.5),
    ),
    Target(
        "sixteen streams (W4), over the best engine",
        _against_best("W4"),
        {"fp32": 1.2, "int8": 1.2, "int4": 1.2},
        {"fp32": 1.5, "int8": 1.7, "int4": 1.7},
    ),
    Target("prompt of 2048 (W2): FLOP/s over MKL's", share_of_mkl, _by_format(0.85, 0.85), _by_format(0.95, 0.95)),
    Target("prompt of 2048 (W2): int8 over our fp32", over_own_fp32, {"int8": 2.0}, {"int8": 2.5}),
    Target(
        "mixed serving (W3), over the best engine",
        _against_best("W3"),
        {"fp32": 1.0, "int8": 1.3},
        {"fp32": 1.25, "int8": 1.8},
    ),
    Target(
        "decode with 4,000 tokens cached over with 16, per token, over the ratio of bytes",
        long_over_short,
        _by_format(1.20, 1.20, 1.20, 1.20),
        _by_format(1.12, 1.12, 1.12, 1.12),
        less_is_better=True,
    ),
    Target(
        "decode, one request: share of a step without a kernel",
        outside_kernels,
        _by_format(0.05, 0.05, 0.05, 0.05),
        _by_format(0.05, 0.05, 0.05, 0.05),
        less_is_better=True,
    ),
)
