"""Reproductions run at small size, their arithmetic is the posts', and the page is what the results say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError, RecordingError
from fastgen.lab.metrics.means import mean_interval
from fastgen.lab.paper.falcon import AWS
from fastgen.lab.paper.llama2 import latency_at, throughput_at
from fastgen.lab.paper.registry import REPRODUCTIONS, reproduction
from fastgen.lab.paper.replicas import ratios
from fastgen.lab.paper.reproduction import Setting, read_result, write_pictures, write_result
from tests.fast import cases
from tools import reproductions

SMALL = Setting(small=True, model="tiny-llama")
# What each section must show, whatever the figures are.
SHOWN = {
    "insights": ["here (tiny-llama)", "4 × A100", "50% and 50%"],
    "llama2": ["| 1.36 | 0.67 |", "`splitfuse`", "gaps P50 / P90 / P95"],
    "replicas": ["| 1 | 1.46 |", "times one replica"],
    "falcon": ["= 160 GB", "83% of 24 GB", "56.04 (4.74)"],
    "chats": ["= 3584", "= 313 blocks", "3584 / 313 = 11", "(8192 / 16) = 7"],
    "policies": ["`prefill_first`", "`orca`", "tiny-llama"],
}


@pytest.mark.parametrize("name", cases(SHOWN, fast=("insights", "falcon", "chats")))
def test_a_reproduction_runs_at_small_size(name: str, tmp_path: Path) -> None:
    found = REPRODUCTIONS[name]
    write_result(found, found.run(SMALL), tmp_path / "result.json")
    kept = read_result(tmp_path / "result.json")
    section = found.section(kept["result"])
    assert [text for text in SHOWN[name] if text not in section] == []
    assert {"processor", "cores", "fastgen"} <= kept["machine"].keys()
    written = write_pictures(found, kept["result"], tmp_path)
    assert written
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


@pytest.mark.slow
def test_simulated_figures_are_the_same_on_every_machine() -> None:
    first, second = (json.dumps(REPRODUCTIONS["replicas"].run(SMALL)) for _ in range(2))
    assert first == second


def kept_result(name: str) -> Any:
    return read_result(reproductions.newest(REPRODUCTIONS[name]))["result"]


def test_the_page_is_what_the_newest_results_say() -> None:
    assert reproductions.PAGE.read_text() == reproductions.page(), "run python -m tools.reproductions"


def test_the_posts_numbers_of_chats_come_out_of_the_scheduler() -> None:
    """The post: with 10 chats none waits, with 12 one, with 14 about two; with reservation 7 run."""
    runs = {(run["chats"], run["reserves_context"]): run for run in kept_result("chats")["runs"]}
    on_demand = {chats: run for (chats, reserves), run in runs.items() if not reserves}
    assert [on_demand[chats]["preemptions"] > 0 for chats in (10, 12, 14)] == [False, True, True]
    assert on_demand[10]["most_waiting"] == 0
    assert on_demand[12]["most_waiting"] == 1
    assert 1.5 < on_demand[14]["mean_waiting_when_full"] < 2.5
    assert [runs[chats, True]["most_running"] for chats in (10, 12, 14)] == [7, 7, 7]


def test_the_papers_order_of_policies_comes_out_of_the_scheduler() -> None:
    found = {(curve["shape"], curve["policy"]): curve["points"] for curve in kept_result("llama2")["curves"]}
    for shape in {shape for shape, _ in found}:
        best = {
            policy: max(point["effective_throughput_4"][0] for point in found[shape, policy])
            for policy in ("splitfuse", "prefill_first")
        }
        assert best["splitfuse"] > best["prefill_first"], shape
    at_16 = {
        policy: next(point for point in found["70b_2600_128", policy] if point["clients"] == 16)
        for policy in ("splitfuse", "prefill_first")
    }
    p50, p95 = (
        [at_16[policy][f"paper_p{rank}_gap_ms"][0] for policy in ("splitfuse", "prefill_first")] for rank in (50, 95)
    )
    assert p50[1] == pytest.approx(p50[0], rel=0.02)
    assert 3 < p95[1] / p95[0] < 4.5


def test_replicas_scale_in_proportion() -> None:
    points = {point["replicas"]: point["request_throughput"][0] for point in kept_result("replicas")["points"]}
    assert points[16] / points[1] == pytest.approx(16, rel=0.05)


def test_sixteen_replicas_have_the_goodput_of_sixteen() -> None:
    mean, low, _ = mean_interval(ratios(kept_result("replicas")))
    assert mean > 15.5
    assert low > 15.5


def test_figures_at_a_latency_lie_between_the_points_around_it() -> None:
    points = [
        {"paper_latency_s": [latency_s], "paper_throughput": [throughput]}
        for latency_s, throughput in ((2.0, 1.0), (8.0, 1.2), (10.0, 1.4), (20.0, 1.3))
    ]
    assert throughput_at(points, 9.0) == pytest.approx(1.3)
    assert latency_at(points, 1.1) == pytest.approx(5.0)
    assert throughput_at(points, 30.0) is None
    assert latency_at(points, 2.0) is None


def test_the_published_figures_are_those_of_the_post() -> None:
    assert AWS["32/128"] == {"dynamic": (5.53, 58.34), "continuous": (56.04, 4.74), "paged": (59.18, 4.76)}
    assert AWS["256/32"] == {"dynamic": (19.96, 59.31), "continuous": (46.69, 3.88), "paged": (44.75, 2.67)}


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="'figure4': expected one of insights, llama2"):
        reproduction("figure4")
    with pytest.raises(InvalidArgumentError, match="name its directory, or a built-in, with --model"):
        REPRODUCTIONS["policies"].run(Setting(small=True))
    with pytest.raises(RecordingError, match="the result cannot be written: No such file"):
        write_result(REPRODUCTIONS["chats"], {}, tmp_path / "missing" / "result.json")
