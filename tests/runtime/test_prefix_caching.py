"""Prompts that begin like an earlier one skip what is cached, exactly so much, and get the answer that they get anyway.

On ``cpp`` whole distributions are the same bits with and without the cache; on ``torch`` tokens by the margin rule.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.runtime.llm import LLM
from fastgen.runtime.step.step import Step
from tests.runtime import test_same_answer_cpp as cpp
from tests.runtime.checkpoints import VOCAB_SIZE, families, save_checkpoint, small_cache
from tests.runtime.held import assert_nothing_held
from tests.runtime.test_same_answer import num_certain_tokens, poison

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(directory: Path) -> Any:
    with fastgen.load(directory, block_size=BLOCK_SIZE, token_budget=16, kv_cache_memory="1MiB") as llm:
        yield llm


def tokens(rng: random.Random, count: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def common_prefix(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def expected_hit(prompt: list[int], computed: list[list[int]]) -> int:
    """Full blocks that some earlier sequence computed, of all but the last token of ``prompt``."""
    longest = max((common_prefix(prompt[:-1], each) for each in computed), default=0)
    return longest // BLOCK_SIZE * BLOCK_SIZE


def num_computed(llm: LLM) -> list[int]:
    """Gets the number of tokens of each step from now on."""
    engine, counts = llm._engine, []
    assert engine is not None
    launch = engine.runner.launch

    def counted(step: Step) -> None:
        counts.append(step.schedule.num_tokens)
        launch(step)

    engine.runner.launch = counted  # type: ignore[method-assign]
    return counts


def test_shared_beginnings_are_computed_once(llm: LLM) -> None:
    """Requests one after the other, each beginning like an earlier one at a drawn length, up to all of it."""
    rng = random.Random(3)
    computed: list[list[int]] = []
    hits = []
    for _ in range(25):
        basis = rng.choice(computed) if computed and rng.random() < 0.9 else []
        prompt = [*basis[: rng.randint(0, len(basis))], *tokens(rng, rng.randint(1, 9))][:90]
        output = llm.generate(prompt, temperature=0, max_new_tokens=rng.randint(1, 12), ignore_eos=True)
        assert output.metrics.cached_tokens == expected_hit(prompt, computed), prompt
        hits.append(output.metrics.cached_tokens)
        computed.append([*prompt, *output.token_ids[:-1]])  # the last token is never computed
    assert len(set(hits)) > 4


def test_a_system_prompt_is_computed_once(llm: LLM) -> None:
    rng = random.Random(4)
    system = tokens(rng, 41)
    questions = [[*system, *tokens(rng, 7)] for _ in range(3)]
    counts = num_computed(llm)
    first = llm.generate(questions[0], temperature=0, max_new_tokens=1)
    others = llm.generate(questions[1:], temperature=0, max_new_tokens=1)
    assert [output.metrics.cached_tokens for output in (first, *others)] == [0, 40, 40]
    assert sum(counts) == 48 + 8 + 8
    (again,) = llm.generate([questions[0]], temperature=0, max_new_tokens=1)
    assert again.metrics.cached_tokens == 44  # of 48 tokens: the last block is computed again
    assert sum(counts) == 48 + 8 + 8 + 4


def test_a_conversation_computes_only_what_is_new(llm: LLM) -> None:
    rng = random.Random(5)
    history: list[int] = []
    for turn in range(5):
        computed = max(0, len(history) - 1)
        history += tokens(rng, rng.randint(3, 9))
        output = llm.generate(history, temperature=0, max_new_tokens=10, ignore_eos=True)
        assert output.metrics.cached_tokens == computed // BLOCK_SIZE * BLOCK_SIZE, turn
        history += output.token_ids


def test_requests_that_arrive_together_compute_for_themselves(llm: LLM) -> None:
    prompt = tokens(random.Random(6), 7)
    outputs = llm.generate([prompt] * 2, temperature=0, max_new_tokens=6, ignore_eos=True)
    assert [output.metrics.cached_tokens for output in outputs] == [0, 0]
    assert outputs[0].token_ids == outputs[1].token_ids


def test_prompt_logprobs_are_of_every_token_and_what_they_took_is_kept(llm: LLM) -> None:
    prompt = tokens(random.Random(7), 23)
    outputs = [llm.generate(prompt, temperature=0, max_new_tokens=2, prompt_logprobs=2) for _ in range(2)]
    assert [output.metrics.cached_tokens for output in outputs] == [0, 0]
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs
    assert llm.generate(prompt, max_new_tokens=2).metrics.cached_tokens == 20


def test_statistics_say_how_much_was_found(directory: Path) -> None:
    rng = random.Random(8)
    prompt = tokens(rng, 30)
    with fastgen.load(directory, block_size=BLOCK_SIZE, kv_cache_memory="1MiB") as llm:
        for end in (30, 13, 30):
            llm.generate(prompt[:end], max_new_tokens=1)
        assert llm._engine is not None
        cache = llm._engine.scheduler.kv.prefix_cache
        assert cache is not None
        assert vars(cache.statistics) == {
            "lookup_tokens": 73, "hit_tokens": 12 + 28, "evictions": 0
        }  # fmt: skip


def test_without_prefix_caching_nothing_is_kept(directory: Path) -> None:
    prompt = tokens(random.Random(9), 30)
    with fastgen.load(directory, block_size=BLOCK_SIZE, prefix_caching=False) as llm:
        outputs = [llm.generate(prompt, max_new_tokens=4, temperature=0) for _ in range(2)]
        assert [output.metrics.cached_tokens for output in outputs] == [0, 0]
        assert llm._engine is not None
        assert llm._engine.scheduler.kv.pool.num_cached == 0


# The same answer


NUM_REQUESTS = 30


def drawn_requests(vocab_size: int, longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of which most begin like others, also like all of another."""
    rng = random.Random(11)
    prompts: list[list[int]] = []
    for _ in range(NUM_REQUESTS):
        basis = rng.choice(prompts) if prompts and rng.random() < 0.8 else []
        beginning = basis[: rng.choice([len(basis), rng.randint(0, len(basis))])]
        prompts.append([*beginning, *tokens(rng, rng.randint(1, 25), vocab_size)][:longest])
    samplings = [
        SamplingParams(max_new_tokens=rng.randint(1, 15), temperature=rng.choice([0.0, 0.8]), seed=i, ignore_eos=True)
        for i in range(NUM_REQUESTS)
    ]
    return prompts, samplings


