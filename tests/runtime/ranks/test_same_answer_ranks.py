"""Several ranks give the tokens of one: with prefix caching, preemptions, beams, drafts and scores of prompts.

Compared by the margin rule of ``test_same_answer.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.runtime.llm import LLM
from tests.runtime.checkpoints import small_cache
from tests.runtime.ranks.models import VOCAB_SIZE, prompts, save_family
from tests.runtime.test_same_answer import num_certain_tokens

NUM_REQUESTS = 12
PROMPTS = prompts(NUM_REQUESTS)
SAMPLINGS = [
    SamplingParams(max_new_tokens=16 + index, temperature=[0.0, 0.9][index % 2], seed=index, ignore_eos=True)
    for index in range(NUM_REQUESTS)
]
IN_8_BITS = ("llama", "falcon", "mixtral", "deepseek")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"quantize": "int4"}),
    ("llama", {"quantize": "int8"}),
    *((family, {"quantize": "int8_weight_only"}) for family in IN_8_BITS),
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


@pytest.mark.slow  # tests/models/test_shard.py has it in one process
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", IN_8_BITS)
def test_ranks_have_the_bits_of_one_in_int8(family: str, count: int, tmp_path: Path) -> None:
    """Weights and activations get the codes of whole rows, and sums of their products are exact."""
    directory = save_family(family, tmp_path)

    def answers(tensor_parallel: int) -> list[tuple[object, ...]]:
        options: dict[str, Any] = {"token_budget": 32, "num_threads": 2, "quantize": "int8"}
        with fastgen.load(directory, tensor_parallel=tensor_parallel, **options) as llm:
            outputs = llm.generate(PROMPTS, [with_distributions(sampling) for sampling in SAMPLINGS])
        assert all(output.error is None for output in outputs)
        return [(output.token_ids, output.logprobs, output.prompt_logprobs) for output in outputs]

    assert answers(count) == answers(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "quantize"), [("llama", None), ("opt", None), *((each, "int8_weight_only") for each in IN_8_BITS)]
)
def test_four_ranks_answer_as_one(family: str, quantize: Literal["int8_weight_only"] | None, tmp_path: Path) -> None:
    directory = save_family(family, tmp_path)
    with fastgen.load(directory, quantize=quantize) as llm:
        one = llm.generate(PROMPTS, [with_distributions(sampling) for sampling in SAMPLINGS])
    with fastgen.load(directory, tensor_parallel=4, quantize=quantize) as llm:
        check_same(one, llm.generate(PROMPTS, SAMPLINGS))


@pytest.mark.slow
def test_the_leader_keeps_the_formats_that_its_ledger_has_room_for() -> None:
    """Four ranks share the memory of this machine, so each has room for fewer."""
    with fastgen.load("tiny-llama", tensor_parallel=4, num_threads=4) as llm:
        assert llm._engine is not None
        assert llm._engine.grammars is not None
        assert llm._engine.grammars._kept._max_bytes == llm.ledger.size_bytes("compiled formats") > 0
