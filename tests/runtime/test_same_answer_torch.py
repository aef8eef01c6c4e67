"""The ``torch`` target keeps the same promise as the one that is loaded by default, by the margin rule."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import fastgen
from fastgen import GenerationOutput
from fastgen.runtime.llm import LLM
from fastgen.runtime.step.step import Step
from tests.fast import cases
from tests.runtime.checkpoints import VOCAB_SIZE, families, save_checkpoint, small_cache
from tests.runtime.held import assert_nothing_held
from tests.runtime.test_same_answer import (
    NUM_REQUESTS,
    PROMPTS,
    SAMPLINGS,
    SMALL_CACHE,
    assert_same,
    poison,
)


@pytest.fixture(scope="module", params=families("mistral"))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[GenerationOutput]:
    """Each request by itself, with whole distributions to judge margins by."""
    with fastgen.load(directory, target="torch") as llm:
        return [
            llm.generate(prompt, replace(sampling, logprobs=VOCAB_SIZE))
            for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
        ]


def answers(llm: LLM, seed: int) -> list[GenerationOutput]:
    """All requests at once in a drawn order of arrival, every buffer poisoned before each step."""
    assert llm._engine is not None
    launch = llm._engine.runner.launch

    def poisoned_launch(step: Step) -> None:
        poison(llm)
        launch(step)

    llm._engine.runner.launch = poisoned_launch  # type: ignore[method-assign]
    order = random.Random(seed).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    outputs = llm.generate([PROMPTS[index] for index in order], [SAMPLINGS[index] for index in order])
    assert_nothing_held(llm._engine)
    by_index = dict(zip(order, outputs, strict=True))
    return [by_index[index] for index in range(NUM_REQUESTS)]


@pytest.mark.parametrize("token_budget", [pytest.param(8, marks=pytest.mark.slow), 48, 512])
def test_among_forty_others_in_a_drawn_order(directory: Path, alone: list[GenerationOutput], token_budget: int) -> None:
    with fastgen.load(directory, target="torch", token_budget=token_budget, kv_cache_memory="1MiB") as llm:
        assert_same(alone, answers(llm, token_budget))


@pytest.mark.parametrize("token_budget", cases([9, 32], fast=[32]))
def test_with_preemptions(directory: Path, alone: list[GenerationOutput], token_budget: int) -> None:
    options = {"target": "torch", "token_budget": token_budget, "max_num_seqs": 8}
    with fastgen.load(directory, kv_cache_memory=small_cache(directory, SMALL_CACHE, **options), **options) as llm:
        outputs = answers(llm, token_budget)
    assert sum(output.metrics.preemptions for output in outputs) >= 5  # with a window a few blocks go a long way
    assert_same(alone, outputs)
