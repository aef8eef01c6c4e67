"""The HTTP server: uvicorn with limited connections and guarded requests."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from fastgen.errors import InvalidArgumentError
from fastgen.serving.http.connection import LimitedConnection
from fastgen.serving.http.guard import Guard
from fastgen.serving.http.tls import Handshakes, TlsHandshake, handshake_cpu_s, tls_context
from fastgen.serving.http.unsent import UnsentAnswers
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions

# How long the last answers of an ending server may take to reach their clients.
FLUSH_S = 5.0
# Connections that the kernel keeps until they are accepted.
BACKLOG = 2048
# How many connections are accepted in one turn of the event loop.
ACCEPTED_AT_ONCE = 16
_CLOSE = (b"connection", b"close")


class HttpServer(uvicorn.Server):
    """Serves ``app`` at ``address`` to the clients that ``options`` admit, and counts the answers in ``metrics``.

    The address is that of the listening socket, in numbers. The server does not handle signals. Raises
    ``InvalidArgumentError`` if TLS cannot be set up.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: ServerMetrics, address: str):
        self._guard = Guard(app, options, metrics, address)
        super().__init__(_config(self._guard, options, metrics))
        metrics.connections.set_function(lambda: len(self.server_state.connections))

    async def serve_at(self, listener: socket.socket) -> None:
        """Serves the clients that connect to ``listener`` until ``should_exit`` is set, and closes it.

        The event loop accepts one connection for each of its sockets in one turn. So it listens at several copies of
        ``listener``: a turn takes long where much is received, and a flood of connections would delay others by as many
        turns.
        """
        copies = [listener.dup() for _ in range(ACCEPTED_AT_ONCE - 1)]
        await self.serve(sockets=[listener, *copies])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets answers finish, within ``FLUSH_S``. Requests whose bodies are not here yet are refused."""
        self._guard.end()
        await super().shutdown(sockets)

    def leave(self) -> None:
        """Accepts no more connections, and lets the open ones end, so that clients connect to the server that replaces
        this one. Each ends with its present or next answer; one that is idle after an answer is closed at once.
        """
        for server in self.servers:
            server.close()
        self.config.encoded_headers.append(_CLOSE)  # from which the default headers are made every second
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        for connection in list(self.server_state.connections):
            if isinstance(connection, LimitedConnection):
                connection.leave()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp, options: ServeOptions, metrics: ServerMetrics) -> uvicorn.Config:
    limits = options.connections
    if options.allow_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-predicted-ttft-s"],
        )
    make_connection: Callable[..., asyncio.Protocol] = partial(
        LimitedConnection, limits, metrics.refused, UnsentAnswers()
    )
    if options.tls_cert is not None and options.tls_key is not None:
        context = tls_context(options.tls_cert, options.tls_key)
        handshakes = Handshakes(handshake_cpu_s(context))
        make_connection = partial(TlsHandshake, context, handshakes, limits, metrics.refused, make_connection)
    return uvicorn.Config(
        app,
        http=make_connection,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # any client of this machine could name another in the log
        timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=FLUSH_S,  # type: ignore[arg-type]
    )


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at this address. Raises ``InvalidArgumentError`` if it is not available."""
    with _refused(host, port):
        return socket.create_server((host, port), family=_family(host), backlog=BACKLOG)


def bind_shared(host: str, port: int) -> socket.socket:
    """Returns a socket at this address that does not listen yet. Other processes of this user may listen there, and get
    all connections until this one listens too. Raises ``InvalidArgumentError`` if the address is not available.
    """
    bound = socket.socket(_family(host))
    with _refused(host, port):
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if bound.family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as `listen` has it
            bound.bind((host, port))
        except OSError:
            bound.close()
            raise
    return bound


@contextmanager
def hold_port(host: str, port: int) -> Iterator[int]:
    """Keeps ``port``, 0 for a free one, for sockets of :func:`bind_shared` until the block is left. Yields the port.
    Raises ``InvalidArgumentError`` if anything listens there, or another process holds it.
    """
    if port:
        listen(host, port).close()  # fails also where a shared socket would not
    with bind_shared(host, port) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # or others could bind it until something listens
        yield int(held.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@contextmanager
def _refused(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while ")[0]  # the rest repeats the address
        advice = "; choose another port, or end what listens there" if error.errno == errno.EADDRINUSE else ""
        if error.errno == socket.EAI_NONAME:
            advice = "; write IPv6 addresses without brackets, and every address as 0.0.0.0 or ::"
        raise InvalidArgumentError(f"cannot listen on {host}:{port}: {reason}{advice}") from error
