"""The comparison of tools that measure one server in turns, on small files of each."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import tools_in_turns as tools
from fastgen.lab.metrics.figures import Figure
from fastgen.lab.records import Run, write_run
from tests.lab.runs import closed_loop

DATA = Path(__file__).parents[1] / "lab" / "data"


def test_each_tools_file_gives_latencies_of_requests(tmp_path: Path) -> None:
    run = closed_loop(40, 4)
    together = replace(run.records[0], token_times_s=(1.0, 2.0, 2.0, 4.0), sent_s=0.5, ended_s=4.5)
    write_run(Run(run.header, (together, *run.records[1:])), tmp_path / "run.jsonl")
    summary, ours = tools.measured(tmp_path)
    assert summary.source == "fastgen"
    assert (ours["ttft"][0], ours["tpot"][0], ours["e2el"][0]) == ([500.0], [1000.0], [4000.0])
    assert (ours["itl"][0], ours["chunk"][0]) == ([1000.0, 0.0, 2000.0], [1000.0, 2000.0])
    for name in ("vllm_bench_detailed", "guidellm"):
        directory = tmp_path / name
        directory.mkdir()
        shutil.copy(DATA / f"{name}.json", directory)
        summary, theirs = tools.measured(directory)
        figures = tools.figures_of(theirs)
        assert len(theirs["ttft"]) == len(theirs["e2el"]) == summary["completed"].value
        for latency in ("ttft", "e2el"):
            assert figures[f"mean_{latency}_ms"].value == pytest.approx(summary[f"mean_{latency}_ms"].value, rel=1e-3)


def turn(mine: float, theirs: float, invalid: str | None = None) -> dict[str, Any]:
    figures = {"mean_ttft_ms": mine}, {"mean_ttft_ms": theirs}
    return {
        tool: {"invalid": invalid, "figures": {name: [value, None] for name, value in each.items()}}
        for tool, each in zip(("fastgen", "other"), figures, strict=True)
    }


def test_differences_are_means_over_turns_with_an_interval() -> None:
    turns = [turn(10.0, 11.0), turn(10.0, 12.0), turn(10.0, 10.0), turn(10.0, 99.0, invalid="late")]
    found = tools.compared(turns, "other")["mean_ttft_ms"]
    assert (found["turns"], found["ours"], found["theirs"], found["difference"]) == (3, 10.0, 11.0, 0.1)
    # The standard deviation is 0.1, and t of two degrees of freedom 4.303.
    low, high = found["difference_interval"]
    assert (low, high) == (pytest.approx(0.1 - 0.2484, abs=1e-3), pytest.approx(0.1 + 0.2484, abs=1e-3))
    assert found["theirs_interval"] == pytest.approx([11.0 - 2.484, 11.0 + 2.484], abs=1e-2)
    assert found["intervals_overlap"]
    assert "agree" in tools.text({"other": {"mean_ttft_ms": found}})
    apart = tools.compared([turn(10.0, 11.0), turn(10.1, 11.1), turn(9.9, 10.9)], "other")["mean_ttft_ms"]
    assert not apart["intervals_overlap"]
    assert "differ" in tools.text({"other": {"mean_ttft_ms": apart}})
    single = tools.compared([turn(10.0, 11.0)], "other")["mean_ttft_ms"]
    assert (single["difference"], single["difference_interval"], single["intervals_overlap"]) == (0.1, None, None)
    json.dumps(found)


def test_numbers_of_numpy_are_written_as_plain_ones() -> None:
    assert tools.plain(Figure(None)) == [None, None]
    assert tools.plain(Figure(1.0, (0.5, 2.0))) == [1.0, [0.5, 2.0]]
