"""A generation many windows long holds blocks for its window, and answers as transformers does.

Before every step all that is not computed and kept is filled with NaN, and so is what the windows left behind.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import transformers

import fastgen
from fastgen.runtime.kv_cache.block_tables import held_entries
from fastgen.runtime.llm import LLM
from fastgen.runtime.step.step import Step
from tests.fast import cases
from tests.reference import assert_equal_to_reference, randomise, save
from tests.runtime.test_same_answer import poison

VOCAB_SIZE = 61
WINDOW, BLOCK_SIZE, TOKEN_BUDGET = 11, 4, 8
NUM_PROMPT, NUM_NEW = 30, 120
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
WINDOWED = -(-(WINDOW - 1) // BLOCK_SIZE) + 1 - (-(TOKEN_BUDGET - 1) // BLOCK_SIZE)
WHOLE = -(-(NUM_PROMPT + NUM_NEW - 1) // BLOCK_SIZE)
# Blocks of one request. Gemma 2's layers see in turn a window and all.
MOST_HELD = {"Mistral": WINDOWED, "Gemma2": WINDOWED + WHOLE}


def reference(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**SIZES)
    return randomise(
        getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager"), seed=5
    )


def watch(llm: LLM) -> list[int]:
    """Poisons what must not be read before every step; the list gets how many blocks are held in it."""
    engine, held = llm._engine, []
    assert engine is not None
    launch = engine.runner.launch

    def watched(step: Step) -> None:
        poison(llm)
        held.append(sum(len(held_entries(seq)) for seq in engine.scheduler.running))
        launch(step)

    engine.runner.launch = watched  # type: ignore[method-assign]
    return held


@pytest.mark.parametrize(
    ("family", "target", "prefix_caching"),
    cases(
        itertools.product(MOST_HELD, ["torch", "cpp"], [False, True]),
        fast=[("Gemma2", "cpp", False), ("Gemma2", "torch", True)],
    ),
)
def test_what_is_held_is_bounded_by_the_window(family: str, target: str, prefix_caching: bool, tmp_path: Path) -> None:
    model = reference(family)
    options: dict[str, Any] = {
        "target": target,
        "block_size": BLOCK_SIZE,
        "token_budget": TOKEN_BUDGET,
        "max_num_seqs": 2,
        "prefix_caching": prefix_caching,
    }
    save(model, tmp_path)
    with fastgen.load(tmp_path, kv_cache_memory="1MiB", **options) as llm:
        assert llm._engine is not None
        block_bytes = llm._engine.runner.kv_cache.size_bytes // llm.config.num_blocks
    # a cache that holds one request and no more: in it the blocks left behind are soon used again
    cache = block_bytes * (MOST_HELD[family] + 1)
    prompt = [(7 * i * i + i) % VOCAB_SIZE for i in range(NUM_PROMPT)]
    with fastgen.load(tmp_path, kv_cache_memory=cache, **options) as llm:
        held = watch(llm)
        output = llm.generate(
            prompt,
            temperature=0,
            max_new_tokens=NUM_NEW,
            ignore_eos=True,
            logprobs=VOCAB_SIZE,
            prompt_logprobs=VOCAB_SIZE,
        )
    assert llm.config.num_blocks - 1 == MOST_HELD[family]
    assert max(held) <= MOST_HELD[family]
    assert len(held) >= NUM_NEW
    assert_equal_to_reference(model, output, tolerance=1e-4, vocab_size=VOCAB_SIZE)
