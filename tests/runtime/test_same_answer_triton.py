"""The engine's promises with every Triton kernel interpreted: a request gets the tokens that the reference gives it,
alone, beside others, at two budgets and preempted; and a captured step is the step that the modules would make now.

Interpreted kernels are slow, so models and requests are as small as still shows something. Tokens are compared by the
margin rule of ``test_same_answer.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.compile.capture.tape import Tape
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.runtime.llm import LLM
from fastgen.runtime.step.forward import CapturedForward, Forward
from fastgen.runtime.step.step import Step
from tests.kernel_device import DEVICE
from tests.reference import randomise, save
from tests.runtime.checkpoints import small_cache
from tests.runtime.test_same_answer import num_certain_tokens, poison

VOCAB_SIZE = 40
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "windowed": ("Mistral", {"sliding_window": 5}),
    "layers of two kinds": ("Gemma2", {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": 5}),
    "experts": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "head_dim": 8}),
    "weights in 4 bits": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}
QUANTIZED = {"weights in 4 bits": "int4_weight_only"}
CASES = [pytest.param(name, marks=[] if name == "plain" else pytest.mark.slow) for name in FAMILIES]
LENGTHS = (13, 1, 6, 20)
PROMPTS = [[Random(f"{index}").randrange(VOCAB_SIZE) for _ in range(length)] for index, length in enumerate(LENGTHS)]
SAMPLINGS = [
    SamplingParams(max_new_tokens=count, temperature=temperature, seed=index, ignore_eos=True)
    for index, (count, temperature) in enumerate([(4, 0.0), (9, 0.8), (6, 0.0), (5, 1.3)])
]
BLOCK_SIZE = 4
SMALL_CACHE = 7 * BLOCK_SIZE  # tokens: the largest request takes them all
OPTIONS: dict[str, Any] = {
    "target": "triton",
    "device": DEVICE,
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 4,
    "dtype": "float32",
}


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def quantize(family: str) -> str | None:
    return QUANTIZED.get(family)


@pytest.fixture(scope="module")
def directory(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix, more = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | more))
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")._from_config(config, attn_implementation="eager")
    return save(randomise(model, seed=3), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def certain(directory: Path, quantize: str | None) -> list[list[int]]:
    """The tokens of each request by itself on the reference, up to the first that was won narrowly."""
    found = []
    with fastgen.load(directory, target="torch", dtype="float32", quantize=quantize) as llm:
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
            output = llm.generate(prompt, replace(sampling, logprobs=VOCAB_SIZE))
            found.append(output.token_ids[: num_certain_tokens(output, sampling)])
    num_tokens = sum(sampling.max_new_tokens for sampling in SAMPLINGS)
    assert sum(map(len, found)) > 0.9 * num_tokens, "margins are too small to prove anything"
    return found


def answers(llm: LLM, order: list[int]) -> list[GenerationOutput]:
    """Returns the answers to all requests, which arrive together in this order."""
    outputs = llm.generate([PROMPTS[index] for index in order], [SAMPLINGS[index] for index in order])
    return [outputs[order.index(index)] for index in range(len(order))]


def assert_same(certain: list[list[int]], outputs: list[GenerationOutput]) -> None:
    for index, (tokens, output) in enumerate(zip(certain, outputs, strict=True)):
        assert output.token_ids[: len(tokens)] == tokens, f"request {index}"
        assert len(output.token_ids) == SAMPLINGS[index].max_new_tokens


class Watched(CapturedForward):
    """Beside every replay computes the step by the modules, and looks whether they would record the same tape now."""

    def __init__(self, forward: CapturedForward):
        self.__dict__ |= forward.__dict__
        self.num_tokens: list[tuple[int, int]] = []
        self.num_empty_slots = self.num_padded_rows = 0

    def hidden(self, batch: RaggedBatch) -> Tensor:
        size = len(batch.input_ids)
        expected = Forward.hidden(self, batch).clone()  # the same keys and values are written twice
        found = super().hidden(batch)
        assert torch.equal(found, expected)
        self.assert_recorded_alike(self._forwards[size], lambda: self._forward_step(size))
        self.num_tokens.append((int(batch.cu_seqlens_q[-1]), size))
        self.num_empty_slots += int((batch.cu_seqlens_q.diff() == 0).sum())
        return found

    def logits(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        expected = Forward.logits(self, hidden, batch).clone()
        found = super().logits(hidden, batch)
        assert torch.equal(found, expected)
        if len(found):
            size = min(size for size in self._row_sizes if size >= len(found))
            self.assert_recorded_alike(self._heads[size], lambda: self._head_step(size))
            self.num_padded_rows += size - len(found)
        return found

    def assert_recorded_alike(self, tape: Any, step: Any) -> None:
        assert isinstance(tape, Tape)
        assert tape.difference(self._pool.record(tape.name, step)) is None


def watch(llm: LLM) -> Watched:
    assert llm._engine is not None
    forward = llm._engine.runner.forward
    assert isinstance(forward, CapturedForward)
    watched = llm._engine.runner.forward = Watched(forward)
    return watched


def test_alone_and_beside_others_whatever_is_replayed(
    directory: Path, quantize: str | None, certain: list[list[int]]
) -> None:
    """Graphs are captured on no batch at all. Replayed steps are prompts cut and whole, decodes, and both together."""
    with fastgen.load(directory, token_budget=8, quantize=quantize, **OPTIONS) as llm:
        assert_same(certain[:2], [llm.generate(PROMPTS[index], SAMPLINGS[index]) for index in range(2)])
        watched = watch(llm)
        outputs = answers(llm, [3, 1, 0, 2])
    assert_same(certain, outputs)
    assert any(used < size for used, size in watched.num_tokens), "no step was padded"
    assert any(used == size == 8 for used, size in watched.num_tokens), "no step was full"
    assert watched.num_empty_slots
    assert watched.num_padded_rows


@pytest.mark.kernels
@pytest.mark.slow
def test_at_another_budget_with_preemptions(directory: Path, quantize: str | None, certain: list[list[int]]) -> None:
    """Before each step everything that no running sequence owns is filled with what would be noticed."""
    cache = small_cache(directory, SMALL_CACHE, token_budget=4, **(OPTIONS | {"target": "torch"}))
    with fastgen.load(directory, token_budget=4, kv_cache_memory=cache, quantize=quantize, **OPTIONS) as llm:
        assert llm._engine is not None
        launch = llm._engine.runner.launch

        def poisoned_launch(step: Step) -> None:
            poison(llm)
            launch(step)

        llm._engine.runner.launch = poisoned_launch  # type: ignore[method-assign]
        outputs = answers(llm, [2, 1, 0, 3])  # an order in which they do not fit
    assert sum(output.metrics.preemptions for output in outputs) >= 1
    assert_same(certain, outputs)
