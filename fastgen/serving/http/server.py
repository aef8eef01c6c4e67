"""The HTTP server: uvicorn with limited connections and guarded requests."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from fastgen.errors import InvalidArgumentError
from fastgen.serving.http.connection import LimitedConnection
from fastgen.serving.http.guard import Guard
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions

# How long the last answers of an ending server may take to reach their clients.
FLUSH_S = 5.0
_FILES_BESIDE_CONNECTIONS = 256


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
    config = uvicorn.Config(
        app,
        http=partial(LimitedConnection, limits, metrics.refused),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=FLUSH_S,  # type: ignore[arg-type]
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )
    try:
        config.load()
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot use {options.tls_cert} and {options.tls_key} for TLS: {error}; expected a certificate and its "
            "key, in PEM, without a passphrase"
        ) from error
    return config


def listen(options: ServeOptions) -> socket.socket:
    """Returns a socket at the requested address. Raises ``InvalidArgumentError`` if the address is not available."""
    _allow_files(
        2 * options.connections.max_connections + _FILES_BESIDE_CONNECTIONS
    )  # as many again are open while they are refused
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidArgumentError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from error


def _allow_files(number: int) -> None:
    """Raises this process's limit of open files to the given number, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        most = number if hard == resource.RLIM_INFINITY else min(number, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
