"""Engines that fall silent, die again and again, or are drained, with processes that a test plays."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import pytest
import zmq

from fastgen.errors import FastgenError, GenerationError
from fastgen.runtime.requests.outputs import RequestMetrics
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.api_keys import API_KEY_VARIABLE
from fastgen.serving.engine import restarts, supervisor
from fastgen.serving.engine.client import EngineClient
from fastgen.serving.engine.messages import (
    Ask,
    Cancel,
    End,
    LoadFailed,
    Progress,
    Ready,
    Reply,
    Report,
    Status,
    Stop,
    Submit,
    encoder,
    has_come,
)
from fastgen.serving.options import Limits
from fastgen.serving.refusals import BadRequestError, EngineDiedError, OverloadedError, UnavailableError
from fastgen.serving.service import Service
from fastgen.serving.watch import Watch
from fastgen.version import __version__
from tests.serving import fake_engine
from tests.serving.fake_engine import FACTS, WAIT_S, FakeProcess, fake_processes
from tests.serving.scripted import application, scripted_codec
from tests.serving.test_admission import engine as metrics_of

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


def test_an_engine_that_reports_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its silence may last for 25 beats."""
    beat_s, num_beats, num_reports = 0.002, 0, 60
    monkeypatch.setattr(supervisor, "_BEAT_S", beat_s)
    engine = an_engine(timeout_s=2 * beat_s * 25)

    async def run() -> None:
        async with fake_processes(engine, monkeypatch) as started:

            def beat() -> None:
                nonlocal num_beats
                num_beats += 1
                if num_beats <= num_reports:
                    started[0].send(Report([], [], [], [], Status(3, 2, 1)))

            monkeypatch.setattr(engine, "engine_beat", beat)
            await engine.start()
            await until_ended(started[0])

    asyncio.run(run())
    assert num_beats > num_reports
    assert engine.status == Status(3, 2, 1)


def test_the_counters_of_an_engine_are_asked_for_by_themselves_and_not_twice_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(Limits(), lambda: True)
    engine, counted = EngineClient({}, watch, timeout_s=60.0), metrics_of({1: 0.01})

    async def run() -> None:
        async with fake_processes(engine, monkeypatch) as started:
            await engine.start()
            asked = await started[0].next(Ask)
            assert asked.what == "metrics"
            await asyncio.sleep(5 * BEAT_S)
            assert not has_come(started[0]._socket)
            started[0].send(Reply(asked.number, msgspec.Raw(encoder.encode(counted)), None))
            await started[0].next(Ask)
            assert watch.metrics.engine() == counted

    asyncio.run(run())


async def asked_live(process: FakeProcess) -> Ask:
    """Returns the next question for the live view. Those for counters come by themselves."""
    while (asked := await process.next(Ask)).what != "live":
        pass
    assert isinstance(asked, Ask)
    return asked


def test_a_question_fails_where_no_engine_answers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, nothing = an_engine(timeout_s=60.0), msgspec.Raw(encoder.encode(None))

    async def run() -> None:
        with pytest.raises(UnavailableError, match="it is starting"):
            await engine.ask("live", str)
        async with fake_processes(engine, monkeypatch) as started:
            await engine.start()
            engine.engine_sent(Reply(1000, nothing, None), b"")  # to a question that is awaited no more
            asking = asyncio.create_task(engine.ask("live", str))
            started[0].send(Reply((await asked_live(started[0])).number, nothing, "OSError: no view"))
            with pytest.raises(GenerationError, match="OSError: no view"):
                await asking
            asking = asyncio.create_task(engine.ask("live", str))
            await asked_live(started[0])
            started[0].die(3)
            with pytest.raises(EngineDiedError, match="ended with status 3"):
                await asking

    asyncio.run(run())


def test_an_engine_that_is_told_to_stop_ends_by_itself_and_leaves_no_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = an_engine(timeout_s=60.0)

    async def run() -> None:
        async with fake_processes(engine, monkeypatch) as started:
            await engine.start()
            request = engine.submit([1], SAMPLING, is_stream=True, arrived_s=0.0)
            assert engine.process._directory is not None
            path = engine.process._directory.path
            stopping = asyncio.create_task(engine.stop(WAIT_S))
            await started[0].next(Stop)
            started[0].die(0)
            await stopping
            assert (started[0].status, engine.state, path.exists()) == (0, "stopped", False)
            with pytest.raises(UnavailableError, match="the server is ending"):
                await request.news()
            assert engine.num_open == 0

    asyncio.run(run())


