"""Steps of decodes that continue each other run from one tape each, and nothing of their answers shows it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import fastgen
from fastgen import LLM, SamplingParams
from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.capture.tape import Tape
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.runtime.engine import Engine
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.step import early_start
from fastgen.runtime.step.forward import TapedForward
from fastgen.runtime.step.steady_decodes import SteadyDecodes
from fastgen.runtime.step.step import Step


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with fastgen.load(
        "tiny-mistral", target="cpp", token_budget=64, max_num_seqs=8, block_size=4, prefix_caching=False
    ) as loaded:
        yield loaded


def engine_of(llm: LLM) -> Engine:
    assert llm._engine is not None
    return llm._engine


class Counted(SteadyDecodes):
    """Counts the steps that it continued, and those that it could not continue."""

    def __init__(self, steady: SteadyDecodes):
        self.__dict__ |= steady.__dict__
        self.num_continued = self.num_refused = self.num_started = self.num_dropped = 0

    def run(self, schedule: Schedule) -> list[int] | None:
        assert self.early is not None
        was_started = self.early.started is not None
        found = super().run(schedule)
        self.num_started += was_started
        self.num_dropped += was_started and found is None
        self.num_continued += found is not None
        self.num_refused += found is None
        return found


@pytest.fixture
def counted(llm: LLM) -> Iterator[Counted]:
    runner = engine_of(llm).runner
    assert runner.steady is not None
    before, runner.steady = runner.steady, Counted(runner.steady)
    yield runner.steady
    runner.steady = before


def without(llm: LLM, *arguments: Any, **fields: Any) -> Any:
    """Returns what the same engine answers if every step is built from its schedule."""
    runner = engine_of(llm).runner
    before, runner.steady = runner.steady, None
    try:
        return llm.generate(*arguments, **fields)
    finally:
        runner.steady = before


@pytest.fixture
def two_threads() -> Iterator[None]:
    """With one thread no other can start a step."""
    pool = load_thread_pool(KernelLoader(CppBuilder("portable")))
    before = pool.num_threads
    pool.resize(2)
    yield
    pool.resize(before)


def random_sampling(draw: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {"max_new_tokens": draw.choice((1, 9, 60)), "ignore_eos": True, "seed": draw.randrange(9)}
    fields |= draw.choice(
        (
            {},
            {"temperature": 1.3},
            {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
            {"temperature": 2.0, "min_p": 0.05},
            {"repetition_penalty": 1.2},
            {"logprobs": 2},
            {"max_new_tokens": 20, "min_new_tokens": 3, "stop_token_ids": [7, 9, 11]},
        )
    )
    return SamplingParams(**fields)


def test_a_random_history_has_the_same_answers(llm: LLM, counted: Counted) -> None:
    draw = random.Random(11)
    prompts = [[draw.randrange(300) for _ in range(draw.choice((1, 3, 17, 90)))] for _ in range(60)]
    samplings = [random_sampling(draw) for _ in prompts]
    outputs = llm.generate(prompts, samplings)
    expected = without(llm, prompts, samplings)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]
    assert [each.logprobs for each in outputs] == [each.logprobs for each in expected]
    assert counted.num_continued > 20  # among steps with chunks, penalties and log-probabilities


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_p": 0.8, "seed": 4}]
)
def test_all_but_the_first_steps_are_continued(llm: LLM, counted: Counted, fields: dict[str, Any]) -> None:
    """The prompts' step and the first one of decodes are built; 4 tokens fill a block, so tables grow meanwhile."""
    fields = {"max_new_tokens": 40, "ignore_eos": True, **fields}
    prompts = [[5, 6, 7], [8], [9] * 6]
    outputs = llm.generate(prompts, **fields)
    assert (counted.num_refused, counted.num_continued) == (2, 38)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in without(llm, prompts, **fields)]


@pytest.mark.parametrize(
    "fields", [{"presence_penalty": 0.5}, {"logprobs": 0}, {"logit_bias": {5: 1.0}}, {"repetition_penalty": 1.1}]
)
def test_what_depends_on_the_tokens_so_far_is_not(llm: LLM, counted: Counted, fields: dict[str, Any]) -> None:
    llm.generate([5, 6, 7], max_new_tokens=8, ignore_eos=True, **fields)
    assert counted.num_continued == 0


