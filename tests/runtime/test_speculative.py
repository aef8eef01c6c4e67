"""Speculative decoding gives the answer that there is without, in fewer steps: whatever is drafted, right or wrong.

On the ``cpp`` target the same bits, with every sampling field; elsewhere by the margin rule of ``test_same_answer.py``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.runtime.engine import Engine
from fastgen.runtime.llm import LLM
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.step.step import Step
from tests.fast import cases
from tests.reference import randomise, save
from tests.runtime import test_same_answer as same_answer
from tests.runtime import test_same_answer_fields as fields
from tests.runtime import test_same_answer_triton as triton
from tests.runtime.checkpoints import families, save_checkpoint, save_tokenizer
from tests.runtime.held import assert_nothing_held
from tests.runtime.test_same_answer import num_certain_tokens


class Oracle:
    """Knows the answers and drafts them, spoilt from some place on as often as not."""

    def __init__(self, prompts: SequenceOf[list[int]], answers: SequenceOf[GenerationOutput], num_draft_tokens: int):
        self.answers = {
            (*prompt, index): completion.token_ids
            for prompt, answer in zip(prompts, answers, strict=True)
            for index, completion in enumerate(answer.completions)
        }
        self.num_draft_tokens, self.rng = num_draft_tokens, random.Random(num_draft_tokens)

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        answer = self.answers[(*sequence.request.prompt_ids, sequence.index)]
        num_generated = sequence.num_tokens - sequence.num_prompt_tokens
        room = sequence.request.sampling.max_new_tokens - num_generated - 1
        count = min(max_tokens, room, self.rng.randint(0, self.num_draft_tokens))
        drafts = answer[num_generated : num_generated + max(count, 0)]
        drafts += [0] * (max(count, 0) - len(drafts))  # behind the end of an answer that stopped
        if drafts and self.rng.random() < 0.5:
            spoilt = self.rng.randrange(len(drafts))
            drafts[spoilt:] = [self.rng.randrange(40) for _ in drafts[spoilt:]]
        return drafts


def engine_of(llm: LLM) -> Engine:
    assert llm._engine is not None
    return llm._engine


class Watched:
    """Counts what the steps of an engine draft, and what of it is accepted."""

    def __init__(self, llm: LLM):
        self.engine = engine_of(llm)
        self.collect = self.engine.runner.collect
        self.num_steps = self.num_drafts = self.num_accepted = 0
        self.engine.runner.collect = self._collect  # type: ignore[method-assign]

    def _collect(self, step: Step) -> None:
        self.collect(step)
        self.num_steps += 1
        self.num_drafts += sum(len(chunk.drafts) for chunk in step.schedule.chunks)
        self.num_accepted += sum((step.num_accepted or {}).values())


# Every sampling field, on kernels: the same bits


@pytest.fixture(scope="module", params=families("mistral", of=("llama", "mistral")))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[GenerationOutput]:
    requests = zip(fields.PROMPTS, fields.SAMPLINGS, strict=True)
    with fastgen.load(directory, target="cpp") as llm:
        return [llm.generate(prompt, sampling) for prompt, sampling in requests]


@pytest.mark.parametrize(
    ("num_draft_tokens", "token_budget"), cases([(1, 8), (3, 16), (4, 48), (9, 512)], fast=[(3, 16), (9, 512)])
)
def test_the_same_answer_with_every_field(
    directory: Path, alone: list[GenerationOutput], num_draft_tokens: int, token_budget: int
) -> None:
    """Beside other requests, with drafts that are right, partly right and wrong."""
    options: dict[str, Any] = {"speculative": "ngram", "num_draft_tokens": num_draft_tokens}
    options |= {"token_budget": token_budget, "max_num_seqs": min(8, token_budget // 2)}
    with fastgen.load(directory, target="cpp", **options) as llm:
        engine_of(llm).scheduler._propose_drafts = Oracle(fields.PROMPTS, alone, num_draft_tokens).propose
        watched = Watched(llm)
        fields.assert_same(alone, llm.generate(fields.PROMPTS, fields.SAMPLINGS))
        assert_nothing_held(llm._engine)
    assert watched.num_drafts > watched.num_accepted > 100


def test_the_same_answer_with_preemptions(directory: Path, alone: list[GenerationOutput]) -> None:
    options: dict[str, Any] = {"target": "cpp", "block_size": 4, "speculative": "ngram", "num_draft_tokens": 6}
    with fastgen.load(directory, kv_cache_memory="1MiB", **options) as llm:
        block_bytes = engine_of(llm).runner.kv_cache.size_bytes // llm.config.num_blocks
        num_groups = llm.config.num_kv_groups
    cache = block_bytes * (1 + num_groups * fields.LONGEST // 4)
    with fastgen.load(directory, kv_cache_memory=cache, token_budget=16, **options) as llm:
        engine_of(llm).scheduler._propose_drafts = Oracle(fields.PROMPTS, alone, 6).propose
        outputs = llm.generate(fields.PROMPTS, fields.SAMPLINGS)
        assert_nothing_held(llm._engine)
    assert sum(each.metrics.preemptions for output in outputs for each in output.completions) >= 10
    fields.assert_same(alone, outputs)


def test_what_was_computed_for_rejected_drafts_is_not_used(directory: Path, alone: list[GenerationOutput]) -> None:
    """Answers that continue from published blocks of drafted ones are those computed from nothing."""
    prompts, samplings, answers = fields.PROMPTS[:12], fields.SAMPLINGS[:12], alone[:12]
    answered = [
        (prompt, completion.token_ids)
        for prompt, answer in zip(prompts, answers, strict=True)
        for completion in answer.completions
    ]
    longer = [[*prompt, *token_ids] for prompt, token_ids in answered]
    asked: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    options: dict[str, Any] = {"target": "cpp", "block_size": 4}
    with fastgen.load(directory, prefix_caching=False, **options) as llm:
        expected = llm.generate(longer, **asked)
    with fastgen.load(directory, speculative="ngram", num_draft_tokens=6, **options) as llm:
        engine_of(llm).scheduler._propose_drafts = Oracle(prompts, answers, 6).propose
        fields.assert_same(answers, llm.generate(prompts, samplings))
        engine_of(llm).scheduler._propose_drafts = None
        found = llm.generate(longer, **asked)
        assert_nothing_held(llm._engine)
    assert [fields.result_of(output) for output in found] == [fields.result_of(output) for output in expected]
    num_cached = [output.metrics.cached_tokens for output in found]
    assert sum(max(0, num - len(prompt)) for num, (prompt, _) in zip(num_cached, answered, strict=True)) > 100


# Where another order of summation may decide what is narrow


def answers_by_torch(
    directory: Path, prompts: list[list[int]], samplings: list[SamplingParams]
) -> tuple[list[GenerationOutput], list[int]]:
    """Returns each request's answer by itself, and how many of its tokens come before one that was won narrowly."""
    with fastgen.load(directory, target="torch", dtype="float32") as llm:
        outputs = [
            llm.generate(prompt, replace(sampling, logprobs=llm.spec.vocab_size))
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
    counts = list(map(num_certain_tokens, outputs, samplings))
    assert sum(counts) > 0.9 * sum(len(output.token_ids) for output in outputs), "margins are too small to prove much"
    return outputs, counts


def assert_certain(expected: list[GenerationOutput], counts: list[int], found: list[GenerationOutput]) -> None:
    for one, count, other in zip(expected, counts, found, strict=True):
        assert other.token_ids[:count] == one.token_ids[:count]
        assert len(other.token_ids) == len(one.token_ids)


def test_on_the_reference(directory: Path) -> None:
    prompts, samplings = same_answer.PROMPTS[:24], same_answer.SAMPLINGS[:24]
    expected, counts = answers_by_torch(directory, prompts, samplings)
    with fastgen.load(directory, target="torch", token_budget=24, speculative="ngram") as llm:
        engine_of(llm).scheduler._propose_drafts = Oracle(prompts, expected, 4).propose
        watched = Watched(llm)
        assert_certain(expected, counts, llm.generate(prompts, samplings))
        assert_nothing_held(llm._engine)
    assert watched.num_drafts > watched.num_accepted > 20


@pytest.mark.slow
def test_on_interpreted_triton_kernels(tmp_path: Path) -> None:
    """Rows of a drafted sequence share its slot, which is why there are no drafts before ``min_new_tokens``."""
    config = transformers.LlamaConfig(**triton.SIZES)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    directory = save(randomise(model, seed=3), tmp_path)
    samplings = [replace(triton.SAMPLINGS[0], min_new_tokens=2, ignore_eos=False), *triton.SAMPLINGS[1:3]]
    prompts = triton.PROMPTS[: len(samplings)]
    expected, counts = answers_by_torch(directory, prompts, samplings)
    options = {"speculative": "ngram", "num_draft_tokens": 3}
    with fastgen.load(directory, token_budget=8, **options, **triton.OPTIONS) as llm:
        engine = engine_of(llm)
        oracle, slots = Oracle(prompts, expected, 3), engine.runner.sampler.slots
        assert slots is not None
        asked = []

        def propose(sequence: Sequence, max_tokens: int) -> list[int]:
            asked.append((list(sequence.request.prompt_ids), sequence.num_tokens - sequence.num_prompt_tokens))
            assert slots.can_draft(sequence), "before min_new_tokens it runs ahead of its tokens, without drafts"
            return oracle.propose(sequence, max_tokens)

        engine.scheduler._propose_drafts = propose
        watched = Watched(llm)
        assert_certain(expected, counts, llm.generate(prompts, samplings))
        assert_nothing_held(llm._engine)
    assert watched.num_drafts > watched.num_accepted > 2
    assert min(number for prompt, number in asked if prompt == prompts[0]) == 2


# What it is for: a text that repeats itself


STORY = (
    "Once upon a time, there was a tiny cat named Jack. He lived in a wooden cabin at the edge of the woods.\n"
    "One day, Jack saw a bluebird and ran after it along the stream. He walked farther and farther and forgot the "
    'time. "Hello! Is anybody there?" called Jack.\nSoon, a small cat named Jack came hopping down the path. "I am '
    'lost, and I want to go home," said Jack. "I know every path here," said the owl. Jack carried a lantern and '
    'walked in front. And there was the hut with a blue roof.\n"Thank you, Jack," said Jack. Jack smiled and said it '
    'was nothing. Jack never forgot that day. "Always remember that nobody is lost when a friend is near," said his '
    "grandfather.\n\n"
)
BEGINNING = "Once upon a time, there was a tiny cat named Jack. He lived "


def test_the_documented_numbers_of_steps() -> None:
    """And the same tokens, with logits that differ by enough to be the likeliest on every machine."""
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    documented = [
        [int(cell) for cell in row.split("|")[2:-1]]
        for row in re.findall(r"^\| a story that was told .*$", page, re.MULTILINE)
    ]
    prompts = [2 * STORY + BEGINNING, STORY + BEGINNING]
    counted: list[list[int]] = [[], []]
    answers: list[list[int]] = [[], []]
    for num_draft_tokens in (None, 2, 4, 8):
        speculative = None if num_draft_tokens is None else "ngram"
        with fastgen.load("tiny-llama", speculative=speculative, num_draft_tokens=num_draft_tokens) as llm:
            for which, prompt in enumerate(prompts):
                watched = Watched(llm)
                output = llm.generate(prompt, max_new_tokens=120, temperature=0, ignore_eos=True, logprobs=1)
                assert watched.num_steps == 120 - output.metrics.accepted_drafts
                counted[which].append(watched.num_steps)
                assert output.token_ids == (answers[which] or output.token_ids)
                answers[which] = output.token_ids
                assert output.logprobs is not None
                for row in output.logprobs:
                    second, first = sorted(row.values())
                    assert first - second > 0.005
    assert counted == documented
