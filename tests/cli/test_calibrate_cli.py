"""``fastgen calibrate``: a model's steps or a recorded flight's become a file, by which ``fastgen why`` expects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fastgen
from fastgen.lab.devices.calibration import read_calibration
from tests.cli.conftest import Run


@pytest.mark.slow
def test_a_real_engine_is_calibrated_from_the_command_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    done = run("calibrate", "tiny-llama", "--seconds", "2", "--max-num-seqs", "8", "--output", str(path))
    assert done.status == 0, done.err
    assert "steps of tiny-llama" in done.out
    found = read_calibration(path)
    assert found.model == "tiny-llama"
    assert found.engine["max_num_seqs"] == 8
    assert found.cost.matrices_s(1) > 0
    assert {"processor", "cores"} <= set(found.machine)


def test_a_recording_is_calibrated_from_the_command_line_and_why_expects_by_it(run: Run, tmp_path: Path) -> None:
    flight, cost = tmp_path / "flight.jsonl", tmp_path / "cost.json"
    with fastgen.load("tiny-llama") as llm:
        llm.generate(["Once upon a time"] * 4, max_new_tokens=60, ignore_eos=True)
        llm.save_recording(flight)
    done = run("calibrate", "--recording", str(flight), "--output", str(cost), "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["num_steps"] == read_calibration(cost).num_steps
    explained = run("why", "0", "--recording", str(flight), "--cost", str(cost))
    assert "are expected of such steps" in explained.out
    facts = json.loads(run("why", "0", "--recording", str(flight), "--cost", str(cost), "--json").out)
    assert facts["expected_s"] > 0
    unwritten = run("calibrate", "--recording", str(flight), "--output", str(tmp_path / "none" / "cost.json"))
    assert (unwritten.status, "cannot be written" in unwritten.err) == (1, True)
    assert unwritten.out, "what was measured is not lost"


def test_wrong_usage_is_said_in_words(run: Run, tmp_path: Path) -> None:
    assert "give MODEL, or --recording FILE" in run("calibrate").err
    assert "give MODEL, or --recording FILE" in run("calibrate", "tiny-llama", "--recording", "x").err
    refused = run("calibrate", "--recording", str(tmp_path / "none"), "--max-num-seqs", "4")
    assert refused.status != 0
