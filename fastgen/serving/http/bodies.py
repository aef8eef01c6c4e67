"""The bodies of requests by HTTP: whole, in time, and within limits, each for itself and all together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO

from starlette.datastructures import Headers
from starlette.types import Receive

from fastgen.serving.admission.bodies import FREE_BYTES, MAX_OPEN_BODY_BYTES, Bodies, CountedBody
from fastgen.serving.admission.turns import Turns
from fastgen.serving.options import ConnectionLimits
from fastgen.serving.refusals import RequestTimeoutError, TooLargeError, UnavailableError

# How many large bodies the event loop receives a piece of in one of its turns. Each takes up to half a millisecond.
_RECEIVED_AT_ONCE = 8


class Receiving:
    """Limits the time to receive a body, and how many large ones are received in one turn of the event loop."""

    def __init__(self, limits: ConnectionLimits):
        self._timeout_s = limits.body_timeout_s
        self.turns = Turns(_RECEIVED_AT_ONCE)
        # The time limits of bodies that are being received.
        self._limits: set[asyncio.Timeout] = set()
        self._has_ended = False

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Limits the time of a block that receives a body. Raises ``RequestTimeoutError``, and ``UnavailableError``
        where :meth:`end` ends it.
        """
        try:
            async with asyncio.timeout(0 if self._has_ended else self._timeout_s) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if self._has_ended:
                raise UnavailableError("the server is ending and takes no more requests", retry_after_s=5.0) from None
            raise RequestTimeoutError(f"the body did not come within {self._timeout_s:g} s") from None

    def end(self) -> None:
        """Refuses all bodies that are not here yet, because the server ends."""
        self._has_ended = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0)


class Body(CountedBody):
    """The body of one request. Leaving the context releases its bytes.

    Large ones wait for their turn before each of their pieces, of some hundred KiB.
    """

    def __init__(self, bodies: Bodies, receiving: Receiving, *, is_open: bool):
        super().__init__(bodies)
        self._receiving = receiving
        self._max_bytes = bodies.limits.max_body_bytes
        if is_open:
            self._max_bytes = min(self._max_bytes, MAX_OPEN_BODY_BYTES)
        self.content = b""

    async def read(self, headers: Headers, receive: Receive) -> bool:
        """Receives all of it as ``content``. Returns whether the client stayed until then. Raises ``RefusedError``."""
        length = headers.get("content-length")
        if length is None and "transfer-encoding" not in headers:
            return True
        num_announced = int(length) if length is not None and length.isdecimal() else 0
        if num_announced > self._max_bytes:
            raise self._too_large()
        async with self._receiving.in_time():
            return await self._receive(receive, is_large=num_announced > FREE_BYTES)

    async def _receive(self, receive: Receive, *, is_large: bool) -> bool:
        content = BytesIO()  # it gives what it has without a copy
        while True:
            if is_large or content.tell() > FREE_BYTES:
                await self._receiving.turns.wait()
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            content.write(message.get("body", b""))
            if content.tell() > self._max_bytes:
                raise self._too_large()
            self.count(content.tell())
            if not message.get("more_body", False):
                self.content = content.getvalue()
                return True

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"the body of this request may have {self._max_bytes} bytes")