def test_a_step_whose_result_was_lost_is_computed_again(
    llm: LLM, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tape has advanced, and the schedule is made again: it is no continuation, and its tokens are the same."""
    runner, num_runs, sampling = engine_of(llm).runner, 0, SamplingParams(max_new_tokens=30, ignore_eos=True)
    expected = without(llm, [[5, 6, 7], [8, 9]], sampling)
    launch, sample, collect = runner.launch, runner.sample, runner.collect

    def run_twice(step: Step) -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs in (9, 15):
            in_vain = Step(step.schedule, 0.0, 0.0)
            launch(in_vain)
            sample(in_vain)
            collect(in_vain)
        launch(step)

    monkeypatch.setattr(runner, "launch", run_twice)
    outputs = llm.generate([[5, 6, 7], [8, 9]], sampling)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]
    assert counted.num_refused == 4


def test_a_continued_step_is_one_native_call(llm: LLM, counted: Counted) -> None:
    llm.generate([[5, 6], [7, 8]], max_new_tokens=6, ignore_eos=True)
    tape = counted._tapes[2]
    assert isinstance(tape, Tape)
    assert len(tape._stretches) == 1


def test_nothing_is_recorded_while_a_lone_request_is_answered(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []
    forward = engine_of(llm).runner.forward
    assert isinstance(forward, TapedForward)
    record = forward._pool.record

    def note(name: str, step: Callable[[], None]) -> Tape:
        recorded.append(name)
        return record(name, step)

    monkeypatch.setattr(forward._pool, "record", note)
    llm.generate([5] * 23, max_new_tokens=6, ignore_eos=True)
    assert recorded == ["a step of 23 tokens"]  # that of its prompt, and none of decodes


def test_later_requests_record_the_same_tape(llm: LLM, counted: Counted) -> None:
    llm.generate([[5, 6], [7, 8]], max_new_tokens=6, ignore_eos=True)
    tape = counted._tapes[2]
    assert isinstance(tape, Tape)
    llm.generate([[1, 2, 3], [4] * 50], max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=1)
    again = counted._forward.record_decodes(2, lambda: counted._prepare(2), counted._sampling.sample_held)
    assert isinstance(again, Tape)
    assert tape.difference(again) is None


def test_a_batch_that_was_built_over_is_not_continued(
    llm: LLM, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a new request is interrupted, and the request is cancelled. The same decodes come next at the
    same positions as before it arrived, but the batch holds the tokens of the new request.
    """
    engine, sampling = engine_of(llm), SamplingParams(max_new_tokens=20, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9]]
    expected = without(llm, prompts, sampling)
    generations = [engine.submit(prompt, sampling) for prompt in prompts]
    for _ in range(6):
        engine.step()
    assert counted.num_continued == 4
    new_request = engine.submit([40] * 30, sampling)

    def interrupted(batch: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.forward, "hidden", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.cancel(new_request)
    while engine.has_work:
        engine.step()
    assert [each.output().token_ids for each in generations] == [each.token_ids for each in expected]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("num_requests", "num_before"), [(1, 8), (3, 24), (6, 32)])
def test_steps_start_early_once_they_have_followed_each_other(
    llm: LLM, counted: Counted, num_requests: int, num_before: int
) -> None:
    """57 of 59 decodes continue, the first at position 4, with 4 positions in a block. After some of them the next ones
    start early, except those that begin a block and the one that would follow the last token.
    """
    prompts = [[5, 6, 7 + i] for i in range(num_requests)]
    outputs = llm.generate(prompts, max_new_tokens=60, ignore_eos=True, temperature=0)
    early = [position for position in range(4, 62)[num_before:] if position % 4]
    assert (counted.num_started, counted.num_dropped) == (len(early), 0)
    expected = without(llm, prompts, max_new_tokens=60, ignore_eos=True, temperature=0)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("what", ["stop token", "new_request", "cancel"])
def test_a_step_that_was_started_and_dropped_leaves_no_trace(
    llm: LLM, counted: Counted, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """At every place in a block. Every request that continues, arrives then or gets the blocks has the answer that it
    has alone.
    """
    monkeypatch.setattr(early_start, "STEPS_PER_DECODE", 1)
    engine, prompts = engine_of(llm), [[5, 6, 7], [8, 9]]
    plain = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=5)
    alone = [without(llm, [prompt], plain)[0].token_ids for prompt in (*prompts, [40] * 9)]
    for num_steps in range(8, 13):
        first = plain
        if what == "stop token":
            first = replace(plain, ignore_eos=False, stop_token_ids=[alone[0][num_steps]])
        generations = [engine.submit(prompts[0], first), engine.submit(prompts[1], plain)]
        for _ in range(num_steps):
            engine.step()
        if what == "new_request":
            generations.append(engine.submit([40] * 9, plain))
        if what == "cancel":
            engine.cancel(generations[0])
        while engine.has_work:
            engine.step()
            engine.check_integrity()
        for generation, expected in zip(generations, alone, strict=False):
            found = generation.output().token_ids
            ends_early = generation is generations[0] and what != "new_request"
            assert found == (expected[: len(found)] if ends_early else expected)
    assert counted.num_dropped > 0


@pytest.mark.usefixtures("two_threads")
def test_an_engine_is_closed_while_a_step_that_started_early_runs() -> None:
    for _ in range(3):
        with fastgen.load("tiny-mistral", target="cpp", num_threads=2, token_budget=64, max_num_seqs=2) as llm:
            engine = engine_of(llm)
            engine.submit([5, 6, 7], SamplingParams(max_new_tokens=40, ignore_eos=True))
            assert engine.runner.steady is not None
            assert engine.runner.steady.early is not None
            while engine.runner.steady.early.started is None:
                engine.step()


@pytest.mark.usefixtures("two_threads")
def test_two_engines_that_start_steps_early_do_not_disturb_each_other(llm: LLM, counted: Counted) -> None:
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=2)
    with fastgen.load("tiny-llama", target="cpp", num_threads=2, token_budget=64, max_num_seqs=2) as other:
        expected = [without(llm, [5, 6, 7], sampling), without(other, [5, 6, 7], sampling)]
        both = [(engine_of(each), engine_of(each).submit([5, 6, 7], sampling)) for each in (llm, other)]
        while any(engine.has_work for engine, _ in both):
            for engine, _ in both:
                engine.step()
    assert [generation.output().token_ids for _, generation in both] == [each.token_ids for each in expected]
    assert counted.num_started > 0
