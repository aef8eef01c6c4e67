"""Engines that fall silent, die again and again, or are drained, with processes that a test plays."""

from __future__ import annotations

import asyncio
import itertools
import logging
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from fastgen.runtime.requests.outputs import RequestMetrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.api_keys import API_KEY_VARIABLE
from fastgen.serving.engine import restarts, supervisor
from fastgen.serving.engine.client import EngineClient
from fastgen.serving.engine.messages import End, Progress, Report, Submit
from fastgen.serving.options import Limits
from fastgen.serving.refusals import EngineDiedError, UnavailableError
from fastgen.serving.service import Service
from fastgen.serving.watch import Watch
from tests.serving.fake_engine import FACTS, FakeProcess, fake_processes
from tests.serving.scripted import application, scripted_codec

SAMPLING = SamplingParams(max_new_tokens=10)
BEAT_S = 0.01


@pytest.fixture(autouse=True)
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_BEAT_S", BEAT_S)


def an_engine(timeout_s: float) -> EngineClient:
    return EngineClient({}, Watch(Limits(), lambda: True), timeout_s=timeout_s)


async def until_ended(process: FakeProcess) -> None:
    while not process.has_ended.is_set():
        await asyncio.sleep(0.001)


async def until_ready(engine: EngineClient, started: list[FakeProcess], number: int) -> None:
    """Waits until so many processes have been started and the last one is ready, or no more are started."""
    while len(started) < number and engine.state != "failed":
        await asyncio.sleep(0.001)
    while engine.state not in ("ready", "failed"):
        await asyncio.sleep(0.001)


def whole_answer(number: int) -> Report:
    """Returns the report of a complete answer of one token."""
    end = End("stop", None, None, RequestMetrics(queue_s=0.0, ttft_s=0.1), 0.0)
    return Report([], [Progress(number, 0, [5], None, end)], [], [], None)


