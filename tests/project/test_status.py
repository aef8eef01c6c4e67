"""docs/status.md says what the recorded measurements say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jinja2
import pytest

from benchmarks.result_files import RESULTS
from tests.benchmarks.test_cpu_report import turn
from tests.benchmarks.test_serving_benchmark import a_round
from tools.status import (
    PAGE,
    README,
    doubts,
    gpu_goals,
    headline,
    keeps_goals,
    more_bytes,
    newest,
    newest_of_each_model,
    render,
    with_rows,
)


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == render(), "run `python -m tools.status`"


def test_the_readme_says_what_the_results_say() -> None:
    text, rows = README.read_text(), render(template="readme_rows.md.j2")
    assert with_rows(text, rows) == text, "run `python -m tools.status`"
    assert headline(newest_of_each_model(RESULTS)) in rows
    long = [row for row in rows.splitlines() if row and len(row.split("|")[2].split()) > 65]
    assert not long, "the README's cells are read at a glance; the rest belongs into docs/status.md"
    with pytest.raises(ValueError, match="0 rows"):
        with_rows("# fastgen\n", rows)
    table = "| a | b |\n| Lab | {} |\n| Labs | c |"
    assert with_rows(table.format("old"), "| Lab | new |") == table.format("new")


def test_a_load_keeps_its_goals_of_accuracy_where_each_figure_does() -> None:
    good = {"mean_tpot_ms": 0.05, "mean_e2el_ms": 0.05, "p50_ttft_ms": 0.1}
    assert keeps_goals({"error": good})
    assert keeps_goals({"error": good | {"p99_ttft_ms": 0.15, "p50_itl_ms": 9.0}})
    for figure in (*good, "p99_ttft_ms"):
        assert not keeps_goals({"error": good | {figure: 0.151}})


def test_bytes_of_other_engines_are_beside_ours() -> None:
    assert sorted(map(round, more_bytes("llama-110m"))) == [11, 15, 15], "llama.cpp, and OpenVINO with either precision"


def test_the_readme_quotes_the_least_favourable_ratio_or_none() -> None:
    cpu = {
        "about": {"machine": "a CPU", "threads": 2, "kernel": "6"}, "engines": {}, "samples": [], "steps": [],
        "turns": [turn("llama.cpp", each, 100) for each in (130, 140, 150, 160, 170)],
    }  # fmt: skip
    none = "no comparison with OpenVINO, llama.cpp, vLLM has 6 steady turns yet, on a CPU with 2 threads"
    assert headline([cpu]) == f"{none}; 1 of the required speeds look missed, and have too few turns for a figure"
    assert doubts(cpu) == ["llama-110m, int8: one stream (W1), floor 1.6"]
    cpu["turns"] += [turn("llama.cpp", 180, 100)]
    cpu["turns"] += [turn("openvino-genai", 170, 100) | {"workload": "W4"} for _ in range(6)]
    assert headline([cpu]) == (
        "at least 1.00 times the best other engine run beside it, on a CPU with 2 threads, in the 2 of 16"
        " comparisons with enough steady turns (least: llama-110m, int8, sixteen streams, openvino-genai)."
        " Of the speeds required beside other engines, 2 are missed"
    )
    without = cpu | {"turns": [turn("llama.cpp", 90, 100) | {"model": "llama-1.1b"}]}
    assert " comparisons with enough steady turns, all of llama-110m (least: llama-110m, int8" in headline(
        [cpu, without]
    )
    older = cpu | {
        "about": cpu["about"] | {"machine": "an older CPU"},
        "turns": [turn("llama.cpp", 90, 100) | {"model": "llama-1.1b"} for _ in range(6)],
    }
    assert headline([cpu, older]) == (
        "at least 0.90 times the best other engine run beside it, on an older CPU with 2 threads, in the 3 of 32"
        " comparisons with enough steady turns (least: llama-1.1b, int8, one stream, llama.cpp)."
        " Of the speeds required beside other engines, 3 are missed"
    )


def test_a_model_is_of_the_newest_file_that_has_it(tmp_path: Path) -> None:
    old = {"about": {}, "engines": {}, "samples": [], "steps": [], "turns": [turn("llama.cpp", 130, 100)]}
    old["turns"] += [each | {"model": "llama-1.1b"} for each in old["turns"]]
    new = old | {"turns": [turn("llama.cpp", 140, 100)]}
    for day, data in (("2999-01-01", old), ("2999-01-02", new), ("2999-01-01_2", new)):
        (tmp_path / f"cpu_models_{day}.json").write_text(json.dumps(data))
    newest_file, older = newest_of_each_model(tmp_path)
    assert newest_file["turns"] == new["turns"]
    assert older["turns"] == old["turns"][1:]
    assert "cpu_models_2999-01-01.json" in older["link"]


def test_goals_of_a_gpu_are_judged_by_the_newest_measurement_of_each_part(tmp_path: Path) -> None:
    idle, batch = {"case": "batch 1, x", "idle_seconds": 1e-5}, {"case": "batch 1, x", "seconds": 4e-3}
    files = {"1": {"decode": {"rows": [batch, idle]}, "splitfuse": {"rows": [{"requests_per_s": 11.5}]}},
             "2": {"decode": {"rows": [batch | {"seconds": 3.6e-3}]}}}  # fmt: skip
    for name, parts in files.items():
        about = {"about": {"device": "NVIDIA H200"}, "parts": parts}
        (tmp_path / f"gpu_h200_{name}.json").write_text(json.dumps(about))
    (tmp_path / "gpu_h200_variants.json").write_text("{}")
    found = {line.goal.name: line for line in gpu_goals(tmp_path, "gpu_h200")["lines"]}
    assert found["7B step, batch 1"].measured == pytest.approx(3.6)
    assert found["7B step, batch 1"].state == found["SplitFuse 2600/60"].state == "floor"
    assert found["idle between steps"].state == "not measured"


def test_what_http_costs_is_shown_for_short_and_long_requests_once_it_is_measured(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    entry = {"model": "tiny-llama", "requests": 500, "rounds": [a_round(each) for each in (99, 98, 97, 96, 95, 94)]}
    few = {**entry, "rounds": entry["rounds"][:5]}
    kinds = {"short": (16, 16, few), "long": (64, 128, entry)}
    models = [
        {"kind": kind, "num_prompt": prompt, "num_answer": answer, **measured}
        for kind, (prompt, answer, measured) in kinds.items()
    ]
    about = {"machine": {"processor": "a CPU", "cores": 2}, "commit": "abc"}
    (tmp_path / "serving_http_2999-01-01.json").write_text(json.dumps({**about, "models": models}))
    page = render(tmp_path)
    assert "| tiny-llama | long, 500 | 64, 128 | 3.5 % (1.0 to 6.0, 6 rounds) |" in page
    assert "| tiny-llama | short, 500 | 16, 16 | – (5 of 5 rounds steady, build abc) |" in page
    assert "a CPU,\n2 cores, commit abc" in page


def test_a_newer_measurement_changes_the_page(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    kills = newest(RESULTS, "serving_storm")
    kills["kills"]["kills"] = 12_345
    (tmp_path / "serving_storm_2999-01-01.json").write_text(json.dumps(kills))
    page = render(tmp_path)
    assert "The engine was killed 12345 times" in page
    assert "serving_storm_2999-01-01.json" in page


def test_a_figure_that_was_not_measured_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    soak = newest(RESULTS, "soak")
    del soak["date"]
    (tmp_path / "soak_2999-01-01.json").write_text(json.dumps(soak))
    with pytest.raises(jinja2.UndefinedError, match="date"):
        render(tmp_path)


def test_token_gaps_are_medians_over_rounds_of_the_newest_measurements(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    gaps = newest(RESULTS, "token_gaps")
    free, bounded = gaps["runs"][:2]
    bounded["itl_target_ms"] = 40.0
    shares = (0.9, 1.25, 0.8)
    runs = [each for share in shares for each in (free, bounded | {"p99_ms": 40 * share, "p99_of_target": share})]
    measured = gaps | {"date": "2999-01-02", "commit": "abc1234", "runs": runs}
    (tmp_path / "token_gaps_2999-01-02.json").write_text(json.dumps(measured))
    page, row = render(tmp_path), render(tmp_path, "readme_rows.md.j2").splitlines()[0]
    assert "| 40 | quiet | 3 | 36.0 (32.0 to 50.0) | 0.90 (0.80 to 1.25) |" in page
    assert "| none | quiet | 3 |" in page
    assert "It was missed in 1 of 3 runs." in page
    assert "2999-01-02, commit abc1234: [token_gaps_2999-01-02]" in page
    assert "| busy |" not in page, "an older one is not compared"
    assert "at most 1.25 times the bound, and exceeds it in 1 of 3 runs" in row
    busy = measured | {"runs": [bounded | {"p99_ms": 52.0, "p99_of_target": 1.3}]}
    (tmp_path / "token_gaps_busy_machine_2999-01-02.json").write_text(json.dumps(busy))
    assert "| 40 | busy | 1 | 52.0 | 1.30 |" in render(tmp_path)
    assert "at most 1.30 times the bound, and exceeds it in 2 of 4 runs" in render(tmp_path, "readme_rows.md.j2")


def test_files_of_another_kind_are_not_taken() -> None:
    assert "serving_20" in newest(RESULTS, "serving")["link"]
    assert "token_gaps_20" in newest(RESULTS, "token_gaps")["link"]
