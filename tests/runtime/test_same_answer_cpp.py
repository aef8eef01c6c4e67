"""On the ``cpp`` target a request's log-probabilities are the same bits beside any others, at any chunking, budget and
number of threads, and after preemptions: whole distributions, of models with every kind of layer.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers

import fastgen
from fastgen import GenerationOutput
from tests.reference import randomise, save
from tests.runtime.checkpoints import small_cache
from tests.runtime.held import assert_nothing_held

VOCAB_SIZE = 83
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 21}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 21,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 19,
    "num_key_value_heads": 4,
}
# Plain; heads of a size that a matrix unit takes; softcaps, windows, a tied head; experts and QK-norm; layer norms and
# biases; latent attention and groups.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen3": ("Qwen3", {"head_dim": 32}),
    "Gemma2": ("Gemma2", {"head_dim": 12, "sliding_window": 9, "final_logit_softcapping": 5.0}),
    "Qwen3Moe": ("Qwen3Moe", EXPERTS | {"head_dim": 12}),
    "Phi": ("Phi", {"qk_layernorm": True}),
    "DeepseekV3": ("DeepseekV3", LATENT),
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}
FAST = {("Qwen3Moe", "int4"), ("DeepseekV3", "bf16")}
CASES = [
    pytest.param(family, weights, marks=[] if (family, weights) in FAST else pytest.mark.slow)
    for family in FAMILIES
    for weights in WEIGHTS
]
NUM_REQUESTS = 9
PROMPTS = [
    [random.Random(index).randrange(VOCAB_SIZE) for _ in range(random.Random(-index).randint(1, 70))]
    for index in range(NUM_REQUESTS)
]
ANSWERS = {"max_new_tokens": 16, "ignore_eos": True, "logprobs": VOCAB_SIZE, "prompt_logprobs": VOCAB_SIZE}
SMALL_CACHE = 6 * 16  # tokens: the largest request takes them all


def checkpoint(family: str, directory: Path) -> Path:
    prefix, more = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | more))
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")._from_config(config, attn_implementation="eager")
    return save(randomise(model, seed=3), directory)


def assert_same_bits(expected: list[GenerationOutput], found: list[GenerationOutput], circumstances: str) -> None:
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert other.token_ids == one.token_ids, f"{circumstances}: request {index}"
        # a float equals another only if they are the same bits, zeros of both signs aside
        for which in ("prompt_logprobs", "logprobs"):
            pairs = zip(getattr(one, which), getattr(other, which), strict=True)
            wrong = [place for place, (row, other_row) in enumerate(pairs) if row != other_row]
            assert not wrong, f"{circumstances}: {which} of request {index}, positions {wrong}"


def generate(directory: Path, weights: str, order: list[int], **options: Any) -> list[GenerationOutput]:
    """All requests at once, submitted in this order."""
    with fastgen.load(directory, target="cpp", **WEIGHTS[weights], **options) as llm:
        outputs = llm.generate([PROMPTS[index] for index in order], temperature=0, **ANSWERS)
        assert_nothing_held(llm._engine)
    by_index = dict(zip(order, outputs, strict=True))
    return [by_index[index] for index in range(NUM_REQUESTS)]


@pytest.mark.parametrize(("family", "weights"), CASES)
def test_the_same_bits(family: str, weights: str, tmp_path: Path) -> None:
    directory = checkpoint(family, tmp_path)
    with fastgen.load(directory, target="cpp", num_threads=1, **WEIGHTS[weights]) as llm:
        alone = [llm.generate(prompt, temperature=0, **ANSWERS) for prompt in PROMPTS]
    order = list(range(NUM_REQUESTS))
    for token_budget, max_num_seqs, num_threads in ((3, 3, 1), (7, 6, 2), (8, 6, 3), (64, 6, 2), (512, 9, 1)):
        random.Random(token_budget).shuffle(order)
        sizes = {"token_budget": token_budget, "max_num_seqs": max_num_seqs}
        found = generate(directory, weights, order, num_threads=num_threads, **sizes)
        assert_same_bits(alone, found, f"budget {token_budget}, {num_threads} threads")
    options = {"token_budget": 9, "max_num_seqs": 5}
    cache = small_cache(directory, SMALL_CACHE, target="cpp", **options, **WEIGHTS[weights])
    found = generate(directory, weights, order, num_threads=2, kv_cache_memory=cache, **options)
    assert sum(output.metrics.preemptions for output in found) >= 3
    assert_same_bits(alone, found, "preempted")
