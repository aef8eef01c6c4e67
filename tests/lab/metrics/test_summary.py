"""Summaries, recomputed from the raw records by the formulas of the documentation, without the code under test."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fastgen.lab.metrics.figures import UNITS
from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.metrics.summary import COUNTS, summarize
from fastgen.lab.records import Run, write_run
from tests.averages import ewm_mean
from tests.lab.runs import closed_loop, header


def interpolated(values: list[float], percent: float) -> float:
    """Returns a percentile: the value at ``percent / 100 * (n - 1)`` of the sorted values."""
    values = sorted(values)
    place = percent / 100 * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] * (1 - (place - low)) + values[high] * (place - low)


def recomputed(lines: list[str], limits: dict[str, float]) -> dict[str, float]:
    """Returns the figures of a run's file."""
    head, *raw = [json.loads(line) for line in lines]
    good_by_rate = dict.fromkeys((2, 4, 6), 0)
    by_latency: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    num_good = 0
    answered = [one for one in raw if one["error"] is None]
    for one in answered:
        times = one["token_times_s"]
        ttft, e2el = times[0] - one["sent_s"], one["ended_s"] - one["sent_s"]
        gaps = [b - a for a, b in pairwise(times)]
        tpot = sum(gaps) / len(gaps) if gaps else 0.0
        by_latency["ttft"].append(ttft * 1e3)
        by_latency["e2el"].append(e2el * 1e3)
        by_latency["itl"] += [gap * 1e3 for gap in gaps]
        by_latency["tpot"] += [tpot * 1e3] if gaps else []
        num_good += (
            ttft * 1e3 <= limits["ttft"]
            and tpot * 1e3 <= limits["tpot"]
            and max(gaps, default=0) * 1e3 <= limits["itl"]
        )
        for rate in good_by_rate:
            if ttft <= one["num_prompt_tokens"] / 512 and all(mean < 1 / rate for mean in ewm_mean(gaps)):
                good_by_rate[rate] += 1
    inputs = sum(one["num_prompt_tokens"] for one in answered)
    outputs = sum(len(one["token_times_s"]) for one in answered)
    duration = head["duration_s"]
    wall = max(one["ended_s"] for one in answered) - min(one["sent_s"] for one in answered)
    found = {
        "duration": duration,
        "completed": len(answered),
        "failed": len(raw) - len(answered),
        "completed_share": len(answered) / len(raw),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(answered) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "request_goodput": num_good / duration,
        "good_share": num_good / len(raw),
        "max_concurrent_requests": max(
            sum(other["sent_s"] <= one["sent_s"] < other["ended_s"] for other in raw) for one in raw
        ),
    }
    for latency, values in by_latency.items():
        found[f"mean_{latency}_ms"] = statistics.fmean(values)
        found[f"median_{latency}_ms"] = statistics.median(values)
        found[f"std_{latency}_ms"] = statistics.pstdev(values)
        for percent in (50, 90, 95, 99):
            found[f"p{percent}_{latency}_ms"] = interpolated(values, percent)
    for rate, num in good_by_rate.items():
        found[f"effective_throughput_{rate}"] = num / wall
        found[f"effective_share_{rate}"] = num / len(answered)
    mean_s = statistics.fmean(one["ended_s"] - one["sent_s"] for one in answered)
    found["paper_latency_s"] = mean_s
    found["paper_throughput"] = len({one["client"] for one in answered}) / mean_s
    middle = sorted(answered, key=lambda one: one["sent_s"])[1:-1]
    token_times = [[b - a for a, b in pairwise([one["sent_s"], *one["token_times_s"]])] for one in middle]
    kept = [gap * 1e3 for each in token_times for gap in each[1:-1]]
    for percent in (50, 90, 95):
        found[f"paper_p{percent}_gap_ms"] = interpolated(kept, percent)
    return found


