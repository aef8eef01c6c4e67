"""How answers are given to a connection's transport."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# Most bytes of an answer that are given to the transport at once.
PIECE_BYTES = 64 << 10


class Flow(FlowControl):
    """Reads the bodies of requests that wait for the answer before their own up to a limit only."""

    def __init__(self, transport: asyncio.Transport):
        super().__init__(transport)
        # Of these bodies, all together.
        self.num_waiting_bytes = 0

    @property
    def waits_for_much(self) -> bool:
        return self.num_waiting_bytes > HIGH_WATER_LIMIT

    def resume_reading(self) -> None:
        if not self.waits_for_much:
            super().resume_reading()


def send_in_pieces(
    cycle: RequestResponseCycle, flow: FlowControl, transport: asyncio.Transport, hold: Callable[[int], None]
) -> None:
    """Has the answer of ``cycle`` sent as fast as the client takes it. ``hold`` is called with the bytes of it that are
    here, and with 0 at its end. A transport would take an answer of any size at once, and one with TLS does not tell
    how much of it waits.

    Nothing here refers to the cycle or to the owner of ``hold`` for good, so that bodies are freed without a collector.
    """
    send, seen, held = _own_send(cycle), weakref.proxy(cycle), weakref.WeakMethod(hold)
    num_stated = 0

    def count(num_bytes: int) -> None:
        if (alive := held()) is not None:
            alive(num_bytes)

    async def send_one(message: Any) -> None:
        if flow.write_paused:
            await flow.drain()
        if transport.is_closing():  # uvicorn tells the newest request alone that its client is gone
            seen.disconnected = True
        await send(message)

    async def send_pieces(message: Any) -> None:
        nonlocal num_stated
        if message["type"] == "http.response.start":
            num_stated = sum(int(value) for name, value in message["headers"] if name.lower() == b"content-length")
            count(num_stated)
            await send_one(message)
            return
        body, has_more = message.get("body", b""), message.get("more_body", False)
        is_large = len(body) > max(num_stated, PIECE_BYTES)
        if is_large:
            count(len(body))
        begin = 0
        while len(body) - begin > PIECE_BYTES and not seen.disconnected:
            await send_one({**message, "body": body[begin : begin + PIECE_BYTES], "more_body": True})
            begin += PIECE_BYTES
        await send_one({**message, "body": body[begin:]} if begin else message)
        if is_large or not has_more:
            count(0)

    cycle.send = send_pieces  # type: ignore[method-assign]


def speak_http_1_0(cycle: RequestResponseCycle) -> None:
    """Adapts answers to HTTP/1.0: an answer of unknown length is sent without chunks and ends with the connection, and
    no interim answer (100 Continue) is sent.
    """
    send, seen, is_length_known = _own_send(cycle), weakref.proxy(cycle), True

    async def send_unchunked(message: Any) -> None:
        nonlocal is_length_known
        if message["type"] == "http.response.start":
            is_length_known = any(name.lower() == b"content-length" for name, _ in message["headers"])
        if not is_length_known:
            seen.chunked_encoding = False
            seen.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]
    cycle.waiting_for_100_continue = False


def _own_send(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Returns the present ``send`` of ``cycle``, without a reference to it."""
    given: Callable[[Any], Awaitable[None]] | None = vars(cycle).get("send")
    return partial(type(cycle).send, weakref.proxy(cycle)) if given is None else given
