"""Work on other threads of a server, when the system has none and when there is much of it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from fastgen.collector import collector_off
from fastgen.errors import InvalidArgumentError
from fastgen.serving.http import json_answers
from fastgen.serving.http.errors import error_response
from fastgen.serving.http.generate import GenerateBody, generate_routes
from fastgen.serving.http.json_answers import make_large
from fastgen.serving.http.openai.validation import FewErrors
from fastgen.serving.isolated.queue import WorkQueue, in_turn
from fastgen.serving.refusals import OverloadedError, UnavailableError
from fastgen.serving.service import Service
from fastgen.serving.threads import on_thread
from tests.serving.scripted import ScriptedService, application, scripted_codec


async def in_a_queue(work: Callable[[], Any]) -> Any:
    queue = WorkQueue("pieces of work wait here", max_running=1, max_waiting=1, retry_after_s=7.0)
    try:
        return await queue.run(work)
    finally:
        queue.close()


def test_work_returns_or_raises_what_it_does() -> None:
    def fail() -> None:
        raise RuntimeError("of the work")

    async def run() -> None:
        assert await on_thread(lambda: threading.current_thread() is threading.main_thread()) is False
        with ThreadPoolExecutor(1, "mine") as mine:
            assert (await on_thread(lambda: threading.current_thread().name, mine)).startswith("mine")
        with pytest.raises(RuntimeError, match="of the work"):
            await on_thread(fail)

    asyncio.run(run())


@pytest.mark.parametrize("call", [on_thread, lambda work: in_turn(len, work)])
def test_a_system_without_threads_is_a_refusal(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(UnavailableError, match="no thread for this now: can't start new thread"):
                await call(lambda: 3)
        assert await call(lambda: 4) == 4

    asyncio.run(run())


def most_at_once(num_calls: int, call: Callable[[Callable[[], None]], Any]) -> int:
    """Returns how many of so many calls ran at once at most."""
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    async def run() -> None:
        await asyncio.gather(*(call(work) for _ in range(num_calls)))

    asyncio.run(run())
    return most


def test_large_answers_are_made_one_at_a_time() -> None:
    assert most_at_once(4, make_large) == 1
    assert most_at_once(4, on_thread) > 1


def test_texts_of_so_many_token_ids_are_made_at_once_and_no_more() -> None:
    service = Service({"model": "tiny-llama"})
    with service.making_text(5_000_000):  # one call alone has what it asks for
        with service.making_text(10_000), service.making_text(10_000):
            pass
        with (
            pytest.raises(OverloadedError, match="texts of 5,000,000 token ids are made now") as refused,
            service.making_text(10_001),
        ):
            pass
        assert refused.value.retry_after_s == 5.0
    half = service.making_text(1_000_000)
    with half, service.making_text(1_000_000), pytest.raises(OverloadedError), service.making_text(10_001):
        pass
    with pytest.raises(ZeroDivisionError), service.making_text(2_000_000):
        raise ZeroDivisionError
    with service.making_text(2_000_000):
        pass


class Large:
    """Stands for a large body."""


@pytest.mark.parametrize("call", [on_thread, make_large, lambda work: in_turn(len, work), in_a_queue])
def test_nothing_keeps_what_failed_on_a_thread_or_was_refused(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle server collects no garbage."""
    left: list[weakref.ref[Large]] = []
    begun: list[int] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def ask(error: type[Exception]) -> None:
        large = Large()
        left.append(weakref.ref(large))

        def fail(large: Large = large) -> None:
            begun.append(1)
            raise ZeroDivisionError

        with suppress(error):
            await call(fail)

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            patch.setattr(json_answers, "_LARGE", ThreadPoolExecutor(1))
            await ask(UnavailableError)
            assert left[-1]() is None
        for _ in range(3):
            await ask(ZeroDivisionError)
            await asyncio.sleep(0.05)
            assert left[-1]() is None
        assert len(begun) == 3, "what was refused is not done later"

    with collector_off():
        asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "scripted", "prompt": "a"}),
        ("/v1/chat/completions", {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/generate", {"prompt": "a"}),
    ],
)
def test_a_body_that_is_refused_after_its_text_was_encoded_is_freed(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = scripted_codec()
    service: Any = ScriptedService(codec, lambda prompt_ids, sampling: ([5], "length"))
    app = application(service)
    app.include_router(generate_routes(service))

    def refuse(*given: Any, **named: Any) -> Any:
        raise InvalidArgumentError("too many tokens")

    for name in ("encode", "encode_plain", "encode_chat", "encode_text"):
        monkeypatch.setattr(codec, name, refuse, raising=False)

    async def run() -> None:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost") as client:
            for _ in range(3):
                answered = await client.post(path, json=body)
                assert (answered.status_code, "too many tokens" in answered.text) == (400, True), answered.text
        await asyncio.sleep(0.01)
        assert all(each in before for each in map(id, bodies()))

    def bodies() -> list[object]:
        return [each for each in gc.get_objects() if issubclass(type(each), FewErrors | GenerateBody)]

    gc.collect()
    others = bodies()  # of other tests, which are held
    before = set(map(id, others))
    with collector_off():
        asyncio.run(run())


def test_an_error_that_is_answered_holds_no_frames() -> None:
    def fail() -> None:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as error:
            raise InvalidArgumentError("of a field") from error

    with pytest.raises(InvalidArgumentError) as failed:
        fail()
    assert error_response(failed.value).status_code == 500
    cause = failed.value.__cause__
    assert cause is not None
    assert (failed.value.__traceback__, cause.__traceback__) == (None, None)


def test_an_error_that_is_behind_itself_is_answered() -> None:
    """So is the refusal of a body that FastAPI gives an error of its own."""
    first, second = InvalidArgumentError("of a field"), ZeroDivisionError()
    first.__context__, second.__cause__ = second, first
    assert error_response(first).status_code == 500
