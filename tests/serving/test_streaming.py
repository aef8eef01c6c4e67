"""Streams whose clients leave."""

from __future__ import annotations

import asyncio
from typing import Any

from fastgen.serving.http.streaming import EventStream, Gone


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
