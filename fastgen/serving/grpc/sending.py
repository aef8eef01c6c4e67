"""Sends answers, and ends the connections of clients that do not take them.

An answer waits until its client has room for it, which HTTP/2's flow control tells. gRPC waits for ever, and has no way
to end the call meanwhile: the status of an aborted call waits behind the answer. So the connection is ended.
"""

from __future__ import annotations

import asyncio
import time

from grpc.aio import InternalError, ServicerContext

from fastgen.serving.grpc.connections import end_connections

# A client has as much time again for each of these bytes. gRPC does not tell how much of an answer has been taken, and
# one that reads a large answer slowly is to keep its call.
_TIMED_BYTES = 1 << 20


class Sending:
    """Sends the answers of calls. A client has ``timeout_s`` to take one, and as much again for each MiB of it."""

    def __init__(self, *, timeout_s: float):
        self._timeout_s = timeout_s
        # When the answers that are being sent must have been taken, by ``time.monotonic``.
        self._limits_s: dict[ServicerContext, float] = {}

    async def send(self, context: ServicerContext, answer: bytes) -> None:
        """Sends an answer, encoded, and waits until the client has taken it. If the client goes, the call is
        cancelled.
        """
        self._limits_s[context] = time.monotonic() + self._timeout_s * (1 + len(answer) // _TIMED_BYTES)
        try:
            await context.write(answer)
        except InternalError:  # gRPC would log it as an error of this server
            raise asyncio.CancelledError from None
        finally:
            del self._limits_s[context]

    async def end_slow(self, port: int) -> None:
        """Ends the connections to ``port`` whose clients take too long, at regular intervals, until it is cancelled."""
        every_s = min(self._timeout_s, 4.0) / 4
        while True:
            await asyncio.sleep(every_s)
            now_s = time.monotonic()
            peers = {context.peer() for context, limit_s in self._limits_s.items() if limit_s < now_s}
            if peers:
                await asyncio.to_thread(end_connections, port, peers)
