"""The bodies of requests by HTTP: whole, in time, and within limits, each for itself and all together."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import Receive

from fastgen.serving.admission.bodies import FREE_BYTES, MAX_OPEN_BODY_BYTES, Bodies, CountedBody
from fastgen.serving.admission.turns import Turns
from fastgen.serving.refusals import RequestTimeoutError, TooLargeError


class Body(CountedBody):
    """The body of one request. Leaving the context releases its bytes.

    Large ones wait for ``turns`` before each of their pieces, of some hundred KiB.
    """

    def __init__(self, bodies: Bodies, turns: Turns, *, is_open: bool):
        super().__init__(bodies)
        self._turns = turns
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
        timeout_s = self._bodies.limits.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._receive(receive, is_large=num_announced > FREE_BYTES)
        except TimeoutError:
            raise RequestTimeoutError(f"the body did not come within {timeout_s:g} s") from None

    async def _receive(self, receive: Receive, *, is_large: bool) -> bool:
        content = bytearray()
        while True:
            if is_large or len(content) > FREE_BYTES:
                await self._turns.wait()
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            content += message.get("body", b"")
            if len(content) > self._max_bytes:
                raise self._too_large()
            self.count(len(content))
            if not message.get("more_body", False):
                self.content = bytes(content)
                return True

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"the body of this request may have {self._max_bytes} bytes")
