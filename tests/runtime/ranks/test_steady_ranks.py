"""Steady decodes of several ranks take no plans, and give the answers of one rank. In int8 these are the same bits."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen import LLM, SamplingParams
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.ranks.decodes import LedDecodes
from fastgen.runtime.step.mailbox import Mailbox
from tests.fast import cases
from tests.runtime.ranks.models import VOCAB_SIZE, prompts, save_family
from tests.runtime.ranks.test_faults_ranks import followers, is_there

OPTIONS: dict[str, Any] = {"quantize": "int8", "token_budget": 32, "max_num_seqs": 6, "block_size": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def one(directory: Path) -> Iterator[LLM]:
    with fastgen.load(directory, **OPTIONS) as llm:
        yield llm


@pytest.fixture(
    scope="module",
    params=[(2, 4), *(pytest.param(each, marks=pytest.mark.slow) for each in ((2, 2), (4, 4)))],
    ids=lambda sizes: f"{sizes[0]} ranks, {sizes[1]} threads",
)
def ranks(directory: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Ranks of one and of two threads; with two threads each, steps start early."""
    count, num_threads = request.param
    with fastgen.load(directory, tensor_parallel=count, num_threads=num_threads, **OPTIONS) as llm:
        yield llm


def random_sampling(draw: random.Random) -> SamplingParams:
    """Some parameters let decodes be steady, and others do not."""
    return SamplingParams(
        max_new_tokens=draw.randint(1, 90),
        temperature=draw.choice([0.0, 0.0, 0.8]),
        seed=draw.randrange(1000),
        presence_penalty=draw.choice([0.0, 0.0, 0.0, 0.5]),
        stop_token_ids=tuple(draw.sample(range(3, VOCAB_SIZE), draw.choice([0, 0, 4]))),
        ignore_eos=True,
    )


def history(llm: LLM, seed: int) -> list[tuple[list[int], str | None]]:
    """The tokens of requests that arrive and are cancelled at random times, and how each ended."""
    draw, engine = random.Random(seed), llm._engine
    assert engine is not None
    waiting = [(prompt, random_sampling(draw)) for prompt in prompts(14)]
    generations: list[Generation] = []
    while waiting or engine.has_work:
        if waiting and (not engine.has_work or draw.random() < 0.06):
            prompt, sampling = waiting.pop()
            generations.append(engine.submit(prompt, sampling))
        if generations and draw.random() < 0.01:
            engine.cancel(generations[draw.randrange(len(generations))])
        engine.step()
    engine.check_integrity()
    return [(list(each.completions[0].token_ids), each.completions[0].finish_reason) for each in generations]


@pytest.mark.parametrize("seed", cases(range(6), fast=[0]))
def test_random_histories_have_the_same_answers(one: LLM, ranks: LLM, seed: int) -> None:
    assert history(ranks, seed) == history(one, seed)


def test_a_steady_decode_takes_no_plan(ranks: LLM) -> None:
    """One plan begins the run. Each block begins in the middle of it, and its entry comes with a message."""
    before = ranks.metrics().rank_plans_total
    output = ranks.generate([5, 6, 7], max_new_tokens=100, temperature=0, ignore_eos=True)
    assert len(output.token_ids) == 100
    assert ranks.metrics().rank_plans_total - before <= 6


def test_entries_that_a_message_has_no_room_for_take_a_plan(
    one: LLM, ranks: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one.generate(prompts(3), max_new_tokens=60, temperature=0, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(Mailbox, "has_room_for", lambda mailbox, count: False)
        found = ranks.generate(prompts(3), max_new_tokens=60, temperature=0, ignore_eos=True)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_in_a_steady_decode_ends_the_model(directory: Path, fault: signal.Signals) -> None:
    before = set(followers(os.getpid()))
    with fastgen.load(directory, tensor_parallel=2, num_threads=4, **OPTIONS) as llm:
        (process,) = set(followers(os.getpid())) - before
        assert llm._engine is not None
        steady = llm._engine.runner.steady
        assert steady is not None
        assert isinstance(steady._others, LedDecodes)
        stream = llm.stream([5, 6, 7], max_new_tokens=140, ignore_eos=True)
        while not steady._others._is_running:
            next(stream)
        os.kill(process, fault)
        for _ in stream:
            pass
        assert "the model has to be loaded again" in (stream.output.error or "")
    assert not is_there(process)
