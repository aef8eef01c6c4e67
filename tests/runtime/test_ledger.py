"""The memory ledger against what engines really hold: exact for tensors, closely above for what comes and goes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastgen
from benchmarks.cpu.ledger import AllocationPeak, held_bytes
from fastgen.compile.backends.choose import target_facts
from fastgen.compile.host.device import current
from fastgen.models.measure import MeasuredModel, ModelBuild
from fastgen.runtime.config import parse_dtype
from fastgen.runtime.engine import Engine
from fastgen.runtime.llm import LLM
from fastgen.runtime.memory.ledger import MEANINGS, Ledger, LedgerRow, MemoryModel
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.memory.temporaries import Temporaries, demanding, sampling_of
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.kept_formats import most_kept_bytes
from fastgen.runtime.step.forward import Forward
from tests.fast import cases
from tests.runtime.checkpoints import save_checkpoint
from tests.runtime.test_same_answer_cpp import FAMILIES, checkpoint

BUDGET = 32
SIZES: dict[str, Any] = {"token_budget": BUDGET, "max_num_seqs": 5, "max_model_len": 3 * BUDGET + 1, "block_size": 16}
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
    *(("Qwen3Moe", "cpp int4"), ("opt", "cpp fp32")),
    *(("DeepseekV3", "torch bf16"), ("mistral", "torch fp32"), ("Gemma2", "torch int8_weight_only")),
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


def model_build(llm: LLM, build: str) -> ModelBuild:
    options = BUILDS[build]
    dtype = parse_dtype(options.get("dtype", "float32"))
    facts = target_facts(options["target"], current("cpu"), num_threads=None, dtype=dtype)
    return ModelBuild(llm.spec, dtype, facts, options.get("quantize"))


def memory_model(llm: LLM, build: str) -> MemoryModel:
    return MemoryModel(model_build(llm, build), current("cpu"))


def forward_peak(engine: Engine, *, is_interpreted: bool) -> int:
    """The most that the modules' intermediate results take while prompts of the greatest lengths are read in chunks of
    the token budget, which end anywhere in a block: a short prompt takes the place of their first tokens."""
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
        for num_tokens in range(1 if is_interpreted else SIZES["block_size"]):
            if num_tokens:
                engine.submit([index + 3 for index in range(num_tokens)], SamplingParams(max_new_tokens=1))
            engine.submit([5 + num_tokens] * (3 * BUDGET - num_tokens), SamplingParams(max_new_tokens=1))
            while engine.has_work:
                engine.step()
    return most


@pytest.mark.parametrize(("model", "build"), CASES)
def test_every_part_is_what_the_engine_holds(find: Find, model: str, build: str) -> None:
    with fastgen.load(find(model), **SIZES, **BUILDS[build]) as llm:
        engine, ledger = llm._engine, llm.ledger
        assert engine is not None
        llm.generate([[7] * length for length in (3, 70, 31)], max_new_tokens=4)  # records steps of several sizes
        held = held_bytes(engine)
        told = {row.name: row.size_bytes for row in ledger.rows}
        assert told.keys() <= MEANINGS.keys()
        phases = memory_model(llm, build).temporaries(llm.config)
        assert told.pop("temporaries") == max(phases.values())
        assert told.pop("compiled formats") == most_kept_bytes(current("cpu").memory_bytes)
        assert told == {name: size for name, size in held.items() if size}
        by_modules = forward_peak(engine, is_interpreted=build.startswith("triton"))
    step = phases[f"a forward pass of token_budget={BUDGET}"]
    print(f"{model} {build}: a forward pass takes {by_modules:,} bytes, the ledger says {step:,}")
    assert by_modules == step


@pytest.mark.parametrize(
    ("model", "build"),
    cases(
        [("Gemma2", "cpp fp32"), ("Qwen3Moe", "cpp int4"), ("DeepseekV3", "cpp bf16"), ("opt", "cpp fp32")], fast=FAST
    ),
)
def test_steps_of_all_sizes_share_the_room_of_the_largest(find: Find, model: str, build: str) -> None:
    with fastgen.load(find(model), token_budget=4096, max_model_len=90, **BUILDS[build]) as llm:
        prompts = [[index] * 89 for index in range(60)]
        for num_prompts in (1, 7, 60, 3):
            llm.generate(prompts[:num_prompts], max_new_tokens=1)
        engine = llm._engine
        assert engine is not None
        told = llm.ledger.size_bytes("activations")
        assert told > 2 << 20
        assert held_bytes(engine)["activations"] == told


@pytest.mark.parametrize("kind", range(len(demanding(2))))
def test_sampling_takes_what_the_ledger_says(find: Find, kind: int) -> None:
    vocab_size = 4001  # so that what belongs to a row alone hardly counts
    with fastgen.load(find("Llama"), target="torch", **SIZES) as llm:
        engine = llm._engine
        assert engine is not None
        num_beams, rows = (2, 4) if kind == 2 else (1, 5)
        for index in range(rows // num_beams):
            engine.submit([index + 3], demanding(vocab_size)[kind])
        schedule = engine.scheduler.schedule()
        assert schedule is not None
        sequences = [entry.seq for entry in schedule.entries]
        sequences = [each for first in sequences for each in first.request.sequences]
        with AllocationPeak() as peak:
            engine.runner.sampler.sample(torch.randn(rows, vocab_size), sequences)
        engine.cancel_all()
    recorded = sampling_of(model_build(llm, "torch fp32").target)[kind](rows, 4004).peak_bytes + 4 * rows * vocab_size
    print(f"{peak.most / (rows * vocab_size):.1f} bytes for each logit, recorded {recorded / (rows * vocab_size):.1f}")
    assert peak.most <= recorded <= 1.05 * peak.most
    if rows == llm.config.max_rows:
        build = model_build(llm, "torch fp32")
        wide = Temporaries(MeasuredModel(replace(build, spec=replace(llm.spec, vocab_size=vocab_size))))
        phase = wide.phases(llm.config)[f"sampling max_num_seqs={rows}"] - 4 * BUDGET * llm.spec.hidden_size
        assert peak.most <= phase
        assert phase <= 1.05 * peak.most or kind == 0, "another kind of request takes more"


def test_scores_of_a_prompt_take_what_the_ledger_says(find: Find) -> None:
    with fastgen.load(find("Llama"), target="torch", **SIZES) as llm:
        runner = llm._engine.runner
        hidden = torch.randn(BUDGET, llm.spec.hidden_size)
        with torch.inference_mode(), AllocationPeak() as peak:
            for piece in runner._launch_pieces(hidden, 0, list(range(BUDGET)), 21):
                piece()
        phases = memory_model(llm, "torch fp32").temporaries(llm.config)
        most = max(math.prod(tensor.stored_shape) for tensor in llm.spec.tensors())
        assert phases["loading the largest tensor"] == 4 * most
        held = hidden.nbytes + 4 * llm.config.max_rows * llm.spec.vocab_size
    found = phases["prompt_logprobs"] - held
    assert peak.most <= found <= 1.05 * peak.most


@pytest.mark.parametrize(
    ("vocab_size", "max_num_seqs", "phase"),
    [
        (70, 5, f"a forward pass of token_budget={BUDGET}"),
        (4001, BUDGET, f"sampling max_num_seqs={BUDGET}"),
        (4001, 1, "prompt_logprobs"),
    ],
)
def test_the_row_of_temporaries_is_the_largest_phase(
    find: Find, vocab_size: int, max_num_seqs: int, phase: str
) -> None:
    with fastgen.load(find("Llama"), target="torch", **SIZES) as llm:
        build, config = model_build(llm, "torch fp32"), replace(llm.config, max_num_seqs=max_num_seqs)
        model = MemoryModel(replace(build, spec=replace(llm.spec, vocab_size=vocab_size)), current("cpu"))
    phases = model.temporaries(config)
    assert phases[phase] == max(phases.values())
    row = next(row for row in model.ledger(config).rows if row.name == "temporaries")
    assert (row.of, row.size_bytes) == (phase, phases[phase])


def test_measuring_leaves_the_user_s_random_numbers_alone(find: Find) -> None:
    directory = find("Llama")  # making a checkpoint draws numbers
    state = torch.get_rng_state()
    sampling_of.cache_clear()
    with fastgen.load(directory, target="torch", **SIZES):
        pass
    assert torch.equal(torch.get_rng_state(), state)


def test_a_ledger_is_a_table_and_json() -> None:
    rows = (LedgerRow("matrices", 3 << 20, "int4"), LedgerRow("KV cache", 1 << 20))
    ledger = Ledger(rows, device_bytes=1 << 30)
    assert str(ledger).splitlines() == [
        "matrices of int4            3.00 MiB",
        "KV cache                    1.00 MiB",
        "total                       4.00 MiB",
        "memory of the device    1,024.00 MiB",
    ]
    plain, explained = str(ledger).splitlines(), ledger.explained().splitlines()
    assert [line[: len(plain[0])].rstrip() for line in explained] == plain
    assert explained[0].endswith("MiB  the weights of attention and feed-forward layers")
    assert explained[-1].endswith("MiB  all of it, free or not")
    assert json.loads(json.dumps(ledger.as_json())) == {
        "rows": [
            {"name": "matrices", "size_bytes": 3 << 20, "of": "int4"},
            {"name": "KV cache", "size_bytes": 1 << 20, "of": ""},
        ],
        "total_bytes": 4 << 20,
        "device_bytes": 1 << 30,
    }
    assert ledger.arithmetic() == "matrices of int4 3 MiB + KV cache 1 MiB = 4 MiB"
    assert ledger.size_bytes("nothing") == 0


@pytest.mark.parametrize(
    ("steps", "scale", "sampling", "prompt_logprobs"),
    [
        # Hidden states of 128 tokens take 32 bytes each, logits of 10 rows 400 bytes each.
        ("called", 1, 4096 + 4000 + 10_000, 4096 + 4000 + 64 * 400 + 6400),
        ("called", 3000, 4096 + 320 + 30_000, 4096 + 4000 + 192_000),  # of few rows the head takes most
        ("captured", 1, 10_000, 64 * 400 + 6400),
        ("captured", 3000, 10_000, 192_000),
    ],
)
def test_phases_take_the_larger_of_the_head_and_of_what_follows_it(
    steps: str, scale: int, sampling: int, prompt_logprobs: int
) -> None:
    """The head takes ``scale`` bytes a row, sampling 1000 and the scores of a prompt 100."""
    spec = SimpleNamespace(hidden_size=8, vocab_size=100)
    build = SimpleNamespace(spec=spec, activation_dtype=torch.float32)
    asked: list[tuple[int, int, int]] = []

    def forward(*sizes: int) -> SimpleNamespace:
        asked.append(sizes)
        return SimpleNamespace(peak_bytes=777)

    temporaries = Temporaries.__new__(Temporaries)
    vars(temporaries).update(
        _model=SimpleNamespace(
            largest_tensor_bytes=555, forward=forward, logits=lambda rows: SimpleNamespace(peak_bytes=scale * rows)
        ),
        _build=build,
        _backend=SimpleNamespace(steps=steps),
        _sampling_bytes=lambda rows: 1000 * rows,
        _scoring_bytes=lambda rows: 100 * rows,
    )
    config = EngineConfig(
        token_budget=128,
        max_num_seqs=5,
        block_size=16,
        num_blocks=9,
        max_model_len=64,
        num_kv_groups=1,
        num_draft_tokens=1,
    )
    assert temporaries.phases(config) == {
        "loading the largest tensor": 555,
        "a forward pass of token_budget=128": 777,
        "sampling max_num_seqs=5": sampling,
        "prompt_logprobs": prompt_logprobs,
    }
    assert asked == [(128, 63, 16)]
