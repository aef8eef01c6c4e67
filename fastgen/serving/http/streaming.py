"""Streamed answers, and clients that disconnect before the answer is complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class Gone:
    """Records that the client of a connection has gone, and calls callbacks. A connection stores it in
    ``scope["state"]["gone"]``.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """Records that the client has gone."""
        self.is_set = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def add(self, callback: Callable[[], None]) -> None:
        """Registers ``callback``, which is called when the client goes."""
        self._callbacks.append(callback)

    def discard(self, callback: Callable[[], None]) -> None:
        if callback in self._callbacks:
            self._callbacks.remove(callback)


class unless_gone:  # noqa: N801 (used as a statement, like asyncio.timeout)
    """``async with unless_gone(request):`` cancels its block and raises ``ClientDisconnect`` if the client disconnects
    meanwhile. A block that has ended by then keeps its result, and the next such block raises at its beginning.
    """

    def __init__(self, request: Request):
        self._gone: Gone | None = getattr(request.state, "gone", None)
        self._receive = request.receive
        self._listening: asyncio.Task[None] | None = None
        self._was_called = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancelled = task, task.cancelling()
        if self._gone is None:  # another server than ours: it sets no "gone"
            self._gone = Gone()
            self._listening = asyncio.create_task(_listen(self._receive, self._gone))
        elif self._gone.is_set:
            raise ClientDisconnect
        self._gone.add(self._cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._gone is not None
        self._gone.discard(self._cancel)
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait({self._listening})
        if not self._was_called:
            return
        was_reached = kind is asyncio.CancelledError
        if not was_reached:  # the block returned, or failed, before the cancellation reached it
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        is_ours = self._task.uncancel() <= self._num_cancelled
        if is_ours and was_reached:
            raise ClientDisconnect from error
        if not is_ours and not was_reached:
            raise asyncio.CancelledError

    def _cancel(self) -> None:
        self._was_called = True
        self._task.cancel()


class EventStream(Response):
    """A response of server-sent events. Each piece of ``events`` is one or more events as bytes. ``events`` is closed
    when the stream has ended or the client has disconnected.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with unless_gone(Request(scope, receive)):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for piece in self._events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            pass
        finally:
            if (close := getattr(self._events, "aclose", None)) is not None:
                await close()


async def _listen(receive: Receive, gone: Gone) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()
