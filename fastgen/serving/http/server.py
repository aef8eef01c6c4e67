"""The HTTP server: uvicorn with limited connections and guarded requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from fastgen.errors import InvalidArgumentError
from fastgen.serving.http.connection import LimitedConnection
from fastgen.serving.http.guard import Guard
from fastgen.serving.http.tls import TlsHandshake, tls_context
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ConnectionLimits, ServeOptions

# How long the last answers of an ending server may take to reach their clients.
FLUSH_S = 5.0
# Files that the server has open beside its HTTP connections.
_FILES_BESIDE_CONNECTIONS = 256
_log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Serves ``app`` to the clients that ``options`` admit, and counts the answers in ``metrics``.

    It does not handle signals. Raises ``InvalidArgumentError`` if TLS cannot be set up.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: ServerMetrics):
        super().__init__(_config(app, options, metrics))
        metrics.connections.set_function(lambda: len(self.server_state.connections))

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


def listen(options: ServeOptions) -> socket.socket:
    """Returns a socket at the requested address. Raises ``InvalidArgumentError`` if the address is not available."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidArgumentError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from error


def within_file_limit(limits: ConnectionLimits) -> ConnectionLimits:
    """Returns ``limits`` with no more connections than this process may open, and logs if they are fewer."""
    wanted = 2 * limits.max_connections + _FILES_BESIDE_CONNECTIONS  # as many again are open while they are refused
    allowed = _allow_files(wanted)
    num_beside = min(_FILES_BESIDE_CONNECTIONS, allowed // 2)
    most = max(1, (allowed - num_beside) // 2)
    if most >= limits.max_connections:
        return limits
    _log.warning(
        "this process may open %d files, so at most %d connections are taken, not %d; 'ulimit -n %d' allows them",
        allowed,
        most,
        limits.max_connections,
        wanted,
    )
    return replace(limits, max_connections=most)


def _allow_files(number: int) -> int:
    """Raises this process's limit of open files to ``number``, or as far as the system allows. Returns the limit, or
    ``number`` if that is less.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return number
    most = number if hard == resource.RLIM_INFINITY else min(number, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
