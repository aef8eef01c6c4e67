"""Steps launched ahead on Triton kernels, interpreted or on a GPU: every kind of request gets the answer of an engine
that waits for the tokens of each step, over a cache that is too small, with requests cancelled meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine
from fastgen.runtime.llm import LLM
from fastgen.runtime.step.step import Step
from tests.fast import cases
from tests.kernel_device import DEVICE
from tests.runtime.checkpoints import VOCAB_SIZE, save_checkpoint, save_tokenizer, small_cache
from tests.runtime.soak import KINDS

BLOCK_SIZE = 4
pytestmark = pytest.mark.kernels
OPTIONS: dict[str, Any] = {
    "target": "triton",
    "device": DEVICE,
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 5,
    "token_budget": 16,
    "max_model_len": 44,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_checkpoint("llama", tmp_path_factory.mktemp("model"))
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module", params=cases([None, "ngram"], fast=["ngram"]))
def llm(request: pytest.FixtureRequest, directory: Path) -> Iterator[LLM]:
    cache = small_cache(directory, 11 * BLOCK_SIZE, **(OPTIONS | {"target": "torch"}))
    with fastgen.load(directory, speculative=request.param, kv_cache_memory=cache, **OPTIONS) as loaded:
        yield loaded


def requests(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    drawn = []
    for index, kind in enumerate(KINDS):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        prompt = (own[:3] * 4)[: rng.randint(6, 12)] if rng.random() < 0.5 else own
        seed = {"seed": index} if kind.get("temperature") else {}
        new_tokens = rng.randint(3, 4 if "beam_width" in kind else 9)
        drawn.append((prompt, SamplingParams(**kind, **seed, max_new_tokens=new_tokens, priority=index % 2)))
    return drawn


def serve(engine: Engine, drawn: list[tuple[list[int], SamplingParams]], cancelled: set[int]) -> list[GenerationOutput]:
    """All of them, a few more with every step; ``cancelled`` are those that do not see their last tokens."""
    generations: list[Generation] = []
    while engine.has_work or len(generations) < len(drawn):
        for prompt, sampling in drawn[len(generations) :][:2]:
            generations.append(engine.submit(prompt, sampling))
        engine.step()
        engine.check_integrity()
        for index in cancelled.intersection(range(len(generations))):
            if len(generations[index].completions[0].token_ids) >= 2:
                engine.cancel(generations[index])
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.capacity
    return [generation.output() for generation in generations]


def test_a_request_may_be_cancelled_while_its_prompt_is_scored(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The step under way has log-probabilities for a request that is gone when they come."""
    engine = llm._engine
    assert engine is not None
    asked = {"max_new_tokens": 3, "ignore_eos": True}
    scored, other = (
        engine.submit([5, 6, 7, 8], SamplingParams(**asked, **more)) for more in ({"prompt_logprobs": 1}, {})
    )
    engine.step()
    assert engine._in_flight is not None
    engine.cancel(scored)
    while engine.has_work:
        engine.step()
    assert not caplog.records
    reasons = [each.output().completions[0].finish_reason for each in (scored, other)]
    assert reasons == ["cancelled", "length"]


@pytest.mark.slow
def test_every_kind_of_request_gets_the_answer_of_one_step_after_another(llm: LLM) -> None:
    engine, rng = llm._engine, random.Random(3)
    assert engine is not None
    drawn = requests(rng)
    num_ahead = 0
    launch = engine.runner.launch

    def counted(step: Step) -> None:
        nonlocal num_ahead
        num_ahead += step.is_ahead
        launch(step)

    engine.runner.launch = counted  # type: ignore[method-assign]
    engine._runs_ahead = False
    expected = serve(engine, drawn, set())
    assert num_ahead == 0
    engine._runs_ahead = True
    cancelled = {1, 4, 7}
    found = serve(engine, drawn, cancelled)
    assert num_ahead > 20
    assert sum(each.metrics.preemptions for output in found for each in output.completions)
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        for here, there in zip(one.completions, other.completions, strict=True):
            if index in cancelled:
                assert here.token_ids[: len(there.token_ids)] == there.token_ids
                continue
            assert (here.token_ids, here.text, here.finish_reason) == (there.token_ids, there.text, there.finish_reason)
            assert here.score == pytest.approx(there.score, abs=1e-5)
            for ours, theirs in zip(here.logprobs or [], there.logprobs or [], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5)
