"""The built-in models write sentences of the grammar that they were trained on."""

from __future__ import annotations

import random

import pytest

import fastgen
from fastgen import SamplingParams
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.runtime.llm import LLM
from training.evaluate import late_prompt, parse_rate

NUM_STORIES = 24
NUM_LATE_STORIES = 6
NEW_TOKENS = 280


def parsed_share(llm: LLM, prompts: list[list[int]]) -> float:
    samplings = [
        SamplingParams(temperature=0.7, seed=seed, max_new_tokens=NEW_TOKENS) for seed, _ in enumerate(prompts)
    ]
    outputs = llm.generate(prompts, samplings)
    rates = parse_rate([output.text for output in outputs])
    assert rates["sentences"] >= 5 * len(prompts)
    return rates["rate"]


@pytest.mark.parametrize(
    "name", ["tiny-llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiny-mistral", "tiny-opt"))]
)
def test_nine_of_ten_sentences_parse(name: str) -> None:
    """From the start of the context, and after 1500 tokens of other stories."""
    assert name in BUILTINS
    with fastgen.load(name, num_threads=1) as llm:
        assert llm.config.max_model_len == 2048
        assert parsed_share(llm, [[llm.tokenizer.bos_token_id]] * NUM_STORIES) >= 0.9
        rng = random.Random(4)
        late = [late_prompt(rng, llm.tokenizer) for _ in range(NUM_LATE_STORIES)]
        assert parsed_share(llm, late) >= 0.9
