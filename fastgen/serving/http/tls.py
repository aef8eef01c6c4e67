"""TLS handshakes with limits on their number, their time, and the time that they take from others.

A handshake takes a processor milliseconds for the signature of an RSA key, in the event loop that serves all requests.
"""

from __future__ import annotations

import _ssl
import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

from uvicorn.server import ServerState

from fastgen.errors import InvalidArgumentError
from fastgen.serving.options import ConnectionLimits
from fastgen.serving.refusals import Refusal

# The share of the event loop's time that handshakes may take, and the most messages that one has from each side.
_SHARE, _MAX_FLIGHTS = 0.25, 8
# What the system may hold of a connection before it is read. The TLS library processes all of it in one turn of the
# event loop, and 27 bytes may have it make a new key.
_RECEIVE_BYTES = 64 << 10
# Requests for new keys after which a connection is closed: an honest client makes one after gigabytes.
_MAX_KEY_UPDATES = 32
# The numbers of a handshake's records, and of a message among them that asks for new keys (RFC 8446, B.1 and B.3).
_HANDSHAKE, _KEY_UPDATE = 22, 24
_HANDSHAKE_RECORD = bytes((_HANDSHAKE,))
# How long no handshake begins after that: what had come of the connection took some 0.05 s.
_PENALTY_S = 0.1


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Returns the context of a server with this certificate. Raises ``InvalidArgumentError`` if it cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # The property that Python adds converts each number of each message; this is the one behind it.
    vars(_ssl._SSLContext)["_msg_callback"].__set__(context, _note)
    try:
        context.load_cert_chain(certificate, key, password=bytes)  # an empty one, so that nothing is asked for
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot use {certificate} and {key} for TLS: {error}; expected a certificate and its key, in PEM, without "
            "a passphrase"
        ) from error
    return context


def handshake_cpu_s(context: ssl.SSLContext) -> float:
    """Returns how much processor time one handshake takes a server with this ``context``, by trying two in memory: the
    first takes longer.
    """
    return min(_handshake_cpu_s(context) for _ in range(2))


def _handshake_cpu_s(context: ssl.SSLContext) -> float:
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.check_hostname, theirs.verify_mode = False, ssl.CERT_NONE
    to_server, to_client, took_s = ssl.MemoryBIO(), ssl.MemoryBIO(), 0.0
    client, server = theirs.wrap_bio(to_client, to_server), context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_MAX_FLIGHTS):
        _shake(client)
        began_s = time.thread_time()
        is_done = _shake(server)
        took_s += time.thread_time() - began_s
        if is_done:
            break
    return took_s


def _shake(side: ssl.SSLObject) -> bool:
    """Goes on with the handshake of one ``side``. Returns whether it is done."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    except ssl.SSLError:  # the two sides of this library have nothing in common; others may
        return True
    return True


class Handshakes:
    """The order in which handshakes begin: so many in a second that they take at most a quarter of the loop's time, if
    each takes ``cpu_s``. It belongs to one event loop.
    """

    def __init__(self, cpu_s: float):
        self._pause_s, self._free_s, self._turn = cpu_s / _SHARE, 0.0, asyncio.Lock()

    async def may_begin(self, client: socket.socket) -> bool:
        """Waits until something has come from ``client``, then for its turn. Returns whether it has not left."""
        loop = asyncio.get_running_loop()
        has_come = asyncio.Event()
        loop.add_reader(client, has_come.set)
        try:
            await has_come.wait()
        finally:
            loop.remove_reader(client)
        async with self._turn:
            while (delay_s := self._free_s - time.monotonic()) > 0:
                await asyncio.sleep(delay_s)
            began = client.recv(1, socket.MSG_PEEK)
            if began == _HANDSHAKE_RECORD:  # anything else is refused without a signature
                self._free_s = time.monotonic() + self._pause_s
            return bool(began)

    def put_off(self, seconds: float) -> None:
        """Has no handshake begin for so long, since a connection has taken the loop's time in another way."""
        self._free_s = max(self._free_s, time.monotonic() + seconds)


