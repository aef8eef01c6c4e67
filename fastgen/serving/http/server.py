"""The HTTP server: uvicorn with limited connections and guarded requests."""

from __future__ import annotations

import asyncio
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
from fastgen.serving.http.tls import TlsHandshake, tls_context
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions

# How long the last answers of an ending server may take to reach their clients.
FLUSH_S = 5.0


class HttpServer(uvicorn.Server):
    """Serves ``app`` to the clients that ``options`` admit, and counts the answers in ``metrics``.

    It does not handle signals. Raises ``InvalidArgumentError`` if TLS cannot be set up.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: ServerMetrics):
        super().__init__(_config(app, options, metrics))
        metrics.connections.set_function(lambda: len(self.server_state.connections))

    def stop_listening(self) -> None:
        """Accepts no more connections. Open ones remain."""
        for server in self.servers:
            server.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp, options: ServeOptions, metrics: ServerMetrics) -> uvicorn.Config:
    limits = options.connections
    app = Guard(app, options, metrics)
    if options.allow_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-predicted-ttft-s"],
        )
    make_connection: Callable[..., asyncio.Protocol] = partial(LimitedConnection, limits, metrics.refused)
    if options.tls_cert is not None and options.tls_key is not None:
        context = tls_context(options.tls_cert, options.tls_key)
        make_connection = partial(TlsHandshake, context, limits, metrics.refused, make_connection)
    return uvicorn.Config(
        app,
        http=make_connection,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=FLUSH_S,  # type: ignore[arg-type]
    )


def listen(options: ServeOptions, *, is_shared: bool = False) -> socket.socket:
    """Returns a socket at the requested address. With ``is_shared`` other processes of this user may listen there too.
    Raises ``InvalidArgumentError`` if the address is not available.
    """
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        address = (options.host, options.port)
        return socket.create_server(address, family=family, backlog=2048, reuse_port=is_shared)
    except OSError as error:
        raise InvalidArgumentError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from error
