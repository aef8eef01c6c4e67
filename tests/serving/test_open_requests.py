"""Reports of an engine, and how the server's open requests hand them to the watcher."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextvars import ContextVar

import pytest
import uvloop

from fastgen.collector import collector_off
from fastgen.errors import GenerationError
from fastgen.runtime.requests.outputs import FinishReason, RequestMetrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.engine.messages import End, Progress, Report
from fastgen.serving.engine.open_requests import OpenRequests
from fastgen.serving.engine.request import EngineRequest
from tests.serving.replicas.played import Noted

name: ContextVar[int] = ContextVar("name")


def opened(number: int) -> tuple[OpenRequests, EngineRequest, Noted]:
    noted = Noted()
    requests, request = OpenRequests(noted), EngineRequest(number, 3, SamplingParams(), 0.0)
    requests.add(request)
    return requests, request, noted


def reported(*progress: Progress, tokens: tuple[int, ...] = ()) -> Report:
    return Report([*tokens], [*progress], [], [], None)


def test_a_request_starts_with_its_first_token_however_it_comes() -> None:
    as_token, without_a_stream = reported(tokens=(7, 5)), Report([], [], [7], [], None)
    for report in (as_token, without_a_stream, reported(Progress(7, 0, [5], None, None))):
        requests, request, noted = opened(7)
        requests.take(report)
        assert request.has_started
        requests.take(as_token)
        assert noted.notes == [("started", "7")], "once"


def test_a_request_that_ends_without_a_token_has_not_started() -> None:
    requests, request, noted = opened(7)
    end = End("cancelled", None, None, RequestMetrics(queue_s=0.0, ttft_s=None), None)
    requests.take(reported(Progress(7, 0, [], None, end)))
    assert not request.has_started
    assert noted.notes == []
    assert noted.num_gone == 1


class NotesEnds(Noted):
    """Notes ends of completions too."""

    def completion_ended(self, request: EngineRequest, progress: Progress) -> None:
        self.notes.append(("ended", str(progress.index)))


def test_a_request_has_gone_once_when_all_its_answers_have_ended_or_it_was_dropped() -> None:
    noted, num_answered = NotesEnds(), 0

    def answered() -> None:
        nonlocal num_answered
        num_answered += 1

    requests = OpenRequests(noted, answered)
    two, other = EngineRequest(7, 3, SamplingParams(n=2), 0.0), EngineRequest(8, 3, SamplingParams(), 0.0)
    for request in (two, other):
        requests.add(request)
    reasons: tuple[FinishReason, ...] = ("length", "timeout")
    for index, reason in enumerate(reasons):
        assert noted.num_gone == 0
        end = End(reason, None, None, RequestMetrics(queue_s=0.0, ttft_s=0.1), 0.0)
        requests.take(reported(Progress(7, index, [5], None, end)))
    assert noted.notes == [("started", "7"), ("ended", "0"), ("ended", "1")]
    assert (noted.num_gone, num_answered) == (1, 1)
    assert two in requests, "until its news were taken"
    assert [requests.drop(two), requests.drop(two), two in requests, noted.num_gone] == [True, False, False, 1]
    assert [requests.drop(other), noted.num_gone] == [True, 2]


def test_who_waits_for_news_goes_on_with_all_of_them_when_told() -> None:
    """At once, not behind all else that the event loop has to do; it may cancel other requests then."""

    async def run() -> None:
        loop, requests = asyncio.get_running_loop(), OpenRequests(Noted())
        first, second, unread = (EngineRequest(number, 3, SamplingParams(), 0.0) for number in (7, 8, 9))
        happened: list[object] = []
        for request in (first, second, unread):
            requests.add(request)

        async def follow(request: EngineRequest, other: EngineRequest) -> None:
            name.set(request.number)
            happened.append([each.token_ids for each in await request.news()])
            requests.drop(other)
            happened.append(name.get())

        def report() -> None:
            loop.call_soon(happened.append, "a turn")
            requests.take(reported(tokens=(7, 1, 8, 2, 7, 3, 9, 4)))
            requests.take(reported(Progress(7, 0, [5], None, None)))
            assert happened == []
            requests.tell()
            assert happened == [[[1, 3], [5]], 7, [[2]], 8]
            requests.tell()

        waiting = [asyncio.create_task(follow(*each)) for each in ((first, second), (second, first))]
        await asyncio.sleep(0)
        loop.call_soon(report)
        await asyncio.gather(*waiting)
        await asyncio.sleep(0)
        assert happened[4:] == ["a turn"]
        assert [each.token_ids for each in await unread.news()] == [[4]]

    asyncio.run(asyncio.wait_for(run(), 10.0))


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_task_may_tell_of_news_and_who_waits_may_be_cancelled(
    make_loop: Callable[[], asyncio.AbstractEventLoop], is_cancelled: bool
) -> None:
    """A task cannot run within another: who waits goes on in a later turn."""

    async def run() -> None:
        request = EngineRequest(7, 3, SamplingParams(), 0.0)
        request.tell()  # no task waits for news yet
        waiting = asyncio.create_task(request.news())
        request.add_token(5)
        request.tell()  # the task has not begun to wait
        assert [each.token_ids for each in await waiting] == [[5]]
        waiting = asyncio.create_task(request.news())
        await asyncio.sleep(0)
        if is_cancelled:
            waiting.cancel()
            asyncio.get_running_loop().call_soon(request.tell)
            with pytest.raises(asyncio.CancelledError):
                await waiting
        request.add_token(6)
        for _ in range(2):
            request.tell()
        assert not waiting.done() or is_cancelled
        news = await (request.news() if is_cancelled else waiting)
        assert [each.token_ids for each in news] == [[6]]

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(asyncio.wait_for(run(), 10.0))


def test_who_waits_after_another_was_cancelled_is_told() -> None:
    async def run() -> None:
        request = EngineRequest(7, 3, SamplingParams(), 0.0)
        first = asyncio.create_task(request.news())
        await asyncio.sleep(0)
        second = asyncio.create_task(request.news())
        first.cancel()  # it ends its wait behind the beginning of the second's
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        request.add_token(5)
        request.tell()
        assert [each.token_ids for each in await second] == [[5]]

    asyncio.run(asyncio.wait_for(run(), 10.0))


def test_a_request_that_has_ended_is_freed_without_a_garbage_collection() -> None:
    async def run() -> weakref.ref[EngineRequest]:
        loop, request = asyncio.get_running_loop(), EngineRequest(7, 3, SamplingParams(), 0.0)
        for is_last in (False, True):
            waiting = asyncio.create_task(request.news())
            await asyncio.sleep(0)
            if is_last:
                waiting.cancel()
            request.add_token(5)
            loop.call_soon(request.tell)
            await asyncio.wait({waiting})
        return weakref.ref(request)

    with collector_off():
        assert asyncio.run(asyncio.wait_for(run(), 10.0))() is None


def test_news_are_given_as_soon_as_there_are_any_and_then_the_failure() -> None:
    async def run() -> None:
        request = EngineRequest(7, 3, SamplingParams(), 0.0)
        waiting = asyncio.create_task(request.news())
        await asyncio.sleep(0)
        request.add_token(5)
        request.add_token(6)
        request.tell()
        assert [each.token_ids for each in await waiting] == [[5, 6]]
        waiting = asyncio.create_task(request.news())
        await asyncio.sleep(0)
        request.fail(GenerationError("it failed"))
        with pytest.raises(GenerationError, match="it failed"):
            await waiting

    asyncio.run(asyncio.wait_for(run(), 10.0))
