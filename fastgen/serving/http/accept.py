"""Accepts connections, several at once."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

# Most connections that are accepted before the event loop does other work. With more of them whoever connects waits less,
# but each brings work, for which streams wait: where hundreds connect at once, eight double the gaps between tokens.
_AT_ONCE = 4
# How long nothing is accepted after the system had no room for another connection.
_PAUSE_S = 1.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger(__name__)


class Acceptor:
    """Accepts the connections of a listening socket, and gives each a protocol that ``make_protocol`` makes.

    uvloop itself accepts one connection in each of its iterations, so whoever connects behind hundreds of others would
    wait for hundreds of iterations. This takes :data:`_AT_ONCE` in each.
    """

    def __init__(self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol]):
        self._listener, self._make_protocol = listener, make_protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._begin()

    def close(self) -> None:
        """Accepts no more connections, and closes the listening socket."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """Waits until every accepted connection has its protocol."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _begin(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                _log.warning("no connection is accepted for %g s: %s", _PAUSE_S, error.strerror)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_S, self._begin)
                return
            opening = self._loop.create_task(self._open(client))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, client: socket.socket) -> None:
        await self._loop.connect_accepted_socket(self._make_protocol, client)
