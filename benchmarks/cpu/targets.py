"""The performance targets, and how each figure is computed from a file of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.cpu.engines.protocol import ADAPTERS, BITS
from benchmarks.cpu.machine_limits import Limits, is_steady
from benchmarks.cpu.models import SHAPES

Data = dict[str, Any]
# The last change of the CPU kernels that a recorded figure may be older than.
KERNELS_CHANGED = ("2026-11-22T23:55", "linear layers")


_CLOSE = 0.85  # Two speeds of the machine are comparable if the smaller is at least this share of the greater.


@dataclass(frozen=True)
class Figure:
    """One measured value, with the conditions that a reader needs to judge it."""

    value: float
    basis: str = ""  # what it was taken from, such as "llama.cpp, 1 of 4 turns steady"
    uncertainty: str = ""  # why the value says little, such as "no turn was steady"; empty if it is sound


@dataclass(frozen=True)
class Target:
    """A figure that was to be reached, with a floor and a goal for each weight format."""

    what: str
    figure: Callable[[Data, str, str], Figure | None]  # from a file, a model and a weight format
    floors: dict[str, float]
    goals: dict[str, float]
    less_is_better: bool = False
    most: Callable[[Data, str, str], float | None] | None = None  # the value at the memory's full speed

    def reached(self, value: float, bound: float) -> bool:
        return value <= bound if self.less_is_better else value >= bound


def steady(samples: Iterable[Data]) -> list[Data]:
    """Returns the samples during which the machine's speed moved by at most 15 %, or all if there are none."""
    found = list(samples)
    return [each for each in found if was_steady(each)] or found


def was_steady(sample: Data) -> bool:
    return is_steady(_limits(sample["before"]), _limits(sample["after"]))


def is_close(one: float, other: float) -> bool:
    return min(one, other) >= _CLOSE * max(one, other)


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


def is_steady_turn(turn: Data) -> bool:
    """Returns whether the machine stayed the same during both runs of a turn, and from one run to the other."""
    ours, theirs = turn["ours"], turn["theirs"]
    return was_steady(ours) and was_steady(theirs) and is_close(around(ours, "read"), around(theirs, "read"))


def ratios_in_turns(
    data: Data, model: str, engine: str, weight_format: str, workload: str, steady_only: bool = False
) -> list[float]:
    """Returns fastgen's speed over the other engine's in each turn."""
    found = []
    for turn in turns_of(data, model, engine, weight_format, workload):
        ours, theirs = (RATES[workload](turn[side]) for side in ("ours", "theirs"))
        if ours is not None and theirs is not None and (is_steady_turn(turn) or not steady_only):
            found.append(ours / theirs)
    return found


def ratio_in_turns(data: Data, model: str, engine: str, weight_format: str, workload: str) -> float | None:
    """Returns the median over steady turns, or over all if none was steady."""
    found = ratios_in_turns(data, model, engine, weight_format, workload, steady_only=True)
    found = found or ratios_in_turns(data, model, engine, weight_format, workload)
    return statistics.median(found) if found else None


def age_of(date: str) -> str:
    return ", older build" if date < KERNELS_CHANGED[0] else ""


def _turns_beside(data: Data, model: str, engine: str, weight_format: str, workload: str) -> Figure | None:
    every, steady_ones = (
        ratios_in_turns(data, model, engine, weight_format, workload, steady_only=each) for each in (False, True)
    )
    if not every:
        return None
    taken = min(each["date"] for each in turns_of(data, model, engine, weight_format, workload))
    basis = f"{engine}, {len(steady_ones)} of {len(every)} turns steady, {taken[:10]}{age_of(taken)}"
    return Figure(statistics.median(steady_ones or every), basis, "" if steady_ones else "no turn was steady")


def in_rounds(data: Data, model: str, engine: str, weight_format: str, workload: str) -> Figure | None:
    """Compares rounds, in which engines run minutes apart."""
    ours_format = next(each for each in ADAPTERS["fastgen"].formats if BITS[each] == BITS[weight_format])
    ours = samples_of(data, model, "fastgen", ours_format, workload)
    theirs = samples_of(data, model, engine, weight_format, workload)
    rates = [median_of(each, RATES[workload]) for each in (ours, theirs)]
    if rates[0] is None or rates[1] is None:
        return None
    speeds = [statistics.median(around(each, "read") for each in side) for side in (ours, theirs)]
    uncertainty = ""
    if not is_close(*speeds):
        uncertainty = f"the memory read at {speeds[0] / 1e9:.0f} and {speeds[1] / 1e9:.0f} GB/s in the two runs"
    elif not all(was_steady(each) for each in (*ours, *theirs)):
        uncertainty = "the machine's speed moved during a run"
    num_rounds = min(len(ours), len(theirs))
    taken = min(each["date"] for each in (*ours, *theirs))
    basis = f"{engine}, {num_rounds} round{'s' * (num_rounds > 1)}, {taken[:10]}{age_of(taken)}"
    return Figure(rates[0] / rates[1], basis, uncertainty)


def beside(data: Data, model: str, engine: str, weight_format: str, workload: str) -> Figure | None:
    """Returns fastgen's speed over one engine's.

    Of turns and rounds the less favourable counts. An uncertain figure counts only if there is no sound one.
    """
    found = [each(data, model, engine, weight_format, workload) for each in (_turns_beside, in_rounds)]
    figures = [each for each in found if each is not None]
    sure = [each for each in figures if not each.uncertainty]
    return min(sure or figures, key=lambda each: each.value, default=None)


