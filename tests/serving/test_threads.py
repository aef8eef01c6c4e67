"""Work on other threads of a server, when the system has none and when there is much of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fastgen.serving.http.json_answers import make_large
from fastgen.serving.isolated.queue import in_turn
from fastgen.serving.refusals import UnavailableError
from fastgen.serving.service import Service
from fastgen.serving.threads import on_thread


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


def test_few_large_texts_are_made_at_once() -> None:
    def made(num_ids: int) -> Callable[[Callable[[], None]], Any]:
        service = Service({"model": "tiny-llama"})

        async def call(work: Callable[[], None]) -> None:
            async with service.making_text(num_ids):
                await on_thread(work)

        return call

    assert most_at_once(5, made(50_001)) == 2
    assert most_at_once(5, made(50_000)) > 2
