"""Receives the requests of calls, few at once.

gRPC tells how long a request is only once it has all of it. So until then each may become the largest, and the memory
for requests that are being received is bounded by their number. What a client sends before its request is received
waits in buffers of 64 KiB, so an ordinary request is there as soon as it has a place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastgen.errors import InvalidArgumentError
from fastgen.serving.admission.bodies import MAX_LARGEST_BODIES
from fastgen.serving.refusals import OverloadedError, RequestTimeoutError

# The requests of a call, encoded. Handlers read the one request of a call themselves, as if it were a stream of
# requests: so they can check the key first, and they know how long it takes and whether it can be decoded.
Requests = AsyncIterator[bytes]


class Receiving:
    """Receives requests in order of their calls, at most ``MAX_LARGEST_BODIES`` at once.

    A request must come within ``timeout_s``, and within ``patience_s`` of the beginning of its receipt if another one
    waits for its place.
    """

    def __init__(self, *, timeout_s: float, patience_s: float):
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._free = asyncio.Semaphore(MAX_LARGEST_BODIES)
        self._num_waiting = 0
        # The time limits of requests that are being received, the oldest first, and when their receipt began.
        self._limits: dict[asyncio.Timeout, float] = {}

    async def first(self, requests: Requests) -> bytes:
        """Returns the first request of a call. Raises what :meth:`next` does, and ``InvalidArgumentError`` if there is
        no request.
        """
        if (request := await self.next(requests)) is None:
            raise InvalidArgumentError("the call has no request")
        return request

    async def next(self, requests: Requests) -> bytes | None:
        """Returns the next request of a call; ``None`` if it has no more.

        Raises ``RequestTimeoutError``, and ``OverloadedError`` if another call got its place.
        """
        try:
            async with asyncio.timeout(self._timeout_s), self._place():
                async for request in requests:
                    return request
        except TimeoutError:
            raise RequestTimeoutError(f"the request did not come within {self._timeout_s:g} s") from None
        return None

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        await self._wait()
        try:
            async with asyncio.timeout(None) as limit:
                self._limits[limit] = asyncio.get_running_loop().time()
                self._set_limits()
                try:
                    yield
                finally:
                    del self._limits[limit]
        except TimeoutError:
            raise OverloadedError(
                f"the request did not come within {self._patience_s:g} s, and others wait; send it again",
                retry_after_s=1.0,
            ) from None
        finally:
            self._free.release()

    async def _wait(self) -> None:
        self._num_waiting += 1
        self._set_limits()
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
            self._set_limits()

    def _set_limits(self) -> None:
        """Limits the receipt of as many requests as wait, the oldest ones, if no place is free."""
        num_limited = self._num_waiting if self._free.locked() else 0
        for number, (limit, began_s) in enumerate(self._limits.items()):
            if not limit.expired():
                limit.reschedule(began_s + self._patience_s if number < num_limited else None)