def generate(llm: LLM, prompts: list[list[int]], samplings: list[SamplingParams]) -> list[GenerationOutput]:
    """In three waves, so that later ones find what earlier ones left; all stale memory is poisoned before each step."""
    assert llm._engine is not None
    launch = llm._engine.runner.launch

    def poisoned_launch(step: Step) -> None:
        poison(llm)
        launch(step)

    llm._engine.runner.launch = poisoned_launch  # type: ignore[method-assign]
    outputs = []
    for first in range(0, NUM_REQUESTS, NUM_REQUESTS // 3):
        wave = slice(first, first + NUM_REQUESTS // 3)
        outputs += llm.generate(prompts[wave], samplings[wave])
    assert_nothing_held(llm._engine)
    return outputs


FAST = ("Gemma2",)


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in FAST else pytest.mark.slow) for f in cpp.FAMILIES])
def test_the_same_bits_as_without_a_cache(family: str, tmp_path: Path) -> None:
    directory = cpp.checkpoint(family, tmp_path)
    prompts, samplings = drawn_requests(cpp.VOCAB_SIZE, longest=80)
    samplings = [replace(sampling, logprobs=cpp.VOCAB_SIZE) for sampling in samplings]
    options: dict[str, Any] = {"target": "cpp", "block_size": BLOCK_SIZE, "token_budget": 24, "max_num_seqs": 5}
    with fastgen.load(directory, prefix_caching=False, **options) as llm:
        expected = [llm.generate(*request) for request in zip(prompts, samplings, strict=True)]
    cache = small_cache(directory, 100, **options)
    for name, memory in (("much", "2MiB"), ("little", cache)):
        with fastgen.load(directory, kv_cache_memory=memory, **options) as llm:
            found = generate(llm, prompts, samplings)
            assert llm._engine is not None
            statistics = llm._engine.scheduler.kv.prefix_cache.statistics
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert other.token_ids == one.token_ids, (name, index)
            assert other.logprobs == one.logprobs, (name, index)
        assert sum(output.metrics.cached_tokens for output in found) > 40, name
        assert (statistics.evictions > 50) == (name == "little")
        assert (sum(output.metrics.preemptions for output in found) >= 3) == (name == "little")


