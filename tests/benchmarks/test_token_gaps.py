"""The benchmark of token gaps runs; what it finds is a machine's business, and is not judged here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import token_gaps
from benchmarks.token_gaps import run
from tests.runtime.checkpoints import save_checkpoint


def test_a_prompt_is_computed_beside_streams_under_a_bound(tmp_path: Path) -> None:
    figures = run(
        save_checkpoint("llama", tmp_path),
        itl_target_ms=1.0,
        num_streams=3,
        num_prompt=90,
        token_budget=16,
        target="torch",
    )
    assert figures["prompt_tokens"] == 90
    # With 3 decodes a step of 16 tokens has places for 13 of the prompt, and one of 4, the smallest, for a single one.
    assert 3 * 7 <= figures["num_gaps"] <= 3 * 92
    assert figures["stolen_s"] is None or 0 <= figures["stolen_s"] <= figures["prompt_s"] * (os.cpu_count() or 1) + 0.1
    assert figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]


def test_targets_take_turns_and_every_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: str, *, itl_target_ms: float | None, **options: Any) -> dict[str, Any]:
        return {"itl_target_ms": itl_target_ms}

    monkeypatch.setattr(token_gaps, "run", run)
    file = tmp_path / "found.json"
    command = ["token_gaps", "--model", "m", "--targets", "20", "30", "--rounds", "2", "--output", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    token_gaps.main()
    found = json.loads(file.read_text())
    assert [(each["round"], each["itl_target_ms"]) for each in found["runs"]] == [
        (number, target) for number in (1, 2) for target in (None, 20.0, 30.0)
    ]
    assert {"date", "commit", "machine", "model", "runs"} == found.keys()
    assert {"processor", "cores"} <= found["machine"].keys()
