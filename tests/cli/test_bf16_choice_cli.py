"""The choice of kernels in bf16, from the first start of an engine to a sealed one. Measurements are invented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen.compile.backends.backend import Backend
from fastgen.compile.ops.linear import bf16_tuning
from fastgen.compile.ops.linear.bf16_tuning import DOTS, PROBLEM, WIDENED
from fastgen.runtime import loading
from tests.cli.conftest import Run
from tests.compile.test_bf16_tuning import HAS_CHOICE, no_clock, seconds

SIZES: dict[str, Any] = {"token_budget": 40, "max_num_seqs": 2, "kv_cache_memory": "1MiB", "num_threads": 1}


@pytest.fixture
def arches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The instruction sets of the engines that the test loads."""
    found: list[str] = []
    choose = loading.choose_backend

    def watched(*arguments: Any, **named: Any) -> Backend:
        backend = choose(*arguments, **named)
        found.append(backend.facts.arch)
        return backend

    monkeypatch.setattr(loading, "choose_backend", watched)
    return found


def log_probabilities(**arguments: Any) -> list[float]:
    with fastgen.load("tiny-llama", **SIZES, **arguments) as llm:
        (output,) = llm.generate([[5, 6, 7, 8] * 9], max_new_tokens=8, temperature=0, logprobs=1)
    assert output.logprobs is not None
    return [max(each.values()) for each in output.logprobs]


@pytest.mark.slow  # builds the kernels of a model twice
@HAS_CHOICE
def test_engines_follow_the_choice_and_sealed_ones_their_bundle(
    run: Run, arches: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FASTGEN_CPP_ARCH", raising=False)
    monkeypatch.delenv("FASTGEN_AUTOTUNE", raising=False)
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "kernels"))
    assert json.loads(run("info", "--json").out)["device"]["bf16"] == f"{DOTS} (not measured)"
    monkeypatch.setattr(bf16_tuning, "InTurns", lambda: seconds(1.0, 0.5))
    first = log_probabilities()
    monkeypatch.setattr(bf16_tuning, "InTurns", lambda: no_clock)
    assert log_probabilities() == first
    info = json.loads(run("info", "tiny-llama", "--json").out)
    assert info["device"]["bf16"] == f"{WIDENED} (measured: 2.00 times as fast as {DOTS})"
    assert PROBLEM in run("kernels", "tuned").out
    listed = json.loads(run("kernels", "list", "tiny-llama", "--json").out)
    products = {row["name"]: row["built"] for row in listed if row["op"] in ("linear", "attention")}
    assert len(products) == 2
    assert all(products.values())
    assert all(name.endswith(WIDENED) or f"_{WIDENED}_" in name for name in products)
    assert run("kernels", "build", "tiny-llama", "--output", str(tmp_path / "bundle")).status == 0
    # A cache that knows no choice: a sealed engine asks for none.
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "another"))
    assert log_probabilities(sealed=tmp_path / "bundle") == first
    assert arches == [WIDENED] * 3
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("FASTGEN_CPP_ARCH", DOTS)
    assert log_probabilities() != first, "rows are rounded to bf16"
    assert arches[-1] == DOTS
