"""NaN in the model ends the requests that meet it, with an error that says so, and disturbs no other, then or later.

The embedding of one token is NaN, so every sequence that reads it gets NaN keys, values and logits: at once where it
stands in the prompt, in the middle of the answer where it is generated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import fastgen
from fastgen import GenerationOutput, SamplingParams
from tests.reference import randomise, save

VOCAB_SIZE = 40
BROKEN = 33
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_num_seqs": 4, "token_budget": 8}
PROMPTS = [[5, 6, 7, 8, 9], [5, BROKEN, 7], [11], [12, 13, 14], [15] * 9]
FAILING = (1, 3)


def samplings(target: str) -> list[SamplingParams]:
    """None generates the broken token of itself, but the fourth, which must. Interpreted kernels are slow."""
    never, forced = {BROKEN: -100.0}, {BROKEN: 100.0}
    common: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 3 if target == "triton" else 8}
    return [
        SamplingParams(**common, logit_bias=never),
        SamplingParams(**common, logit_bias=never, temperature=1.0, seed=3),
        SamplingParams(**common, logit_bias=never, temperature=0.9, top_p=0.9, seed=4, logprobs=2),
        SamplingParams(**common, logit_bias=forced, logprobs=1),
        SamplingParams(**common, logit_bias=never, prompt_logprobs=1, frequency_penalty=0.4),
    ]


@pytest.fixture(scope="module", params=["plain", "windowed"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model: Any
    if request.param == "plain":
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    else:
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))
    return save(randomise(model, seed=5), tmp_path_factory.mktemp(request.param))


def answers(directory: Path, target: str, *, broken: bool) -> tuple[list[GenerationOutput], list[GenerationOutput]]:
    """All requests at once, and then those that do not meet the broken token again, in blocks and slots that the others
    have left.
    """
    each = samplings(target)
    sound = [index for index in range(len(PROMPTS)) if index not in FAILING]
    with fastgen.load(directory, target=target, **OPTIONS) as llm:
        if broken:
            (table,) = (each for name, each in llm.model.named_parameters() if "embed" in name)
            with torch.no_grad():
                table[BROKEN] = torch.nan
        together = llm.generate(PROMPTS, each)
        later = llm.generate([PROMPTS[index] for index in sound], [each[index] for index in sound])
    return together, later


def result_of(output: GenerationOutput, target: str) -> tuple[object, ...]:
    """Returns what must be the same. Log-probabilities are the same bits beside other requests on ``cpp`` only."""
    logprobs = (output.logprobs, output.prompt_logprobs) if target == "cpp" else ()
    return output.token_ids, output.finish_reason, output.error, *logprobs


@pytest.mark.parametrize("target", ["torch", "cpp", pytest.param("triton", marks=pytest.mark.slow)])
def test_requests_that_meet_nan_fail_and_no_other_changes(directory: Path, target: str) -> None:
    expected, expected_later = answers(directory, target, broken=False)
    found, later = answers(directory, target, broken=True)
    for index in FAILING:
        assert found[index].finish_reason == "error"
        assert "the model's logits hold NaN" in (found[index].error or "")
    assert found[1].token_ids == []
    assert found[3].token_ids == [BROKEN]
    for index, output in enumerate(found):
        if index not in FAILING:
            assert output.error is None
            assert result_of(output, target) == result_of(expected[index], target)
    assert [result_of(output, target) for output in later] == [result_of(output, target) for output in expected_later]


def test_what_was_computed_from_nan_is_computed_again(directory: Path) -> None:
    """The table is damaged for a while, so the prompt's second block is too. Whoever meets it leaves nothing behind
    that begins alike; what does not is still found.
    """
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=1)
    prompt, other = [5, 6, 7, 8, BROKEN, 9, 10, 11, 12, 13], [14] * 10
    with fastgen.load(directory, target="cpp", prefix_caching=False, **OPTIONS) as llm:
        expected, longer = llm.generate([prompt, [*prompt, *prompt]], sampling)
    with fastgen.load(directory, target="cpp", **OPTIONS) as llm:
        llm.generate(other, sampling)
        (table,) = (each for name, each in llm.model.named_parameters() if "embed" in name)
        sound = table[BROKEN].clone()
        with torch.no_grad():
            table[BROKEN] = torch.nan
        # A prompt that is cancelled midway leaves blocks that nothing has shown to be broken, and the next request
        # finds them.
        engine = llm._engine
        assert engine is not None
        given_up = engine.submit([*prompt, *prompt], sampling)
        engine.step()
        engine.cancel(given_up)
        found = llm.generate(prompt, sampling)
        assert (found.finish_reason, found.metrics.cached_tokens) == ("error", 8)
        with torch.no_grad():
            table[BROKEN] = sound
        for again, right in ((prompt, expected), ([*prompt, *prompt], longer)):
            output = llm.generate(again, sampling)
            assert (output.token_ids, output.logprobs) == (right.token_ids, right.logprobs)
        assert llm.generate(prompt, sampling).metrics.cached_tokens == 8
        assert llm.generate(other, sampling).metrics.cached_tokens == 8
        engine.check_integrity()