class TlsHandshake(asyncio.Protocol):
    """A connection up to the end of its handshake, when it becomes one of HTTP, with the protocol of ``make_http``.

    It counts among the connections of ``server_state``. An event loop that listens with TLS itself would not tell of
    connections whose handshake does not end.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        handshakes: Handshakes,
        limits: ConnectionLimits,
        on_refused: Callable[[Refusal], None],
        make_http: Callable[..., asyncio.Protocol],
        server_state: ServerState,
        **more: Any,
    ):
        self._context, self._handshakes, self._limits, self._on_refused = context, handshakes, limits, on_refused
        self._make_http = partial(make_http, server_state=server_state, **more)
        self._connections: set[Any] = server_state.connections
        self._work: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        client: socket.socket = transport.get_extra_info("socket").dup()
        transport.abort()  # the transport of the handshake takes its place, before anything is read
        if len(self._connections) >= 2 * self._limits.max_connections:  # too many to send an error to each
            self._on_refused("connections")
            client.close()
        else:
            self._connections.add(self)
            self._work = asyncio.create_task(self._shake_hands(client))
            self._work.add_done_callback(partial(self._end, client))

    def shutdown(self) -> None:
        """Closes the connection, because the server ends."""
        assert self._work is not None
        self._work.cancel()

    def abort(self) -> None:
        """Closes the connection at once."""
        self.shutdown()

    async def _shake_hands(self, client: socket.socket) -> None:
        until_s = time.monotonic() + self._limits.header_timeout_s
        try:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            async with asyncio.timeout(self._limits.header_timeout_s):
                if not await self._handshakes.may_begin(client):
                    client.close()
                    return
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Secured(self._begin_http),
                client,
                ssl=self._context,
                ssl_handshake_timeout=max(0.001, until_s - time.monotonic()),
                ssl_shutdown_timeout=self._limits.write_timeout_s,  # the end of an answer may wait for its client
            )
        except TimeoutError:
            client.close()
            self._on_refused("head_time")
        except ConnectionAbortedError:
            self._on_refused("head_time")
        except OSError:  # this is not TLS, or the client has left
            pass

    def _end(self, client: socket.socket, work: asyncio.Task[None]) -> None:
        self._connections.discard(self)
        if work.cancelled():  # perhaps before it began
            client.close()

    def _begin_http(self, transport: asyncio.Transport) -> None:
        self._connections.discard(self)
        http = self._make_http()
        _asked[transport.get_extra_info("ssl_object")] = _Asked(self._handshakes, http)
        transport.set_protocol(http)
        http.connection_made(transport)


class _Asked:
    """How often the client of a connection asked for new keys. It does not keep the connection."""

    def __init__(self, handshakes: Handshakes, http: Any):
        self.handshakes, self.http, self.number = handshakes, ref(http), 0


# By connection.
_asked: WeakKeyDictionary[ssl.SSLObject, _Asked] = WeakKeyDictionary()


def _note(connection: ssl.SSLObject, direction: str, version: int, content: int, kind: int, data: bytes) -> None:
    """Closes a connection whose client asks for new keys often: making them takes the server as long as reading some
    kilobytes. The TLS library calls it for each message.
    """
    if content == _HANDSHAKE and kind == _KEY_UPDATE and direction == "read" and connection in _asked:
        asked = _asked[connection]
        asked.number += 1
        if asked.number == _MAX_KEY_UPDATES + 1 and (http := asked.http()) is not None:
            http.transport.abort()
            asked.handshakes.put_off(_PENALTY_S)


class _Secured(asyncio.Protocol):
    """The protocol of a connection until its handshake is done, which calls ``begin`` with its transport."""

    def __init__(self, begin: Callable[[asyncio.Transport], None]):
        self._begin = begin

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._begin(transport)
