"""The memory ledger against what engines really hold: exact for tensors, closely above for what comes and goes."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastgen
from benchmarks.cpu.ledger import AllocationPeak, held_bytes
from fastgen.compile.backends.choose import target_facts
from fastgen.compile.host.device import current
from fastgen.compile.ops.sampling.reference import REFERENCE_BYTES_PER_LOGIT
from fastgen.models.measure import ModelBuild
from fastgen.runtime.config import parse_dtype
from fastgen.runtime.engine import Engine
from fastgen.runtime.llm import LLM
from fastgen.runtime.memory.ledger import Ledger, LedgerRow, MemoryModel
from fastgen.runtime.sampling.sampling_params import SamplingParams
from fastgen.runtime.step.forward import Forward
from tests.runtime.checkpoints import save_checkpoint
from tests.runtime.test_same_answer_cpp import FAMILIES, checkpoint

BUDGET = 32
SIZES: dict[str, Any] = {"token_budget": BUDGET, "max_num_seqs": 5, "max_model_len": 3 * BUDGET + 1, "block_size": 8}
# Rows that are no tensors.
UNSEEN = ("attention's parts", "rests of huge pages")
MODELS = (*FAMILIES, "opt", "mistral")
BUILDS: dict[str, dict[str, Any]] = {
    "cpp fp32": {"target": "cpp"},
    "cpp bf16": {"target": "cpp", "dtype": "bfloat16"},
    "cpp int8": {"target": "cpp", "quantize": "int8"},
    "cpp int8_weight_only": {"target": "cpp", "quantize": "int8_weight_only"},
    "cpp int4": {"target": "cpp", "quantize": "int4"},
    "torch fp32": {"target": "torch"},
    "torch bf16": {"target": "torch", "dtype": "bfloat16"},
    "triton fp32": {"target": "triton"},
    "triton int4_weight_only": {"target": "triton", "quantize": "int4_weight_only"},
    "torch int8_weight_only": {"target": "torch", "quantize": "int8_weight_only"},
}
FAST = {
    *(("Llama", "cpp bf16"), ("Gemma2", "cpp fp32"), ("Qwen3Moe", "cpp int4"), ("DeepseekV3", "cpp bf16")),
    *(("Gemma2", "torch bf16"), ("Qwen3Moe", "torch fp32"), ("DeepseekV3", "torch bf16"), ("mistral", "torch fp32")),
    *(("opt", "torch bf16"), ("opt", "cpp fp32"), ("Gemma2", "torch int8_weight_only")),
}
CASES = [
    pytest.param(model, build, marks=[] if (model, build) in FAST else pytest.mark.slow)
    for model in MODELS
    for build in BUILDS
]

Find = Callable[[str], Path]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    made: dict[str, Path] = {}

    def find(model: str) -> Path:
        if model not in made:
            make = checkpoint if model in FAMILIES else save_checkpoint
            made[model] = make(model, tmp_path_factory.mktemp(model))
        return made[model]

    return find


def memory_model(llm: LLM, build: str) -> MemoryModel:
    options, device = BUILDS[build], current("cpu")
    facts = target_facts(options["target"], device, num_threads=None)
    dtype = parse_dtype(options.get("dtype", "float32"))
    return MemoryModel(ModelBuild(llm.spec, dtype, facts, options.get("quantize")), device)


def forward_peak(engine: Engine, *, is_interpreted: bool) -> int:
    """The most that the modules' intermediate results take while a prompt of the greatest length is read in chunks of
    the token budget."""
    forward, most = engine.runner.forward, 0

    def watched(batch: Any) -> torch.Tensor:
        nonlocal most
        with AllocationPeak(collects=is_interpreted) as peak:
            hidden = Forward.hidden(forward, batch)
        most = max(most, peak.most)
        return hidden

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "hidden", watched)
        patch.setattr(forward, "logits", lambda hidden, batch: Forward.logits(forward, hidden, batch))
        engine.submit([5] * (3 * BUDGET), SamplingParams(max_new_tokens=1))
        gc.freeze()
        while engine.has_work:
            engine.step()
        gc.unfreeze()
    return most


@pytest.mark.parametrize(("model", "build"), CASES)
def test_every_part_is_what_the_engine_holds(find: Find, model: str, build: str) -> None:
    with fastgen.load(find(model), **SIZES, **BUILDS[build]) as llm:
        engine, ledger = llm._engine, llm.ledger
        assert engine is not None
        llm.generate([[7] * length for length in (3, 70, 31)], max_new_tokens=4)  # records steps of several sizes
        held = held_bytes(engine)
        told = {row.name: row.size_bytes for row in ledger.rows if row.name not in UNSEEN}
        assert told.pop("temporaries") > 0
        assert told == {name: size for name, size in held.items() if size}
        by_modules = forward_peak(engine, is_interpreted=build.startswith("triton"))
    step = memory_model(llm, build).step_bytes(llm.config)
    print(f"{model} {build}: a forward pass takes {by_modules:,} bytes, the ledger says {step:,}")
    assert by_modules <= step <= (1.3 if build.startswith("torch") else 1.05) * by_modules


@pytest.mark.parametrize("model", ["Gemma2", "Qwen3Moe", "DeepseekV3", "opt"])
def test_steps_of_all_sizes_share_the_room_of_the_largest(find: Find, model: str) -> None:
    with fastgen.load(find(model), target="cpp", token_budget=4096, max_model_len=90) as llm:
        prompts = [[index] * 89 for index in range(60)]
        for num_prompts in (1, 7, 60, 3):
            llm.generate(prompts[:num_prompts], max_new_tokens=1)
        engine = llm._engine
        assert engine is not None
        told = llm.ledger.size_bytes("activations")
        assert told > 2 << 20
        assert held_bytes(engine)["activations"] == told


FIELDS: dict[str, Any] = {
    "temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.3,
    "frequency_penalty": 0.2, "logit_bias": {3: 1.0}, "logprobs": 4, "seed": 1,
}  # fmt: skip


@pytest.mark.parametrize("fields", [FIELDS, {"logprobs": 4}, {"temperature": 1.0, "seed": 0}])
def test_sampling_by_the_reference_takes_at_most_so_much_for_each_logit(find: Find, fields: dict[str, Any]) -> None:
    with fastgen.load(find("Llama"), target="torch", **SIZES) as llm:
        engine = llm._engine
        assert engine is not None
        sampler, rows = engine.runner.sampler, 5
        for index in range(rows):
            engine.submit([index + 3], SamplingParams(max_new_tokens=1, **fields))
        schedule = engine.scheduler.schedule()
        assert schedule is not None
        sequences = [entry.seq for entry in schedule.entries]
        vocab_size = 4001  # so that what belongs to a row alone hardly counts
        with AllocationPeak() as peak:
            sampler.sample(torch.randn(rows, vocab_size), sequences)
        engine.cancel_all()
    per_logit = peak.most / (rows * vocab_size)
    print(f"{per_logit:.1f} bytes for each logit")
    assert per_logit <= REFERENCE_BYTES_PER_LOGIT


def test_scores_of_a_prompt_take_at_most_what_the_ledger_says(find: Find) -> None:
    with fastgen.load(find("Llama"), target="torch", **SIZES) as llm:
        runner = llm._engine.runner
        vocab_size = llm.spec.vocab_size
        hidden = torch.randn(BUDGET, llm.spec.hidden_size)
        with torch.inference_mode(), AllocationPeak() as peak:
            runner._row_logprobs(hidden, list(range(BUDGET)), 7)
    assert 0 < peak.most <= 1.05 * 32 * BUDGET * vocab_size


def test_a_ledger_is_a_table_and_json() -> None:
    rows = (LedgerRow("matrices", 3 << 20, "int4"), LedgerRow("KV cache", 1 << 20))
    ledger = Ledger(rows, device_bytes=1 << 30)
    assert str(ledger).splitlines() == [
        "matrices of int4        3.00 MiB",
        "KV cache                1.00 MiB",
        "total                   4.00 MiB",
        "the device has      1,024.00 MiB",
    ]
    assert json.loads(json.dumps(ledger.as_json())) == {
        "rows": [
            {"name": "matrices", "size_bytes": 3 << 20, "of": "int4"},
            {"name": "KV cache", "size_bytes": 1 << 20, "of": ""},
        ],
        "total_bytes": 4 << 20,
        "device_bytes": 1 << 30,
    }
    assert ledger.arithmetic() == "matrices of int4 0.00 GiB + KV cache 0.00 GiB = 0.00 GiB"
    assert ledger.size_bytes("nothing") == 0
