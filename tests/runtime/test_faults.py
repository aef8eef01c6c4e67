"""An exception at every phase of a step ends the requests it must and no other, and the engine continues.

A model whose requests get the same bits beside any others runs some of every kind over a cache that is too small. In
some step one phase fails; a request outside that step must get the answer that it gets alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine
from fastgen.runtime.flight.ring_events import StepRecord
from fastgen.runtime.llm import LLM
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.step.faults import cause_of
from tests.runtime.checkpoints import VOCAB_SIZE, save_checkpoint, save_tokenizer

NUM_REQUESTS = 14
FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3, "n": 3},
    {"repetition_penalty": 1.3, "logprobs": 2},
    {"prompt_logprobs": 1},
    {"temperature": 1.1, "top_k": 7, "seed": 5, "stop": ["zq"]},
    {"beam_width": 2, "n": 2},
]

Part = Callable[[Engine], Any]
# Phases whose failure ends all requests of the step: the object and its method. For phases within the commit only calls
# from there fail.
RUN: dict[str, tuple[Part, str]] = {
    "copy blocks": (lambda engine: engine.runner, "_copy_blocks"),
    "build batch": (lambda engine: engine.runner.input_batch, "build"),
    "prepare sampling": (lambda engine: engine.runner.sampler, "prepare"),
    "forward": (lambda engine: engine.runner.forward, "hidden"),
    "logits": (lambda engine: engine.runner.forward, "logits"),
    "sample": (lambda engine: engine.runner.sampler, "launch"),
    "prompt log-probabilities": (lambda engine: engine.runner, "_launch_scores"),
    "collect": (lambda engine: engine.runner, "collect"),
    "commit": (lambda engine: engine.scheduler, "commit"),
    "commit: copies": (lambda engine: engine.scheduler.kv, "copies_done"),
    "commit: advance": (lambda engine: engine.scheduler.kv, "advance"),
    "commit: publish": (lambda engine: engine.scheduler.kv.prefix_cache, "publish"),
    "commit: free": (lambda engine: engine.scheduler.kv.pool, "free"),
}
# Phases before there is a step.
PLAN: dict[str, tuple[Part, str]] = {
    "schedule": (lambda engine: engine.scheduler, "schedule"),
    "policy": (lambda engine: engine.scheduler.policy, "plan"),
    "look up a prefix": (lambda engine: engine.scheduler.kv, "attach_cached"),
    "allocate": (lambda engine: engine.scheduler.kv, "allocate"),
    "take blocks": (lambda engine: engine.scheduler.kv.pool, "allocate"),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = save_checkpoint("mistral", tmp_path_factory.mktemp("faults"))
    save_tokenizer(directory)
    with fastgen.load(
        directory, target="cpp", max_num_seqs=4, token_budget=24, block_size=4, max_model_len=60, kv_cache_memory="36KB"
    ) as loaded:
        yield loaded


@pytest.fixture
def engine(llm: LLM) -> Engine:
    assert llm._engine is not None
    return llm._engine


ADVICE = "out of memory, lower token_budget, max_num_seqs, max_model_len or kv_cache_memory when loading"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (MemoryError(), f"{ADVICE} (MemoryError)"),
        (torch.OutOfMemoryError("much"), f"{ADVICE} (OutOfMemoryError: much)"),
        (RuntimeError("can't allocate memory: 9"), f"{ADVICE} (RuntimeError: can't allocate memory: 9)"),
    ],
)
def test_where_memory_ran_out_the_cause_says_what_to_lower(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(7)
    head = [rng.randrange(VOCAB_SIZE) for _ in range(9)]
    drawn = []
    for index in range(NUM_REQUESTS):
        prompt = head[: rng.choice([0, 8, 9])] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 25))]
        fields = FIELDS[index % len(FIELDS)] | {"ignore_eos": True, "max_new_tokens": rng.randint(1, 14)}
        drawn.append((prompt, SamplingParams(**fields)))
    return drawn


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[GenerationOutput]:
    return [llm.generate(prompt, sampling) for prompt, sampling in requests()]


class Fault:
    """Lets the ``calls``-th call of a phase's method from now on fail, or ``repeats`` calls from there, and notes which
    requests were in the step that was scheduled last.
    """

    def __init__(self, engine: Engine, phase: str, error: BaseException, *, calls: int, repeats: int = 1):
        get_owner, self._name = (RUN | PLAN)[phase]
        self._owner, self._error, self._engine = get_owner(engine), error, engine
        self._method, self._commit = getattr(self._owner, self._name), engine.scheduler.commit
        self._first, self._end, self._num_calls = calls, calls + repeats, 0
        self._counts = not phase.startswith("commit:")
        self.hit: set[int] | None = None

    def install(self, patch: pytest.MonkeyPatch) -> Fault:
        if not self._counts:
            patch.setattr(self._engine.scheduler, "commit", self._in_commit)
        patch.setattr(self._owner, self._name, self)
        return self

    def _in_commit(self, schedule: Schedule, postponed: Collection[Sequence]) -> None:
        self._counts = True
        try:
            self._commit(schedule, postponed)
        finally:
            self._counts = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._num_calls += self._counts
        if not self._counts or not self._first <= self._num_calls < self._end:
            return self._method(*arguments, **options)
        scheduled = next((e for e in reversed(self._engine.recorder._ring) if isinstance(e, StepRecord)), None)
        assert scheduled is not None
        self.hit = {request_id for request_id, _ in (*scheduled.decodes, *(key for key, *_ in scheduled.chunks))}
        raise type(self._error)(*self._error.args)


def serve(engine: Engine, drawn: list[tuple[list[int], SamplingParams]]) -> list[Generation]:
    """Serves all requests, some of them submitted while others run. Integrity holds after every step."""
    generations: list[Generation] = []
    for step in range(2000):
        for prompt, sampling in drawn[len(generations) : 5 + step // 3]:
            generations.append(engine.submit(prompt, sampling))
        if not engine.has_work and len(generations) == len(drawn):
            break
        engine.step()
        engine.check_integrity()
    assert len(generations) == len(drawn)
    assert not engine.has_work
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.capacity
    return generations


def same(one: GenerationOutput, other: GenerationOutput) -> bool:
    def facts(output: GenerationOutput) -> Any:
        return [
            (each.token_ids, each.text, each.finish_reason, each.logprobs, each.prompt_logprobs)
            for each in output.completions
        ]

    return bool(facts(one) == facts(other))


def has_failed(generation: Generation) -> bool:
    return any(each.finish_reason == "error" for each in generation.output().completions)


def begins(failed: GenerationOutput, whole: GenerationOutput) -> bool:
    if failed.completions[0].score is not None:  # beams: the best so far need not be the beginning of the best
        return True
    pairs = zip(failed.completions, whole.completions, strict=True)
    return all(one.token_ids == other.token_ids[: len(one.token_ids)] for one, other in pairs)


def check(generations: list[Generation], alone: list[GenerationOutput], failed: set[int], text: str) -> None:
    for generation, expected in zip(generations, alone, strict=True):
        output = generation.output()
        if generation.request.request_id in failed:
            errors = {each.error for each in output.completions if each.finish_reason == "error"}
            assert len(errors) == 1
            assert text in errors.pop()
            assert begins(output, expected)
        else:
            assert same(output, expected)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("broken"),
        pytest.param(torch.OutOfMemoryError("no room"), marks=pytest.mark.slow),
        pytest.param(MemoryError(), marks=pytest.mark.slow),
    ],
    ids=["RuntimeError", "OutOfMemoryError", "MemoryError"],
)
@pytest.mark.parametrize("phase", RUN)
def test_a_step_that_cannot_be_run_ends_its_requests(
    engine: Engine, alone: list[GenerationOutput], monkeypatch: pytest.MonkeyPatch, phase: str, error: Exception
) -> None:
    for calls in (1, 2, 6):
        with monkeypatch.context() as patch:
            fault = Fault(engine, phase, error, calls=calls).install(patch)
            generations = serve(engine, requests())
        assert fault.hit
        assert len(fault.hit) < NUM_REQUESTS
        text = "broken" if isinstance(error, RuntimeError) and "broken" in str(error) else "lower token_budget"
        check(generations, alone, fault.hit, text)


@pytest.mark.parametrize("phase", PLAN)
def test_a_schedule_that_cannot_be_made_once_is_made_again(
    engine: Engine, alone: list[GenerationOutput], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    for calls in (1, 3, 8):
        with monkeypatch.context() as patch:
            fault = Fault(engine, phase, RuntimeError("broken"), calls=calls).install(patch)
            generations = serve(engine, requests())
        assert fault.hit is not None
        check(generations, alone, set(), "")


@pytest.mark.parametrize("phase", PLAN)
def test_a_schedule_that_can_never_be_made_ends_what_runs_and_what_is_next(
    engine: Engine, alone: list[GenerationOutput], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    with monkeypatch.context() as patch:
        Fault(engine, phase, RuntimeError("broken"), calls=9, repeats=2).install(patch)
        generations = serve(engine, requests())
    failed = {each.request.request_id for each in generations if has_failed(each)}
    assert 0 < len(failed) <= engine.scheduler.max_num_seqs + 1
    check(generations, alone, failed, "RuntimeError: broken")
    with monkeypatch.context() as patch:
        Fault(engine, phase, RuntimeError("broken"), calls=1, repeats=10**9).install(patch)
        generations = serve(engine, requests())
    assert all(map(has_failed, generations))


@pytest.mark.parametrize("method", ["append", "finish", "make"])
def test_text_that_cannot_be_made_ends_its_request(
    engine: Engine, alone: list[GenerationOutput], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    drawn = requests()
    of_broken = [drawn[index][0] for index in (1, 4, 6)]  # of one with stop strings too, which is decoded as it grows
    make = engine.answers.new_detokenizer
    assert make is not None

    def fails(*arguments: Any) -> Any:
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "broken")

    def make_broken(prompt_ids: Any, sampling: SamplingParams) -> Any:
        detokenizer = make(prompt_ids, sampling)
        if list(prompt_ids) in of_broken:
            if method == "make":
                fails()
            monkeypatch.setattr(detokenizer, method, fails)
        return detokenizer

    monkeypatch.setattr(engine.answers, "new_detokenizer", make_broken)
    generations = serve(engine, drawn)
    failed = {generations[index].request.request_id for index in (1, 4, 6)}
    check(generations, alone, failed, "UnicodeDecodeError: ")


def test_a_policy_that_cannot_learn_ends_no_request_and_is_logged_once(
    engine: Engine,
    alone: list[GenerationOutput],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine.scheduler, "observe", fails)
    with caplog.at_level("ERROR"):
        check(serve(engine, requests()), alone, set(), "")
    assert len([record for record in caplog.records if "cannot learn" in record.message]) == 1


@pytest.mark.parametrize("method", ["report", "advance"])
def test_a_beam_search_that_breaks_ends_its_request(
    engine: Engine, alone: list[GenerationOutput], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    broken: list[Generation] = []
    submit = engine.submit

    def submit_broken(prompt: list[int], sampling: SamplingParams) -> Generation:
        generation = submit(prompt, sampling)
        if generation.beams is not None and not broken:
            broken.append(generation)
            call, num_calls = getattr(generation.beams, method), 0

            def fails(*arguments: Any) -> Any:
                nonlocal num_calls
                num_calls += 1
                if num_calls == 3:
                    raise RuntimeError("broken")
                return call(*arguments)

            setattr(generation.beams, method, fails)
        return generation

    monkeypatch.setattr(engine, "submit", submit_broken)
    generations = serve(engine, requests())
    check(generations, alone, {broken[0].request.request_id}, "RuntimeError: broken")


@pytest.mark.parametrize("phase", [*RUN, *PLAN])
def test_an_interrupt_is_the_callers(
    engine: Engine, alone: list[GenerationOutput], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """If Ctrl-C is not held back. A step that was being committed is half done then, and cannot be trusted."""
    generations = [engine.submit(*request) for request in requests()[:6]]
    engine.step()

    def run_on() -> None:
        while engine.has_work:
            engine.step()

    with monkeypatch.context() as patch:
        Fault(engine, phase, KeyboardInterrupt(), calls=2).install(patch)
        with pytest.raises(KeyboardInterrupt):
            run_on()
    if phase.startswith("commit:"):
        engine.cancel_all()
        engine.check_integrity()
        return
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    check(generations, alone[:6], set(), "")
