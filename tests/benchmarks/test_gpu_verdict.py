"""The verdict of the GPU benchmark: goals of an H200 beside what was measured, and an exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.part import PARTS
from benchmarks.gpu.verdict import GOALS, H200, MISSED, PASSED, UNMEASURED, lines, verdict

LIMITS = {"copy_bytes_per_s": H200.copy_bytes_per_s, "gemm_flops_per_s": H200.gemm_flops_per_s}


def good() -> dict[str, dict[str, Any]]:
    """Results that reach every goal."""
    rows: dict[str, list[dict[str, Any]]] = {
        "attention": [
            {"case": "numeric gate, blocks of 64", "difference": 0.3},
            {"case": "1 × 0 cached + 4096 new, blocks of 64", "flops_per_s": 6.0e14},
            {"case": "1 × 0 cached + 4096 new, blocks of 64, 128 × 32", "flops_per_s": 6.4e14},
            {"case": "32 × 4095 cached + 1 new, blocks of 64", "bytes_per_s": 1.0, "fraction_of_copy": 0.91}
            | {"kv_bytes": 5.4e8},
            {
                "case": "1 × 15 cached + 1 new, blocks of 64",
                "bytes_per_s": 1.0,
                "fraction_of_copy": 0.1,
                "kv_bytes": 6e4,
            },
        ],
        "elementwise": [
            {"case": "numeric gate, norm", "difference": 0.1},
            {"case": "norm × 2048", "fraction_of_copy": 0.93},
            {"case": "norm × 1", "fraction_of_copy": 0.01},
        ],
        "decode": [
            {"case": "capture", "seconds_per_graph": 0.012},
            {"case": "batch 1, context 512", "seconds": 0.0034, "idle_seconds": 1e-5},
            {"case": "batch 32, context 1024", "seconds": 0.0079, "idle_seconds": 1.9e-5},
            {"case": "batch 256, context 512", "seconds": 0.0230, "idle_seconds": 1e-5},
        ],
        "splitfuse": [{"case": "10 s", "requests_per_s": 9.0}, {"case": "20 s", "requests_per_s": 12.6}],
        "start": [{"case": "cold", "seconds": 90.0}, {"case": "warm", "seconds": 7.0}],
        "transformers": [{"case": "transformers over fastgen", "ratio": 4.5}],
    }
    return {name: {"limits": LIMITS, "seconds": 1.0, "rows": rows.get(name, [])} for name in PARTS}


def states(parts: dict[str, dict[str, Any]], device: str = "NVIDIA H200") -> dict[str, str]:
    return {line.goal.name: line.state for line in lines(parts, device)}


def test_all_goals_reached() -> None:
    assert set(states(good()).values()) == {"goal"}
    text, status = verdict(good(), "NVIDIA H200", wanted=list(PARTS))
    assert status == PASSED
    assert text.splitlines()[0].split() == ["floor", "goal", "measured"]
    assert "7B step, batch 1" in text
    assert "3.4 ms" in text


def test_every_goal_belongs_to_a_part_and_lies_beyond_its_floor() -> None:
    for goal in GOALS:
        assert goal.part in PARTS
        assert goal.goal <= goal.floor if goal.less_is_better else goal.goal >= goal.floor


def test_between_floor_and_goal_and_below() -> None:
    parts = good()
    parts["decode"]["rows"][1]["seconds"] = 0.0036
    parts["splitfuse"]["rows"][1]["requests_per_s"] = 10.9
    found = states(parts)
    assert found["7B step, batch 1"] == "floor"
    assert found["SplitFuse 2600/60"] == "MISSED"
    assert verdict(parts, "NVIDIA H200", wanted=list(PARTS))[1] == MISSED


def test_what_failed_fails_the_verdict_and_is_named() -> None:
    parts = good()
    parts["tests"]["rows"] = [{"case": "test_attention", "error": "failed: differs"}]
    text, status = verdict(parts, "NVIDIA H200", wanted=list(PARTS))
    assert status == MISSED
    assert "tests: test_attention: failed: differs" in text
    parts = good()
    parts["moe"] = {"rows": [], "ended": "with status -9", "seconds": 1.0}
    assert verdict(parts, "NVIDIA H200", wanted=list(PARTS))[1] == MISSED


@pytest.mark.parametrize("missing", ["a row", "a part", "time", "an extra"])
def test_what_was_not_measured_is_neither_good_nor_bad(missing: str) -> None:
    parts = good()
    if missing == "a row":
        parts["decode"]["rows"][3] = {"case": "batch 256, context 512", "left_out": "it does not fit"}
    elif missing == "a part":
        del parts["start"]
    elif missing == "time":
        parts["linear"]["ended"] = "by the time limit"
    else:
        parts["http"]["rows"] = [{"case": "all of it", "left_out": "serving needs the package fastapi"}]
    text, status = verdict(parts, "NVIDIA H200", wanted=list(PARTS))
    assert status == UNMEASURED
    assert ("serving needs the package fastapi" in text) == (missing == "an extra")
    wanted = [name for name in PARTS if name not in ("start", "linear", "http", "decode")]
    assert verdict(parts, "NVIDIA H200", wanted=wanted)[1] == PASSED


def test_on_another_gpu_goals_are_scaled_by_what_limits_them() -> None:
    slower = {"copy_bytes_per_s": H200.copy_bytes_per_s / 2, "gemm_flops_per_s": H200.gemm_flops_per_s * 0.9}
    parts = {name: part | {"limits": slower} for name, part in good().items()}
    found = {line.goal.name: (line.floor, line.target) for line in lines(parts, "NVIDIA H100 PCIe")}
    assert found["7B step, batch 1"] == pytest.approx((7.4, 6.9))
    assert found["attention, prefill of 4096 and more"] == pytest.approx((405, 567))
    assert found["attention, decode, 64 MiB and more"] == (0.80, 0.90)
    assert found["idle between steps"] == (50, 20)
    assert {line.floor for line in lines(parts, "NVIDIA H200") if line.goal.name == "7B step, batch 1"} == {3.70}
    assert "scaled to NVIDIA H100 PCIe" in verdict(parts, "NVIDIA H100 PCIe", wanted=["decode"])[0]


def test_results_of_several_calls_are_judged_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, files = good(), [tmp_path / "one.json", tmp_path / "two.json"]
    about = {"device": "NVIDIA H200"}
    files[0].write_text(json.dumps({"about": about, "parts": {name: parts[name] for name in list(PARTS)[:5]}}))
    files[1].write_text(json.dumps({"about": about, "parts": {name: parts[name] for name in list(PARTS)[5:]}}))
    assert command.main(["--judge", str(files[0])]) == UNMEASURED
    assert command.main(["--judge", *map(str, files)]) == PASSED
    assert "transformers over fastgen" in capsys.readouterr().out


def test_a_part_gets_its_share_of_the_time_and_what_others_do_not_need() -> None:
    wanted = ["tests", "decode", "moe"]
    seconds = {name: PARTS[name][1] for name in wanted}
    assert command.share("tests", wanted, sum(seconds.values()) + 100) == seconds["tests"] + 100
    assert command.share("tests", wanted, sum(seconds.values()) / 2) == pytest.approx(seconds["tests"] / 2)
    assert command.share("moe", wanted, 500.0) == 500.0