@pytest.mark.parametrize("family", families("mistral", of=("llama", "mistral")))
def test_the_same_tokens_on_the_reference(family: str, tmp_path: Path) -> None:
    save_checkpoint(family, tmp_path)
    prompts, samplings = drawn_requests(VOCAB_SIZE, longest=80)
    options: dict[str, Any] = {"target": "torch", "block_size": BLOCK_SIZE, "token_budget": 24, "max_num_seqs": 5}
    with fastgen.load(tmp_path, prefix_caching=False, **options) as llm:
        expected = [
            llm.generate(prompt, replace(sampling, logprobs=VOCAB_SIZE))
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
    with fastgen.load(tmp_path, kv_cache_memory=small_cache(tmp_path, 100, **options), **options) as llm:
        found = generate(llm, prompts, samplings)
    certain = [num_certain_tokens(one, sampling) for one, sampling in zip(expected, samplings, strict=True)]
    assert sum(certain) > 0.9 * sum(len(one.token_ids) for one in expected)
    for index, (one, other, count) in enumerate(zip(expected, found, certain, strict=True)):
        assert other.token_ids[:count] == one.token_ids[:count], index
    assert sum(output.metrics.cached_tokens for output in found) > 40
    assert sum(output.metrics.preemptions for output in found) >= 3


def test_a_preempted_sequence_does_not_compute_what_is_still_cached(directory: Path) -> None:
    """The same requests over the same small cache: with prefix caching the same answers take fewer tokens."""
    rng = random.Random(12)
    prompts = [tokens(rng, rng.randint(20, 60)) for _ in range(12)]
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "token_budget": 16, "max_num_seqs": 6}
    cache = small_cache(directory, 150, **options)
    answers, totals = [], []
    for prefix_caching in (False, True):
        with fastgen.load(directory, kv_cache_memory=cache, prefix_caching=prefix_caching, **options) as llm:
            counts = num_computed(llm)
            outputs = llm.generate(prompts, temperature=0, max_new_tokens=40, ignore_eos=True)
        assert sum(output.metrics.preemptions for output in outputs) >= 5
        assert all(output.metrics.cached_tokens == 0 for output in outputs)  # what it had itself is not the prompt's
        answers.append([output.token_ids for output in outputs])
        totals.append(sum(counts))
    assert answers[0] == answers[1]
    needed = sum(len(prompt) + 39 for prompt in prompts)
    # only a part is spared: its blocks were taken because others needed them
    assert needed <= totals[1] < totals[0]


def test_a_cached_prefix_of_more_blocks_than_a_step_makes(directory: Path) -> None:
    """Its table is longer than what a step's copy to the device has room for."""
    prompt = tokens(random.Random(13), 120)
    with fastgen.load(directory, block_size=1, token_budget=4, max_num_seqs=1, kv_cache_memory="1MiB") as llm:
        first, second = (llm.generate(prompt, temperature=0, max_new_tokens=8, logprobs=3) for _ in range(2))
        assert llm._engine is not None
        assert llm._engine.runner.input_batch.max_updates < 119 == second.metrics.cached_tokens
    assert (first.token_ids, first.logprobs) == (second.token_ids, second.logprobs)