def test_who_comes_too_early_is_told_to_wait_as_long_as_the_last_load_took(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine(timeout_s=60.0)

    def told_s() -> float:
        with pytest.raises(UnavailableError) as refused:
            engine.submit([1], SAMPLING, is_stream=True, arrived_s=0.0)
        return refused.value.retry_after_s

    async def run() -> None:
        async with fake_processes(engine, monkeypatch) as started:
            assert told_s() == 1.0, "nothing was loaded yet"
            await engine.start()
            started[0].die(3)
            while len(started) < 2:
                await asyncio.sleep(0)  # not longer, since the next one is ready soon
            assert told_s() == FACTS.load_s
            await until_ready(engine, started, 2)

    asyncio.run(run())


def test_a_silent_engine_is_ended_and_another_started(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine(timeout_s=5 * BEAT_S)

    async def run() -> None:
        async with fake_processes(engine, monkeypatch) as started:
            await engine.start()
            request = engine.submit([1], SAMPLING, is_stream=True, arrived_s=0.0)
            with pytest.raises(EngineDiedError, match=r"was silent for .* s and was ended"):
                await request.news()
            assert started[0].has_ended.is_set()
            await until_ready(engine, started, 2)

    asyncio.run(run())


def test_time_in_which_the_loop_stood_still_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every look at the clock 1000 s have passed. Each beat counts as two at most."""
    num_beats = 10
    engine = an_engine(timeout_s=2 * BEAT_S * num_beats)
    ticks = itertools.count()

    async def run() -> int:
        async with fake_processes(engine, monkeypatch) as started:
            await engine.start()
            monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: 1000.0 * next(ticks)))
            await until_ended(started[0])
            return next(ticks)

    assert asyncio.run(run()) >= 2 * num_beats, "a beat looks at the clock twice"


def test_an_engine_that_dies_again_and_again_is_started_later_each_time_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.001)
    engine = an_engine(timeout_s=60.0)

    async def run() -> tuple[str, int]:
        async with fake_processes(engine, monkeypatch) as started:
            await engine.start()
            assert engine.process.failure is not None
            while engine.state == "ready":
                started[-1].die(3)
                await until_ready(engine, started, len(started) + 1)
            return await engine.process.failure, len(started)

    monkeypatch.setattr(logging.getLogger("fastgen"), "propagate", True)
    why, num_started = asyncio.run(run())
    assert num_started == restarts.MAX_USELESS
    assert "ended 10 times in a row before it had answered a request; the last one ended with status 3" in why
    delays = [record.getMessage().partition("; ")[2] for record in caplog.records if record.levelno == logging.ERROR]
    assert delays[:3] == ["starting another", "starting another in 0.001 s", "starting another in 0.002 s"]


def test_an_answer_makes_an_engine_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine(timeout_s=60.0)

    async def run() -> None:
        async with fake_processes(engine, monkeypatch) as started:
            await engine.start()
            for number in range(1, restarts.MAX_USELESS + 2):
                request = engine.submit([1], SAMPLING, is_stream=False, arrived_s=0.0)
                started[-1].send(whole_answer(request.number))
                await request.news()
                started[-1].die(3)
                await until_ready(engine, started, number + 1)
            assert engine.state == "ready"
            assert engine.process._directory is not None
            assert [path.name for path in engine.process._directory.path.iterdir()] == [f"engine-{len(started)}"]

    asyncio.run(run())


def test_delays_grow_to_the_longest_and_a_long_life_ends_the_row() -> None:
    found = restarts.Restarts()
    delays = []
    for _ in range(restarts.MAX_USELESS):
        found.ready(0.0)
        delays.append(found.died(1.0))
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, None]
    found = restarts.Restarts()
    for _ in range(restarts.MAX_USELESS):
        found.ready(0.0)
        assert found.died(600.0) == 0.0
    assert found.num_useless == 0
    found.ready(0.0)
    found.died(599.0)
    assert found.num_useless == 1


def test_the_engine_does_not_get_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "a-secret")
    monkeypatch.setenv("FASTGEN_SOMETHING", "else")
    engine = an_engine(timeout_s=60.0)

    async def run() -> dict[str, str]:
        async with fake_processes(engine, monkeypatch) as started:
            await engine.start()
            return started[0].env

    environment = asyncio.run(run())
    assert environment["FASTGEN_SOMETHING"] == "else"
    assert "a-secret" not in environment.values()


def a_service(**limits: Any) -> Service:
    service = Service({"model": "scripted"}, limits=Limits(**limits))
    service._codec = scripted_codec()
    return service


def test_what_is_not_done_when_the_time_to_drain_is_over_ends_with_an_error_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = a_service()
    body = {"model": "scripted", "prompt": [5, 6], "max_tokens": 10, "stream": True}

    async def run() -> httpx2.Response:
        async with fake_processes(service.engine, monkeypatch) as started:
            await service.engine.start()
            transport = httpx2.ASGITransport(app=application(service))
            async with httpx2.AsyncClient(transport=transport, base_url="http://scripted") as client:
                answering = asyncio.create_task(client.post("/v1/completions", json=body))
                submitted = await started[0].next(Submit)
                started[0].send(Report([submitted.number, 7], [], [], [], None))
                while not all(request.has_started for request in service.engine._requests):
                    await asyncio.sleep(0.001)
                await service.drain(0.01)
                with pytest.raises(UnavailableError, match="takes no more requests"):
                    await service.submit([5], SAMPLING, is_stream=False)
                return await answering

    answer = asyncio.run(run())
    assert answer.status_code == 200
    assert "event: error\n" in answer.text
    assert "the server ends, and this was not done after 0.01 s" in answer.text
    assert "[DONE]" not in answer.text


def test_a_request_that_does_not_reach_the_engine_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    service = a_service(max_queued_requests=1)

    def fail(*arguments: Any, **more: Any) -> None:
        raise UnavailableError("the engine's process has ended")

    async def run() -> None:
        async with fake_processes(service.engine, monkeypatch):
            await service.engine.start()
            with monkeypatch.context() as patch:
                patch.setattr(service.engine, "submit", fail)
                for _ in range(3):
                    with pytest.raises(UnavailableError, match="has ended"):
                        await service.submit([5], SAMPLING, is_stream=False)
            await service.submit([5], SAMPLING, is_stream=False)

    asyncio.run(run())
