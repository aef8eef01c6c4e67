"""Intervals for another tool's figures, from what it kept of each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastgen.lab.metrics.figures import LATENCIES, PERCENTS, Figure
from fastgen.lab.metrics.intervals import Interval, wilson
from fastgen.lab.metrics.percentiles import samples_needed
from fastgen.lab.metrics.rates import rates
from fastgen.lab.metrics.samples import samples
from fastgen.lab.metrics.statistics import described
from fastgen.lab.records import RequestRecord

_RATES = {
    "request_throughput": lambda record: 1,
    "output_throughput": lambda record: record.num_new_tokens,
    "total_token_throughput": lambda record: record.num_prompt_tokens + record.num_new_tokens,
}


@dataclass(frozen=True, kw_only=True)
class ForeignRequest:
    """One answered request, as another tool measured it."""

    # When it was sent and when it ended, in seconds by any clock of the run.
    sent_s: float
    ended_s: float
    num_prompt_tokens: int
    num_generated: int
    # By vLLM's name: one value, or all gaps for "itl"; in milliseconds. What the tool does not have is missing.
    latencies_ms: Mapping[str, Sequence[float]]


def intervals(requests: Sequence[ForeignRequest], duration_s: float) -> dict[str, Interval | None]:
    """Returns the intervals of the figures that follow from ``requests``, all that were answered in a run of
    ``duration_s`` seconds.
    """
    found = {
        f"{statistic}_{latency}_ms": figure.interval
        for latency in LATENCIES
        for statistic, figure in described(samples(one.latencies_ms.get(latency, ()) for one in requests)).items()
    }
    begin_s = min((one.sent_s for one in requests), default=0.0)
    records = [
        RequestRecord(
            request=number,
            num_prompt_tokens=one.num_prompt_tokens,
            num_new_tokens=one.num_generated,
            due_s=one.sent_s,
            sent_s=one.sent_s,
            token_times_s=(),
            ended_s=one.ended_s,
        )
        for number, one in enumerate(requests)
    ]
    throughputs = rates(_RATES, records, duration_s=duration_s, begin_s=begin_s)
    return found | {name: figure.interval for name, figure in throughputs.items()}


def figures(
    values: Mapping[str, float | None], requests: Sequence[ForeignRequest], num_samples: Mapping[str, float]
) -> dict[str, Figure]:
    """Returns figures with another tool's ``values``, and with intervals from ``requests``, which may be empty.

    A percentile of too few samples is left out, as in our own summaries, and an interval beside which the value lies:
    then the tool's figure and ours are not the same.

    :param num_samples: how many values each latency has, by vLLM's name.
    """
    known = intervals(requests, values.get("duration") or 0.0) if requests else {}
    too_few = {
        f"{statistic}_{latency}_ms"
        for latency, count in num_samples.items()
        for percent in PERCENTS
        for statistic in (["median", "p50"] if percent == 50 else [f"p{percent}"])
        if count < samples_needed(percent)
    }
    found = {}
    for name, value in values.items():
        if value is None or name in too_few:
            continue
        interval = known.get(name)
        found[name] = Figure(value, interval if interval and interval[0] <= value <= interval[1] else None)
    completed, failed = values.get("completed"), values.get("failed")
    if completed is not None and failed is not None and (total := completed + failed) > 0:
        found["completed_share"] = Figure(completed / total, wilson(int(completed), int(total)))
    return found
