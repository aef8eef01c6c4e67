"""TLS handshakes with limits on their number and their time."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from uvicorn.server import ServerState

from fastgen.errors import InvalidArgumentError
from fastgen.serving.options import ConnectionLimits
from fastgen.serving.refusals import Refusal


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Returns the context of a server with this certificate. Raises ``InvalidArgumentError`` if it cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=bytes)  # an empty one, so that nothing is asked for
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot use {certificate} and {key} for TLS: {error}; expected a certificate and its key, in PEM, without "
            "a passphrase"
        ) from error
    return context


class TlsHandshake(asyncio.Protocol):
    """A connection up to the end of its handshake, when it becomes one of HTTP, with the protocol of ``make_http``.

    It counts among the connections of ``server_state``. An event loop that listens with TLS itself would not tell of
    connections whose handshake does not end.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        limits: ConnectionLimits,
        on_refused: Callable[[Refusal], None],
        make_http: Callable[..., asyncio.Protocol],
        server_state: ServerState,
        **more: Any,
    ):
        self._context, self._limits, self._on_refused = context, limits, on_refused
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
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Secured(self._begin_http),
                client,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.header_timeout_s,
                ssl_shutdown_timeout=self._limits.write_timeout_s,  # the end of an answer may wait for its client
            )
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
        transport.set_protocol(http)
        http.connection_made(transport)


class _Secured(asyncio.Protocol):
    """The protocol of a connection until its handshake is done, which calls ``begin`` with its transport."""

    def __init__(self, begin: Callable[[asyncio.Transport], None]):
        self._begin = begin

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._begin(transport)
