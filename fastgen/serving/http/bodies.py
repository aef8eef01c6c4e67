"""The bodies of requests: whole, in time, and within limits, each for itself and all together."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import Receive

from fastgen.serving.options import ConnectionLimits
from fastgen.serving.refusals import OverloadedError, RequestTimeoutError, TooLargeError

# Most bytes in the body of a request that needs no key. None of these requests has a use for more.
MAX_OPEN_BODY_BYTES = 4 << 10
# The first bytes of each body, which do not count in the sum over all. So large bodies, whose clients may send them as
# slowly as they like, leave room for ordinary requests.
_FREE_BYTES = 64 << 10
# How many of the largest bodies the server holds at once.
_MAX_LARGEST_BODIES = 16


class Bodies:
    """Counts the bytes in the bodies of all requests that are not answered yet."""

    def __init__(self, limits: ConnectionLimits):
        self.limits = limits
        self._max_bytes = _MAX_LARGEST_BODIES * limits.max_body_bytes
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Counts more bytes. Raises ``OverloadedError`` if that is too many, and then counts none of them."""
        if self._num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(
                f"the requests in work have {self._max_bytes} bytes, no more large ones are taken", retry_after_s=1.0
            )
        self._num_bytes += num_bytes

    def remove(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


class Body:
    """The body of one request. Leaving the context releases its bytes."""

    def __init__(self, bodies: Bodies, *, is_open: bool):
        self._bodies = bodies
        self._max_bytes = bodies.limits.max_body_bytes
        if is_open:
            self._max_bytes = min(self._max_bytes, MAX_OPEN_BODY_BYTES)
        self._num_counted = 0
        self.content = b""

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *error: object) -> None:
        self._bodies.remove(self._num_counted)

    async def read(self, headers: Headers, receive: Receive) -> bool:
        """Receives all of it as ``content``. Returns whether the client stayed until then. Raises ``RefusedError``."""
        length = headers.get("content-length")
        if length is None and "transfer-encoding" not in headers:
            return True
        if length is not None and length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        timeout_s = self._bodies.limits.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._receive(receive)
        except TimeoutError:
            raise RequestTimeoutError(f"the body did not come within {timeout_s:g} s") from None

    async def _receive(self, receive: Receive) -> bool:
        content = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            content += message.get("body", b"")
            if len(content) > self._max_bytes:
                raise self._too_large()
            num_more = len(content) - _FREE_BYTES - self._num_counted
            if num_more > 0:
                self._bodies.add(num_more)
                self._num_counted += num_more
            if not message.get("more_body", False):
                self.content = bytes(content)
                return True

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"the body of this request may have {self._max_bytes} bytes")
