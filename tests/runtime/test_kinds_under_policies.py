"""Beams, drafts and structured output beside each other under every policy: the same bits as alone by the default."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.scheduling.policies import POLICIES, DynamicBatching, StaticBatching
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.step.step import Step
from tests.fast import cases
from tests.runtime.checkpoints import families
from tests.runtime.constrained import VOCAB_SIZE, pattern, save_writer

LONGEST = 16  # new tokens
KINDS: list[dict[str, Any]] = [
    {"beam_width": 3, "n": 2},
    {"temperature": 1.0, "response_format": pattern("(ab|cd|[0-9]+x)*").format},
    {"ignore_eos": True, "repetition_penalty": 1.2},
    {"beam_width": 2, "length_penalty": 0.0, "stop_token_ids": list(range(3, 40))},
    {"n": 2, "temperature": 0.8, "response_format": {"type": "json_object"}},
    {"ignore_eos": True, "temperature": 0.7},
]
Result = list[tuple[object, ...]]


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(4)
    lengths = [rng.choice([1, 5, 20, 40]) for _ in range(count)]
    return [
        (
            [rng.randrange(VOCAB_SIZE - 10) for _ in range(length)],
            SamplingParams(max_new_tokens=rng.randint(3, LONGEST), seed=index, **KINDS[index % len(KINDS)]),
        )
        for index, length in enumerate(lengths)
    ]


REQUESTS = requests(4 * len(KINDS))


@pytest.fixture(scope="module", params=families("mistral", of=("llama", "mistral")))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_writer(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[GenerationOutput]:
    with fastgen.load(directory, target="cpp", block_size=4) as llm:
        return [llm.generate(*request) for request in REQUESTS]


def result_of(output: GenerationOutput) -> Result:
    return [(each.text, each.token_ids, each.finish_reason, each.score) for each in output.completions]


class Spy:
    """Drafts the given answers, half of the time with a wrong token after them; counts what the steps hold.

    Policies learn step times that it makes up, so that what is scheduled does not depend on how busy a machine is.
    """

    def __init__(self, llm: fastgen.LLM, answers: list[GenerationOutput]):
        assert llm._engine is not None
        self.engine = llm._engine
        self.rng, self.rng_of_times = random.Random(1), random.Random(2)
        self.answers = {
            (tuple(prompt), sampling.seed, each.index): each.token_ids
            for (prompt, sampling), output in zip(REQUESTS, answers, strict=True)
            for each in output.completions
        }
        self.num_drafts = self.num_accepted = self.num_preempted = 0
        self.collect = self.engine.runner.collect
        self.engine.runner.collect = self  # type: ignore[method-assign, assignment]
        self.engine.scheduler._propose_drafts = self.propose
        self.observe = self.engine.scheduler.observe
        self.engine.scheduler.observe = self.observe_made_up  # type: ignore[method-assign]

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        request = sequence.request
        answer = self.answers[(tuple(request.prompt_ids), request.sampling.seed, sequence.index)]
        num_generated = sequence.num_tokens - sequence.num_prompt_tokens
        room = request.sampling.max_new_tokens - num_generated - 1
        drafts = answer[num_generated : num_generated + self.rng.randint(0, 3)]
        drafts += [self.rng.randrange(VOCAB_SIZE)] * self.rng.randint(0, 1)
        return drafts[: min(max_tokens, room)] if room > 0 and sequence.matcher is None else []

    def observe_made_up(self, schedule: Schedule, step_s: float) -> None:
        self.observe(schedule, (5e-4 + 8e-5 * schedule.num_tokens) * self.rng_of_times.uniform(0.9, 1.1))

    def __call__(self, step: Step) -> None:
        self.collect(step)
        self.num_drafts += sum(len(chunk.drafts) for chunk in step.schedule.chunks)
        self.num_accepted += sum((step.num_accepted or {}).values())
        self.num_preempted += len(step.schedule.preempted)


def options_of(name: str) -> dict[str, Any]:
    """Batches are smaller than what is asked, so that there are several."""
    if name == "bounded":
        return {"itl_target_ms": 2.0}
    given = {"static": StaticBatching(6), "dynamic": DynamicBatching(4, max_delay_s=0.001)}
    return {"policy": given.get(name, name)}


@pytest.mark.parametrize("name", cases([*POLICIES, "bounded"], fast=["splitfuse", "prefill_first", "bounded"]))
def test_the_same_answers_under_every_policy(directory: Path, alone: list[GenerationOutput], name: str) -> None:
    sizes: dict[str, Any] = {"token_budget": 24, "max_num_seqs": 6, "block_size": 4, "speculative": "ngram"}
    with fastgen.load(directory, target="cpp", kv_cache_memory="1MiB", **sizes) as llm:
        assert llm._engine is not None
        block_bytes = llm._engine.runner.kv_cache.size_bytes // llm.config.num_blocks
        forks, groups = llm._engine.scheduler.forks, llm.config.num_kv_groups
    most = max(
        forks.blocks_needed(len(prompt), len(prompt) + each.max_new_tokens, each.beam_width)
        for prompt, each in REQUESTS
    )
    cache = block_bytes * (most + 2 * groups)
    with fastgen.load(directory, target="cpp", kv_cache_memory=cache, **options_of(name), **sizes) as llm:
        spy = Spy(llm, alone)
        found = llm.generate([prompt for prompt, _ in REQUESTS], [sampling for _, sampling in REQUESTS])
        assert llm._engine is not None
        llm._engine.check_integrity()
        is_windowed = any(llm._engine.scheduler.kv.windows)
    assert [result_of(output) for output in found] == [result_of(output) for output in alone]
    assert spy.num_drafts > spy.num_accepted > 5
    assert spy.num_preempted or is_windowed  # what windows leave behind makes room