def test_a_request_that_cannot_be_sent_any_more_is_refused_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine(timeout_s=60.0)

    def refuse(*arguments: Any) -> None:
        raise zmq.Again

    async def run() -> None:
        async with fake_processes(engine, monkeypatch):
            await engine.start()
            with monkeypatch.context() as patch:
                patch.setattr(engine.process, "_socket", SimpleNamespace(send=refuse))
                with pytest.raises(UnavailableError, match="the engine's process has ended"):
                    engine.submit([1], SAMPLING, is_stream=True, arrived_s=0.0)
            assert engine.num_open == 0

    asyncio.run(run())


def test_why_a_model_cannot_be_loaded_is_said_in_the_engines_words(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine(timeout_s=60.0)
    monkeypatch.setattr(fake_engine, "Ready", lambda facts: LoadFailed("there is no config.json"))

    async def run() -> None:
        async with fake_processes(engine, monkeypatch):
            with pytest.raises(FastgenError, match=r"^there is no config\.json$"):
                await engine.start()

    asyncio.run(run())


@pytest.mark.parametrize(("num_failed", "state"), [(2, "ready"), (3, "failed")])
def test_an_engine_is_given_up_when_it_did_not_start_again_three_times(
    monkeypatch: pytest.MonkeyPatch, num_failed: int, state: str
) -> None:
    engine = an_engine(timeout_s=60.0)

    async def run() -> None:
        async with fake_processes(engine, monkeypatch) as started:
            await engine.start()
            failures = iter([LoadFailed("there is no config.json")] * num_failed)
            monkeypatch.setattr(fake_engine, "Ready", lambda facts: next(failures, None) or Ready(facts))
            started[0].die(3)
            await until_ready(engine, started, 4)
            assert (engine.state, engine.num_restarts, len(started)) == (state, 3, 4)
            if state == "failed":
                assert await engine.failed() == "the engine did not start 3 times in a row: there is no config.json"

    asyncio.run(run())


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
                with pytest.raises(UnavailableError, match="takes no more requests") as refused:
                    await service.submit([5], SAMPLING, is_stream=False)
                assert refused.value.retry_after_s == 5.0
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
            assert 'fastgen_refused_total{reason="unavailable"} 3.0' in service.metrics.text().decode()
            await service.submit([5], SAMPLING, is_stream=False)

    asyncio.run(run())


def test_a_request_waits_until_its_first_token_and_is_forgotten_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    service = a_service(max_queued_requests=1)

    async def run() -> None:
        async with fake_processes(service.engine, monkeypatch) as started:
            await service.engine.start()
            first = await service.submit([5], SAMPLING, is_stream=True)
            with pytest.raises(OverloadedError):
                await service.submit([5], SAMPLING, is_stream=True)
            submitted = await started[0].next(Submit)
            started[0].send(Report([submitted.number, 7], [], [], [], None))
            await anext(aiter(first))
            second = await service.submit([5], SAMPLING, is_stream=True)
            started[0].send(whole_answer(submitted.number))
            await first.output()
            assert service.engine.num_open == 1
            second.cancel()
            assert service.engine.num_open == 0
            assert (await started[0].next(Cancel)).number == second._request.number

    asyncio.run(run())


@pytest.mark.parametrize(("num_tokens", "is_large"), [(128, False), (129, True)])
def test_an_answer_with_more_than_16384_log_probabilities_comes_in_pieces(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, is_large: bool
) -> None:
    service = a_service()
    sampling = SamplingParams(max_new_tokens=num_tokens, logprobs=127)

    async def run() -> None:
        async with fake_processes(service.engine, monkeypatch) as started:
            await service.engine.start()
            await service.submit([5], sampling, is_stream=False)
            assert (await started[0].next(Submit)).is_stream == is_large

    asyncio.run(run())


def test_the_metrics_say_whether_requests_are_taken_and_how_often_the_engine_was_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = a_service()
    monkeypatch.setattr("fastgen.serving.service._COUNT_S", 0.01)  # these engines do not answer

    async def found() -> tuple[str, str]:
        lines = dict(line.rsplit(" ", 1) for line in (await service.metrics_text()).decode().splitlines())
        return lines["fastgen_up"], lines["fastgen_engine_restarts_total"]

    async def run() -> None:
        async with fake_processes(service.engine, monkeypatch) as started:
            assert await found() == ("0.0", "0.0")
            await service.engine.start()
            assert await found() == ("1.0", "0.0")
            started[0].die(3)
            await until_ready(service.engine, started, 2)
            assert await found() == ("1.0", "1.0")

    asyncio.run(run())


class Formats:
    """Takes the place of trials of formats. What ``refusal`` returns or raises is the result of ``outcome``."""

    def __init__(self, outcome: Any):
        self._outcome = outcome

    async def refusal(self, response_format: Any) -> Any:
        return self._outcome()


def test_a_request_is_refused_for_what_happens_while_its_format_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    service = a_service()
    sampling = SamplingParams(response_format=ResponseFormat("regex", "a"))

    def is_full() -> None:
        raise OverloadedError("too many formats wait", retry_after_s=12.0)

    def begins_to_drain() -> None:
        service._is_draining = True

    async def refused(outcome: Any) -> Exception:
        service._formats = Formats(outcome)  # type: ignore[assignment]
        with pytest.raises((OverloadedError, BadRequestError, UnavailableError)) as raised:
            await service.submit([5], sampling, is_stream=False)
        return raised.value

    async def run() -> None:
        async with fake_processes(service.engine, monkeypatch):
            await service.engine.start()
            assert "too many formats wait" in str(await refused(is_full))
            assert 'fastgen_refused_total{reason="queued_formats"} 1.0' in service.metrics.text().decode()
            assert "it is too slow" in str(await refused(lambda: "it is too slow"))
            assert "takes no more requests" in str(await refused(begins_to_drain))
            service._formats = None

    asyncio.run(run())


def test_what_the_server_refuses_by_itself_is_checked_without_an_engine() -> None:
    service = a_service()
    for sampling in (SamplingParams(n=129), SamplingParams(n=128, logprobs=128, max_new_tokens=512)):
        with pytest.raises(BadRequestError):
            asyncio.run(service.refusal([5], sampling))
    service._formats = Formats(lambda: "it is too slow")  # type: ignore[assignment]
    sampling = SamplingParams(response_format=ResponseFormat("regex", "a"))
    assert asyncio.run(service.refusal([5], sampling)) == "it is too slow"


def test_a_server_that_has_not_loaded_its_model_says_that_it_is_starting() -> None:
    service = Service({"model": "scripted"})
    for ask in (lambda: service.codec, lambda: service.facts, service.info):
        with pytest.raises(UnavailableError, match="the server is starting"):
            ask()


def test_no_message_is_held_back_for_want_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is bounded by the requests and their answers."""
    engine = an_engine(timeout_s=60.0)

    async def run() -> list[object]:
        async with fake_processes(engine, monkeypatch):
            await engine.start()
            socket = engine.process._socket
            assert socket is not None
            return [socket.getsockopt(option) for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER)]

    assert asyncio.run(run()) == [0, 0, 0]


def test_an_engine_has_nothing_to_do_before_it_says_what_it_does() -> None:
    assert an_engine(timeout_s=60.0).status == Status(num_running=0, num_waiting=0, num_steps=0)
    status = Status(1, 2, 3)
    assert (status.num_open, status.num_answered) == (0, 0)


def test_what_an_engine_says_again_about_its_start_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, errors = an_engine(timeout_s=60.0), list[object]()

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        async with fake_processes(engine, monkeypatch) as started:
            await engine.start()
            request = engine.submit([1], SAMPLING, is_stream=True, arrived_s=0.0)
            for message in (Ready(FACTS), LoadFailed("too late"), Report([request.number, 7], [], [], [], None)):
                started[0].send(message)
            assert [news.token_ids for news in await request.news()] == [[7]]
            assert engine.state == "ready"

    asyncio.run(run())
    assert errors == []


def test_only_what_an_engine_still_works_on_is_cancelled_there(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine(timeout_s=60.0)

    async def run() -> None:
        async with fake_processes(engine, monkeypatch) as started:
            await engine.start()
            ended, running, last = (engine.submit([1], SAMPLING, is_stream=True, arrived_s=0.0) for _ in range(3))
            started[0].send(whole_answer(ended.number))
            await ended.ended()
            for request in (ended, running, running):
                engine.cancel(request)
            engine.finish(last)
            engine.cancel(last)
            engine.submit([1], SAMPLING, is_stream=True, arrived_s=0.0)
            told = [await started[0].next(Submit | Cancel) for _ in range(5)]  # type: ignore[arg-type]
            assert [type(message) for message in told] == [Submit, Submit, Submit, Cancel, Submit]
            assert told[3].number == running.number

    asyncio.run(run())


def test_a_server_says_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service({"model": "a/model"}, model_name="scripted")
    service._codec = scripted_codec()
    facts = {"vocab_size": 1000, "max_model_len": 4096, "max_num_seqs": 4, "token_budget": 512}

    async def run() -> None:
        async with fake_processes(service.engine, monkeypatch):
            await service.engine.start()
            for state in ("ready", "draining"):
                assert service.info() == {"model": "scripted", "version": __version__, "state": state} | facts
                await service.drain(0.0)

    asyncio.run(run())
    assert Service({"model": Path("a/model")}).model_name == "a/model"


def test_an_engine_has_the_id_of_its_process_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine(timeout_s=60.0)
    monkeypatch.setattr(FakeProcess, "pid", 4711)

    async def run() -> None:
        async with fake_processes(engine, monkeypatch):
            assert engine.pid is None
            await engine.start()
            assert engine.pid == 4711

    asyncio.run(run())