def against_best(workload: str) -> Callable[[Data, str, str], Figure | None]:
    """Makes a figure of the smallest ratio over any other engine of as many bits."""

    def figure(data: Data, model: str, weight_format: str) -> Figure | None:
        figures, absent = [], []
        for engine, adapter in ADAPTERS.items():
            for other in adapter.formats if engine != "fastgen" else ():
                if BITS[other] == BITS[weight_format]:
                    found = beside(data, model, engine, other, workload)
                    absent.extend([engine] * (found is None))
                    figures.extend([found] * (found is not None))
        if not figures:
            return None
        least = min(figures, key=lambda each: each.value)
        measured = {each.basis.split(",")[0] for each in figures}
        missing = [each for each in dict.fromkeys(absent) if each not in measured]
        basis = least.basis + (f"; not measured: {', '.join(missing)}" if missing else "")
        return Figure(least.value, basis, least.uncertainty)

    return figure


def _cases(data: Data, model: str, weight_format: str, requests: int, cached: int) -> list[tuple[Data, Data]]:
    """Returns steady measurements of a step, each with the bytes that the step needs."""
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


def eight_over_one(data: Data, model: str, weight_format: str) -> Figure | None:
    one, eight = (step_seconds(data, model, weight_format, requests, 16) for requests in (1, 8))
    if one is None or eight is None:
        return None
    return Figure(8 * one / eight, uncertainty=_uncertainty_between(data, model, weight_format, (1, 16), (8, 16)))


def long_over_short(data: Data, model: str, weight_format: str) -> Figure | None:
    """Returns how much longer a step takes with 4,000 tokens cached, over how many more bytes it needs."""
    ratios = []
    for figure in (lambda pair, _: float(pair["step_s"]), lambda _, size: float(size)):
        short, long = (_median_case(data, model, weight_format, 1, cached, figure) for cached in (16, 4000))
        if short is None or long is None:
            return None
        ratios.append(long / short)
    return Figure(
        ratios[0] / ratios[1], uncertainty=_uncertainty_between(data, model, weight_format, (1, 16), (1, 4000))
    )


def _uncertainty_between(data: Data, model: str, weight_format: str, *cases: tuple[int, int]) -> str:
    """Returns why two cases of decode steps cannot be compared, if the memory's speed differed."""
    speeds = [_median_case(data, model, weight_format, *case, lambda pair, _: around(pair, "read")) for case in cases]
    one, other = (each or 0.0 for each in speeds)
    return "" if is_close(one, other) else f"the memory read at {one / 1e9:.0f} and {other / 1e9:.0f} GB/s in the two"


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


def over_own_fp32(data: Data, model: str, weight_format: str) -> Figure | None:
    ours, fp32 = (rate(data, model, "fastgen", each, "W2") for each in (weight_format, "fp32"))
    if ours is None or fp32 is None:
        return None
    samples = (samples_of(data, model, "fastgen", each, "W2") for each in (weight_format, "fp32"))
    one, other = (statistics.median(around(each, "mkl") for each in side) for side in samples)
    uncertainty = (
        "" if is_close(one, other) else f"MKL reached {one / 1e9:.0f} and {other / 1e9:.0f} GFLOP/s beside the two"
    )
    return Figure(ours / fp32, uncertainty=uncertainty)


def _stream_at_full_bandwidth(data: Data, model: str, weight_format: str) -> float | None:
    """Returns one stream over the best engine's, if its steps read at the memory's speed."""
    figure, share = against_best("W1")(data, model, weight_format), share_of_read(data, model, weight_format)
    return None if figure is None or share is None else figure.value / min(1.0, share)


def _of_fastgen(
    value: Callable[[Data, str, str], float | None],
) -> Callable[[Data, str, str], Figure | None]:
    """Wraps a value that needs no comparison."""

    def figure(data: Data, model: str, weight_format: str) -> Figure | None:
        found = value(data, model, weight_format)
        return None if found is None else Figure(found)

    return figure


def _by_format(*values: float) -> dict[str, float]:
    return dict(zip(("fp32", "bf16", "int8", "int4"), values, strict=False))


TARGETS = (
    Target(
        "decode, one request: bytes a second over read bandwidth",
        _of_fastgen(share_of_read),
        _by_format(0.80, 0.80, 0.80, 0.75),
        _by_format(0.92, 0.92, 0.92, 0.86),
    ),
    Target(
        "decode, one request (W1), over the best engine",
        against_best("W1"),
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
        against_best("W4"),
        {"fp32": 1.2, "int8": 1.2, "int4": 1.2},
        {"fp32": 1.5, "int8": 1.7, "int4": 1.7},
    ),
    Target(
        "prompt of 2048 (W2): FLOP/s over MKL's",
        _of_fastgen(share_of_mkl),
        _by_format(0.85, 0.85),
        _by_format(0.95, 0.95),
    ),
    Target("prompt of 2048 (W2): int8 over our fp32", over_own_fp32, {"int8": 2.0}, {"int8": 2.5}),
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
    ),
    Target(
        "decode, one request: share of a step without a kernel",
        _of_fastgen(outside_kernels),
        _by_format(0.05, 0.05, 0.05, 0.05),
        _by_format(0.05, 0.05, 0.05, 0.05),
        less_is_better=True,
    ),
)
