"""The benchmark of token gaps runs; what it finds is a machine's business, and is not judged here."""

from __future__ import annotations

from pathlib import Path

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
    assert figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
