"""Streams whose clients leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from fastgen.serving.http.streaming import EventStream, Gone, unless_gone


class Events:
    """One event, and then none for ever."""

    def __init__(self) -> None:
        self.num_given, self.num_closed = 0, 0

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> bytes:
        if self.num_given:
            await asyncio.Event().wait()
        self.num_given += 1
        return b"data: 1\n\n"

    async def aclose(self) -> None:
        self.num_closed += 1


def test_the_events_of_a_stream_that_was_left_are_closed_before_the_response_ends() -> None:
    events, gone = Events(), Gone()

    async def send(message: Any) -> None:
        if message.get("body") == b"data: 1\n\n":
            asyncio.get_running_loop().call_soon(gone.set)

    async def receive() -> Any:
        raise AssertionError("the connection itself says that its client has gone")

    async def run() -> None:
        scope = {"type": "http", "state": {"gone": gone}}
        async with asyncio.timeout(20):
            await EventStream(events)(scope, receive, send)
        assert (events.num_given, events.num_closed) == (1, 1)

    asyncio.run(run())


def request_of(gone: Gone) -> Request:
    return Request({"type": "http", "state": {"gone": gone}})


def within_20_s(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def test_a_block_that_has_ended_when_its_client_goes_keeps_its_result() -> None:
    async def run() -> None:
        gone = Gone()
        async with unless_gone(request_of(gone)):
            gone.set()
        await asyncio.sleep(0)  # would raise if the block had left a cancellation
        with pytest.raises(ClientDisconnect):
            async with unless_gone(request_of(gone)):
                raise AssertionError("the client has gone")

    within_20_s(run())


def test_a_client_that_goes_behind_a_block_does_not_end_what_follows() -> None:
    async def run() -> None:
        gone = Gone()
        async with unless_gone(request_of(gone)):
            await asyncio.sleep(0)
        gone.set()
        await asyncio.sleep(0)
        assert gone.is_set

    within_20_s(run())


def test_a_block_that_fails_when_its_client_goes_fails_for_its_own_reason() -> None:
    async def block(gone: Gone) -> None:
        async with unless_gone(request_of(gone)):
            gone.set()
            raise ValueError("its own")

    async def run() -> None:
        with pytest.raises(ValueError, match="its own"):
            await block(Gone())
        await asyncio.sleep(0)  # would raise if the block had left a cancellation

    within_20_s(run())


@pytest.mark.parametrize("waits", [False, True])
def test_a_task_that_is_cancelled_is_cancelled_though_its_client_goes_too(waits: bool) -> None:
    async def block(gone: Gone) -> None:
        async with unless_gone(request_of(gone)):
            gone.set()
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if waits:
                await asyncio.Event().wait()

    async def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(block(Gone()))

    within_20_s(run())


def test_a_block_of_another_server_hears_from_the_request_and_listens_no_longer_than_it_runs() -> None:
    """Ours says itself that a client has gone; another says it to those that receive."""
    may_leave = asyncio.Event()
    num_listening = 0

    async def receive() -> Any:
        nonlocal num_listening
        num_listening += 1
        try:
            await may_leave.wait()
            await asyncio.sleep(0)
        finally:
            num_listening -= 1
        return {"type": "http.disconnect"}

    async def wait(request: Request) -> None:
        async with unless_gone(request):
            await asyncio.Event().wait()

    async def run() -> None:
        request = Request({"type": "http"}, receive)
        async with unless_gone(request):
            await asyncio.sleep(0)
            assert num_listening == 1
        assert num_listening == 0
        may_leave.set()
        with pytest.raises(ClientDisconnect):
            await wait(request)

    within_20_s(run())
