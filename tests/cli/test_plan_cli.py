"""``fastgen plan``: from flags to an answer, for people and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fastgen.lab.devices.calibration import Calibration, write_calibration
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.runtime.step_cost.cost import StepCost


def test_a_plan_for_people(run) -> None:
    out = run(
        *("plan", "mistral-7b-v0.2", "--device", "rtx-4090", "--devices", "1", "--prompt", "300", "--answer", "100"),
        *("--token-budget", "512", "--slo", "ttft:1000,tpot:40", "--no-simulate"),
    ).out
    for title in ("answer", "arrangements", "memory of each device", "memory, line by line", "time, line by line"):
        assert f"\n{title}" in out, title
    assert "1,008 GB/s over 14.2 GB = 71 tokens/s" in out
    assert "99% of the answers keep ttft_ms=1000, tpot_ms=40" in out


def test_the_same_as_json(run) -> None:
    out = run(
        *(
            "plan",
            str(BUILTINS["tiny-llama"]),
            "--device",
            "H100",
            "--devices",
            "1",
            "--prompt",
            "30",
            "--answer",
            "10",
        ),
        *("--token-budget", "128", "--clients", "3", "--json"),
    ).out
    found = json.loads(out)
    assert found["chosen"]["clients"] == 3
    assert found["chosen"]["simulated"]["completed"] == 200
    assert found["device"] == "H100"


def test_the_post_about_blocks(run) -> None:
    out = run("plan", "--preset", "mistral-7b-24gb", "--token-budget", "512", "--no-simulate").out
    assert "blocks: 7 x 1024 MiB / 2 MiB = 3584\n" in out
    assert "a chat: 10 turns x (150 + 350) = 5000 tokens = 313 blocks\n" in out
    assert "chats at once: 3584 / 313 = 11\n" in out
    assert "with the whole context reserved: 3584 / (8192 / 16) = 7\n" in out
    assert "a request: 4650 + 350 = 5000 tokens = 313 blocks\n" in out


def test_the_post_about_falcon(run) -> None:
    found = json.loads(run("plan", "--preset", "falcon-40b-4x24gb", "--no-simulate", "--json").out)
    assert found["preset"]["weights_gb"] == [160, 80]
    assert found["preset"]["used"] == pytest.approx([0.833, 0.854], abs=0.001)
    (offer,) = found["offers"]
    assert offer["tensor_parallel"] == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("llama-2-70b", "--device", "B200"), "--device 'B200': expected one of A100-80"),
        (("llama-2-70b", "--device", "H100", "--tensor-parallel", "3"), "64 heads cannot be split evenly; .* 1, 2, 4"),
        (("llama-2-70b", "--device", "H100", "--slo", "speed:3"), "SLO 'speed:3'"),
        (("llama-2-70b", "--device", "H100", "--kv-dtype", "int2"), "--kv-dtype int2: expected one of float32"),
        (("llama-2-70b", "--device", "H100", "--efficiency", "memory=2"), "efficiency 'memory=2'"),
        (("llama-2-70b", "--device", "H100", "--rate", "0"), "rate=0.0: expected a number above 0"),
        (("llama-2-70b", "--device", "H100", "--quantize", "int3"), "--quantize 'int3'"),
        (("gpt-5", "--device", "H100"), "'gpt-5' is no config.json"),
        (("--preset", "x"), "preset 'x'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(run, flags: tuple[str, ...], message: str) -> None:
    done = run("plan", *flags)
    assert done.status == 1
    assert re.search(message, done.err), done.err
    assert done.err.count("\n") == 1


def test_a_model_and_a_device_are_needed(run) -> None:
    done = run("plan", "llama-2-70b")
    assert done.status == 2
    assert "give MODEL and --device, or --preset" in done.err


def test_a_cpu_needs_a_measurement(run, tmp_path: Path) -> None:
    flags = ("plan", "tiny-llama", "--device", "cpu", "--devices", "1", "--prompt", "100", "--answer", "20")
    assert "cpu has no datasheet: measure" in run(*flags).err
    calibration = Calibration(
        model="tiny-llama",
        made="2026-11-23T12:00:00+00:00",
        machine={},
        engine={"token_budget": 300},
        num_steps=100,
        cost=StepCost.linear(0.001, 0.0001),
        residuals={},
        step_gap_s=0.0,
    )
    write_calibration(calibration, tmp_path / "cpu.json")
    found = json.loads(run(*flags, "--calibration", str(tmp_path / "cpu.json"), "--clients", "1", "--json").out)
    # A prompt of about 100 tokens, 11 ms, and 19 tokens more of 1.1 ms each.
    assert found["chosen"]["expected"]["e2el_s"] == pytest.approx(0.011 + 19 * 0.0011, rel=0.05)
    assert found["chosen"]["simulated"]["mean_tpot_ms"] == pytest.approx(1.1, rel=0.05)
    assert found["chosen"]["token_budget"] <= 300
    assert "cannot be read" in run(*flags, "--calibration", str(tmp_path / "none.json")).err


def test_heads_that_fit_no_gpu_are_refused_in_one_sentence(run, tmp_path: Path) -> None:
    config = json.loads((BUILTINS["tiny-llama"] / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 600}), encoding="utf-8")
    failed = run("plan", str(tmp_path), "--device", "H100", "--prompt", "30", "--answer", "10", "--no-simulate")
    assert failed.status == 1
    assert "heads have 600 features, and on a GPU at most 576 fit" in failed.err
