"""The numeric gate, and an engine in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from benchmarks.cpu import models, workloads
from benchmarks.cpu.engine_process import EngineError, EngineProcess
from benchmarks.cpu.engines import fastgen_llm
from benchmarks.cpu.engines.protocol import Settings
from benchmarks.cpu.gate import MOST_BELOW, Gate, GateError
from benchmarks.cpu.whole_model import find_interpreters

SMALL = models.Shape(hidden=64, layers=2, heads=4, kv_heads=2, ffn=96, dtype=torch.float32)
REQUESTS = workloads.make(workloads.GATE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(models.config(SMALL)))
    save_file(models.weights(SMALL, seed=0), path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def greedy(model: Path) -> list[list[int]]:
    """Returns the model's answer, one token after the other and nothing cached."""
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    answers = []
    for request in REQUESTS:
        ids = list(request.prompt)
        for _ in range(request.num_new):
            with torch.inference_mode():
                ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(request.prompt) :])
    return answers


@pytest.mark.slow
def test_the_models_own_answer_passes(model: Path, greedy: list[list[int]]) -> None:
    assert Gate(model, 1).check(REQUESTS, greedy, "fp32") < 1e-4


@pytest.mark.parametrize("weight_format", ["fp32", "bf16", "int8", "int4"])
def test_a_planted_token_is_caught(model: Path, greedy: list[list[int]], weight_format: str) -> None:
    planted = [list(each) for each in greedy]
    planted[3][5] = (planted[3][5] + 1) % models.VOCAB_SIZE
    with pytest.raises(GateError, match=f"token 5 of request 3 is {planted[3][5]}, .* allowed in {weight_format}"):
        Gate(model, 1).check(REQUESTS, planted, weight_format)


def test_an_answer_to_another_prompt_is_caught(model: Path, greedy: list[list[int]]) -> None:
    turned = [greedy[-1], *greedy[:-1]]
    with pytest.raises(GateError, match="token 0 of request 0"):
        Gate(model, 1).check(REQUESTS, turned, "int4")


def test_an_answer_that_is_too_short_is_caught(model: Path, greedy: list[list[int]]) -> None:
    with pytest.raises(GateError, match="7, 8"):
        Gate(model, 1).check(REQUESTS, [*greedy[:3], greedy[3][:-1], greedy[4]], "fp32")


def test_less_precise_formats_are_allowed_more() -> None:
    assert sorted(MOST_BELOW, reverse=True) == sorted(MOST_BELOW, key=lambda bits: MOST_BELOW[bits])


@pytest.mark.slow  # test_same_answer compares the engine with itself and with transformers
def test_fastgen_passes(model: Path, greedy: list[list[int]]) -> None:
    engine = fastgen_llm.load(Settings(model, "fp32", 1))
    try:
        answers = engine.run(REQUESTS)
    finally:
        engine.close()
    Gate(model, 1).check(REQUESTS, [each.tokens for each in answers], "fp32")
    for answer in answers:
        assert len(answer.times) == len(answer.tokens)
        assert answer.times == sorted(answer.times)


@pytest.mark.slow
def test_an_engine_in_its_own_process(model: Path, greedy: list[list[int]], tmp_path: Path) -> None:
    with EngineProcess(sys.executable, "transformers", Settings(model, "fp32", 1), tmp_path / "log") as process:
        assert "transformers" in process.about["versions"]
        process.prepare(workloads.GATE)
        run = process.run(workloads.GATE)
    Gate(model, 1).check(REQUESTS, run.tokens, "fp32")
    assert [len(each) for each in run.times] == [each.num_new for each in REQUESTS]
    assert 0 < max(map(max, run.times)) <= run.seconds
    assert run.peak_bytes > 0


def test_an_engine_that_cannot_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nowhere"):
        EngineProcess(sys.executable, "fastgen", Settings(tmp_path / "nowhere", "fp32", 1), tmp_path / "log")


def test_engines_are_found_where_they_can_be_imported() -> None:
    found = find_interpreters([sys.executable])
    assert {found["fastgen"], found["transformers"], found["transformers batching"]} == {sys.executable}
