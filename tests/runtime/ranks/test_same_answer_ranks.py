"""Several ranks give the tokens of one: with prefix caching, preemptions, beams, drafts and scores of prompts.

Compared by the margin rule of ``test_same_answer.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.runtime.llm import LLM
from tests.fast import cases
from tests.runtime.checkpoints import small_cache
from tests.runtime.ranks.models import VOCAB_SIZE, prompts, save_family
from tests.runtime.test_same_answer import num_certain_tokens

NUM_REQUESTS = 12
PROMPTS = prompts(NUM_REQUESTS)
SAMPLINGS = [
    SamplingParams(max_new_tokens=16 + index, temperature=[0.0, 0.9][index % 2], seed=index, ignore_eos=True)
    for index in range(NUM_REQUESTS)
]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"quantize": "int4"}),
    ("falcon", {}),
    ("opt", {}),
    ("mixtral", {}),
    ("olmo2", {}),
    ("deepseek", {}),
    ("llama", {"target": "torch"}),
]
# `make test` has these by the default kernels; `make test-all` has all cases.
FAST = ("opt",)
TOLERANCE = 1e-4


def with_distributions(sampling: SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        ignore_eos=True,
        logprobs=VOCAB_SIZE,
        prompt_logprobs=3,
    )


def check_same(one: list[GenerationOutput], other: list[GenerationOutput]) -> None:
    certain = [num_certain_tokens(each, sampling) for each, sampling in zip(one, SAMPLINGS, strict=True)]
    assert sum(certain) > 0.9 * sum(len(each.token_ids) for each in one), "margins are too small to prove anything"
    for index, (mine, found, count) in enumerate(zip(one, other, certain, strict=True)):
        assert found.finish_reason == mine.finish_reason, found.error
        assert found.token_ids[:count] == mine.token_ids[:count], f"request {index}"


def check_prompt_logprobs(one: list[GenerationOutput], other: list[GenerationOutput]) -> None:
    for mine, found in zip(one, other, strict=True):
        assert mine.prompt_logprobs is not None
        assert found.prompt_logprobs is not None
        for row, same in zip(mine.prompt_logprobs[1:], found.prompt_logprobs[1:], strict=True):
            assert row is not None
            assert same is not None
            for token_id in row.keys() & same.keys():
                assert abs(row[token_id] - same[token_id]) <= TOLERANCE


def beams(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS[:2], SamplingParams(max_new_tokens=8, beam_width=3, n=2, ignore_eos=True))
    return [completion.token_ids for output in outputs for completion in output.completions]


@pytest.mark.parametrize(
    ("family", "options"),
    [pytest.param(*case, marks=[] if case[0] in FAST and not case[1] else pytest.mark.slow) for case in CASES],
    ids=lambda case: case if isinstance(case, str) else str(case),
)
def test_two_ranks_answer_as_one(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    directory = save_family(family, tmp_path)
    options = {"token_budget": 32, "max_num_seqs": 6, "num_threads": 2, **options}
    with fastgen.load(directory, **options) as llm:
        one = llm.generate(PROMPTS, [with_distributions(sampling) for sampling in SAMPLINGS])
        searched = beams(llm)
    share = 1 if family in ("mixtral", "deepseek") else 2  # these have one KV head, or one latent, for both ranks
    small = {"tensor_parallel": 2, "kv_cache_memory": small_cache(directory, 80, **options) // share}
    with fastgen.load(directory, **options, tensor_parallel=2) as llm:
        whole = llm.generate(PROMPTS, [with_distributions(sampling) for sampling in SAMPLINGS])
        check_same(one, whole)
        check_prompt_logprobs(one, whole)
        assert beams(llm) == searched
    with fastgen.load(directory, **options, **small, speculative="ngram", num_draft_tokens=3) as llm:
        outputs = llm.generate(PROMPTS, SAMPLINGS)
        metrics = llm.metrics()
    check_same(one, outputs)
    assert metrics.preemptions_total > 0
    assert metrics.prefix_cache_hit_tokens_total > 0


@pytest.mark.parametrize("quantize", cases(["int8", "int8_weight_only"], fast=["int8"]))
def test_8_bits_are_rounded_no_worse_by_two_ranks(quantize: str, tmp_path: Path) -> None:
    """Each rank has a scale for its part of a row, so the numbers differ from those of one scale, but not for the
    worse."""
    directory = save_family("llama", tmp_path)

    def scores(**options: Any) -> torch.Tensor:
        with fastgen.load(directory, num_threads=2, **options) as llm:
            outputs = llm.generate(PROMPTS, max_new_tokens=1, temperature=0, prompt_logprobs=VOCAB_SIZE)
        rows = [row for output in outputs for row in (output.prompt_logprobs or [])[1:] if row is not None]
        return torch.tensor([[row[token_id] for token_id in range(VOCAB_SIZE)] for row in rows])

    exact = scores()
    by_one, by_two = (
        (scores(quantize=quantize, tensor_parallel=count) - exact).square().mean().sqrt() for count in (1, 2)
    )
    assert by_two <= 1.2 * by_one


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_four_ranks_answer_as_one(family: str, tmp_path: Path) -> None:
    directory = save_family(family, tmp_path)
    with fastgen.load(directory) as llm:
        one = llm.generate(PROMPTS, [with_distributions(sampling) for sampling in SAMPLINGS])
    with fastgen.load(directory, tensor_parallel=4) as llm:
        check_same(one, llm.generate(PROMPTS, SAMPLINGS))


@pytest.mark.slow
def test_the_leader_keeps_the_formats_that_its_ledger_has_room_for() -> None:
    """Four ranks share the memory of this machine, so each has room for fewer."""
    with fastgen.load("tiny-llama", tensor_parallel=4, num_threads=4) as llm:
        assert llm._engine is not None
        assert llm._engine.grammars is not None
        assert llm._engine.grammars._kept._max_bytes == llm.ledger.size_bytes("compiled formats") > 0
