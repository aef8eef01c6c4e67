"""A call is large by all its answers together. Other requests have their turn while these are decoded."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from fastgen.runtime.requests.outputs import RequestMetrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.admission.request_limits import MANY_VALUES
from fastgen.serving.answers import Answers
from fastgen.serving.engine.messages import End, Progress
from fastgen.serving.engine.packed_logprobs import pack
from fastgen.serving.engine.request import EngineRequest
from fastgen.serving.http import sagemaker
from fastgen.serving.http.openai import chat, completions
from fastgen.serving.service import Running
from tests.serving.scripted import MODEL, ScriptedService, application, scripted_codec

NUM_TOKENS = 1000
NUM_PROMPTS = MANY_VALUES // (2 * NUM_TOKENS) + 1
assert NUM_PROMPTS < 20


def a_service() -> ScriptedService:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return ScriptedService(scripted_codec(template), lambda *_: ([5] * NUM_TOKENS, "length"), at_once=True)


def post(service: ScriptedService, path: str, body: dict[str, Any]) -> httpx2.Response:
    async def run() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=application(service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


def makers(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> set[str]:
    """Returns a set that gets the names of the threads that call the function ``name`` of ``owner``."""
    threads: set[str] = set()
    original: Callable[..., Any] = getattr(owner, name)

    def noted(*arguments: Any, **more: Any) -> Any:
        threads.add(threading.current_thread().name)
        return original(*arguments, **more)

    monkeypatch.setattr(owner, name, noted)
    return threads


@pytest.mark.parametrize(("num_prompts", "is_large"), [(1, False), (NUM_PROMPTS - 1, False), (NUM_PROMPTS, True)])
def test_many_small_answers_with_log_probabilities_are_made_on_another_thread(
    monkeypatch: pytest.MonkeyPatch, num_prompts: int, is_large: bool
) -> None:
    threads = makers(monkeypatch, completions._Writer, "whole")
    answer = post(a_service(), "/v1/completions", {"model": MODEL, "prompt": ["a"] * num_prompts, "logprobs": 0})
    assert len(answer.json()["choices"]) == num_prompts
    assert (threads != {threading.current_thread().name}) == is_large


@pytest.mark.parametrize(("num_prompts", "is_large"), [(1, False), (NUM_PROMPTS, True)])
def test_many_small_invocations_are_made_on_another_thread(
    monkeypatch: pytest.MonkeyPatch, num_prompts: int, is_large: bool
) -> None:
    threads = makers(monkeypatch, sagemaker._LmiFormat, "answer")
    asked = {"inputs": ["a"] * num_prompts, "parameters": {"details": True}}
    answer = post(a_service(), "/invocations", asked)
    assert len(answer.json()) == num_prompts
    assert (threads != {threading.current_thread().name}) == is_large


@pytest.mark.parametrize("num_tokens", [MANY_VALUES, MANY_VALUES + 1])
def test_many_tokens_make_a_chat_large(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    threads = makers(monkeypatch, chat._Writer, "whole")
    service = ScriptedService(
        a_service().codec, lambda *_: ([5] * num_tokens, "length"), max_model_len=1 << 20, at_once=True
    )
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    assert post(service, "/v1/chat/completions", asked).status_code == 200
    assert (threads != {threading.current_thread().name}) == (num_tokens > MANY_VALUES)


@pytest.mark.parametrize("num_tokens", [10, MANY_VALUES])
def test_many_log_probabilities_of_a_prompt_are_streamed_from_another_thread(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    threads = makers(monkeypatch, completions._Writer, "_start_logprobs")
    service = ScriptedService(a_service().codec, lambda *_: ([5], "length"), max_model_len=1 << 20, at_once=True)
    asked = {"prompt": [5] * num_tokens, "max_tokens": 1, "echo": True, "logprobs": 0, "stream": True}
    answer = post(service, "/v1/completions", asked | {"model": MODEL})
    first, *_ = (json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {"))
    assert len(first["choices"][0]["logprobs"]["tokens"]) >= num_tokens
    assert (threads != {threading.current_thread().name}) == (num_tokens == MANY_VALUES)


def test_the_size_of_an_answer_counts_tokens_and_log_probabilities_of_answer_and_prompt() -> None:
    service: Any = a_service()
    sampling = SamplingParams(max_new_tokens=3, logprobs=1, prompt_logprobs=1)
    request = EngineRequest(1, 3, sampling, 0.0)
    of_prompt = pack([None, {1: -0.5, 2: -1.0}, {3: -0.5}])
    end = End("length", None, None, RequestMetrics(queue_s=0.0, ttft_s=0.1), 0.1)
    request.add(Progress(1, 0, [5], pack([{5: -0.5}]), None, of_prompt))
    request.add(Progress(1, 0, [6, 7], pack([{6: -0.5}, {7: -0.5, 8: -1.0}]), end))
    running = Running(service, request, Answers([1, 2, 3], sampling, service.codec))
    asyncio.run(running.output())
    assert running.size == 3 + 2 * 3 + 2 * 3


def test_others_have_their_turn_between_the_answers_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    service, happened = a_service(), list[str]()
    original = Answers.add

    def add(answers: Answers, progress: Progress) -> Any:
        happened.append("an answer")
        return original(answers, progress)

    monkeypatch.setattr(Answers, "add", add)

    async def run() -> None:
        async def beat() -> None:
            while True:
                happened.append("a turn")
                await asyncio.sleep(0)

        beating = asyncio.create_task(beat())
        transport = httpx2.ASGITransport(app=application(service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.post("/v1/completions", json={"model": MODEL, "prompt": ["a"] * 5})
        beating.cancel()

    asyncio.run(run())
    assert happened.count("an answer") == 5
    assert all("an answer" not in pair[1:] or pair[0] == "a turn" for pair in itertools.pairwise(happened))
