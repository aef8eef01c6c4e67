"""Reports of guidellm in JSON, by its source and documentation as of November 2026 (0.8 and the main branch).

Files since 0.3 have the same shape; older ones are refused where a field is missing. guidellm measures partly other
things than we do (``docs/lab-metrics.md``), so some of our figures stay unknown:

- TPOT is taken from the requests that the report holds: their ``inter_token_latency_ms`` is the same quantity. The
  report's own distribution of it weighs requests by their tokens, so only its mean is taken: it is that of all gaps,
  our mean ITL. Percentiles of single gaps it does not have. Its ``time_per_output_token_ms`` includes the first token.
- Requests that were cut off at the end are neither completed nor failed; ``about`` has their number.
- Goodput is not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastgen.lab.imports.reading import Fields, read_json
from fastgen.lab.imports.requests import ForeignRequest, figures
from fastgen.lab.metrics.figures import PERCENTS
from fastgen.lab.metrics.samples import samples
from fastgen.lab.metrics.statistics import described
from fastgen.lab.metrics.summary import Summary


def read_guidellm(path: str | Path) -> list[Summary]:
    """Returns a summary for each benchmark of a report.

    :raises RecordingError: if the file cannot be read, or is no such report.
    """
    found = []
    for data in read_json(path):
        report = Fields(data, str(path))
        if not is_guidellm(data):
            report.fail("", "this is no report of guidellm: it has no list 'benchmarks'")
        version = (report.inside("metadata") or report).data.get("guidellm_version")
        found += [
            _summary(Fields(one, str(path), f"benchmarks[{place}]"), version)
            for place, one in enumerate(report.items("benchmarks"))
        ]
    return found


def is_guidellm(data: Any) -> bool:
    """Returns whether a JSON value is a report of guidellm."""
    return isinstance(data, dict) and isinstance(data.get("benchmarks"), list)


def _summary(benchmark: Fields, version: object) -> Summary:
    metrics = benchmark.inside("metrics")
    totals = metrics.inside("request_totals") if metrics is not None else None
    if metrics is None or totals is None:
        benchmark.fail("metrics.request_totals", "it is missing; reports older than guidellm 0.3 cannot be read")
    completed = totals.number("successful") or 0
    requests = _requests(benchmark)
    # A report may hold a sample of its requests only.
    requests = requests if len(requests) == completed else []
    values: dict[str, float | None] = {
        "duration": benchmark.number("duration"),
        "completed": completed,
        "failed": totals.number("errored"),
        "total_input_tokens": _figure(metrics, "prompt_token_count", "total_sum"),
        "total_output_tokens": _figure(metrics, "output_token_count", "total_sum"),
        "request_throughput": _figure(metrics, "requests_per_second", "mean"),
        "output_throughput": _figure(metrics, "output_tokens_per_second", "mean"),
        "total_token_throughput": _figure(metrics, "tokens_per_second", "mean"),
        "max_concurrent_requests": _figure(metrics, "request_concurrency", "max", status="total"),
        "mean_itl_ms": _figure(metrics, "inter_token_latency_ms", "mean"),
        **_distribution(metrics, "time_to_first_token_ms", "ttft"),
        **_distribution(metrics, "request_latency", "e2el", scale=1e3),
        **_tpot(requests),
    }
    config = benchmark.inside("config")
    return Summary(
        source=f"guidellm {version}" if isinstance(version, str) else "guidellm",
        figures=figures(values, requests, dict.fromkeys(("ttft", "tpot", "e2el"), completed)),
        about={
            "load": {} if config is None else config.data.get("strategy") or {},
            "incomplete": totals.number("incomplete") or 0,
        },
    )


def _figure(metrics: Fields, metric: str, statistic: str, *, status: str = "successful") -> float | None:
    distribution = metrics.inside(metric, status)
    return None if distribution is None else distribution.number(statistic)


def _distribution(metrics: Fields, metric: str, latency: str, *, scale: float = 1.0) -> dict[str, float | None]:
    """Returns our statistics of one of guidellm's distributions."""
    distribution = metrics.inside(metric, "successful")
    if distribution is None:
        return {}
    found = {
        "mean": distribution.number("mean"),
        "median": distribution.number("median"),
        "std": distribution.number("std_dev"),
    }
    percentiles = distribution.inside("percentiles")
    if percentiles is not None:
        found |= {f"p{percent}": percentiles.number(f"p{percent}") for percent in PERCENTS}
    return {f"{name}_{latency}_ms": None if value is None else value * scale for name, value in found.items()}


def _tpot(requests: Sequence[ForeignRequest]) -> dict[str, float | None]:
    statistics = described(samples(one.latencies_ms["tpot"] for one in requests))
    return {f"{name}_tpot_ms": figure.value for name, figure in statistics.items()}


def _requests(benchmark: Fields) -> list[ForeignRequest]:
    """Returns the answered requests that the report holds; none if it lacks a time of one of them."""
    holder = benchmark.inside("requests")
    found = []
    for place, one in enumerate(holder.items("successful") if holder is not None else []):
        fields = Fields(one, benchmark.file, f"{benchmark.where}.requests.successful[{place}]")
        sent_s, ended_s = fields.number("request_start_time"), fields.number("request_end_time")
        if sent_s is None or ended_s is None:
            return []
        ttft_ms, tpot_ms = fields.number("time_to_first_token_ms"), fields.number("inter_token_latency_ms")
        latency_s = fields.number("request_latency")
        found.append(
            ForeignRequest(
                sent_s=sent_s,
                ended_s=ended_s,
                num_prompt_tokens=int(fields.number("prompt_tokens") or 0),
                num_generated=int(fields.number("output_tokens") or 0),
                latencies_ms={
                    "ttft": () if ttft_ms is None else (ttft_ms,),
                    "tpot": () if tpot_ms is None else (tpot_ms,),
                    "e2el": () if latency_s is None else (latency_s * 1e3,),
                },
            )
        )
    return found