def test_every_figure_follows_from_the_raw_records(tmp_path: Path) -> None:
    run = closed_loop(700, 16, failing=50)
    write_run(run, tmp_path / "run.jsonl")
    limits = {"ttft": 1200.0, "tpot": 300.0, "itl": 1000.0}
    summary = summarize(run, slo=SLO(ttft_ms=1200.0, tpot_ms=300.0, itl_ms=1000.0))
    expected = recomputed((tmp_path / "run.jsonl").read_text().splitlines(), limits)
    assert expected.keys() == UNITS.keys()
    found = summary.as_json()
    assert {name: found[name] for name in UNITS} == pytest.approx(expected, rel=1e-9)
    assert 0.1 < expected["good_share"] < 0.9, "the limits decide"
    assert 0.1 < expected["effective_share_6"] < expected["effective_share_2"] < 0.95, "the rates decide"


def test_every_figure_that_is_no_count_has_an_interval_around_it() -> None:
    found = summarize(closed_loop(700, 16, failing=50), slo=SLO(e2el_ms=3000)).as_json()
    for name in UNITS:
        if name in COUNTS:
            assert f"{name}_interval" not in found
        else:
            low, high = found[f"{name}_interval"]
            assert low <= found[name] <= high, name
            assert low < high, name
    json.dumps(found, allow_nan=False)


def test_the_same_run_has_the_same_intervals() -> None:
    run = closed_loop(200, 4)
    assert summarize(run).as_json() == summarize(run).as_json()


def test_a_pause_at_the_end_lowers_a_rate_and_its_interval_alike() -> None:
    run = closed_loop(200, 4)
    paused = Run(replace(run.header, duration_s=2 * run.header.duration_s), run.records)
    figure, halved = summarize(run)["output_throughput"], summarize(paused)["output_throughput"]
    assert [halved.value, *(halved.interval or ())] == pytest.approx(
        [one / 2 for one in (figure.value, *(figure.interval or ())) if one is not None]
    )


def test_without_limits_there_is_no_goodput() -> None:
    summary = summarize(closed_loop(60, 4))
    assert summary["request_goodput"].value is None
    assert summary["good_share"].value is None
    assert summary.slo == {}


def unknown(found: dict[str, Any]) -> set[str]:
    return {name for name in UNITS if found[name] is None}


def test_percentiles_of_too_few_samples_are_unknown_and_so_are_intervals_of_few_requests() -> None:
    found = summarize(closed_loop(9, 2)).as_json()
    latencies = ("ttft", "tpot", "e2el")
    assert {f"{name}_{latency}_ms" for name in ("median", "p50", "p90", "p95", "p99") for latency in latencies} <= (
        unknown(found)
    )
    assert found["mean_ttft_ms"] is not None
    assert found["p90_itl_ms"] is not None, "gaps are many"
    assert found["mean_ttft_ms_interval"] is found["p90_itl_ms_interval"] is None


def test_p99_needs_500_answers() -> None:
    assert summarize(closed_loop(499, 4))["p99_ttft_ms"].value is None
    assert summarize(closed_loop(500, 4))["p99_ttft_ms"].value is not None


def test_a_run_without_answers_has_counts_alone() -> None:
    run = Run(header(duration_s=2.0), closed_loop(3, 1, failing=1).records)
    found = summarize(run, slo=SLO(ttft_ms=1)).as_json()
    assert found["completed"] == 0
    assert found["failed"] == 3
    assert found["request_throughput"] == 0
    assert found["mean_ttft_ms"] is found["paper_throughput"] is found["effective_throughput_4"] is None
    assert summarize(Run(header(duration_s=0.0), ())).as_json()["request_throughput"] is None


def test_an_open_loop_has_no_throughput_of_clients() -> None:
    records = tuple(replace(one, client=None) for one in closed_loop(40, 4).records)
    summary = summarize(Run(header(duration_s=30.0), records))
    assert summary["paper_throughput"].value is None
    assert summary["paper_latency_s"].value is not None


def test_what_ran_and_whether_it_counts_stand_in_the_summary() -> None:
    run = closed_loop(20, 2)
    marked = Run(replace(run.header, invalid="late", interrupted=True), run.records)
    found = summarize(marked).as_json()
    assert (found["invalid"], found["interrupted"], found["source"]) == ("late", True, "fastgen")
    assert found["workload"] == {"name": "drawn"}


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        summarize(closed_loop(2, 1))["p42_ttft_ms"]
