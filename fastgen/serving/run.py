"""A server in the foreground, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.serving.http.app import create_app
from fastgen.serving.http.connection import LimitedConnection, close_slow
from fastgen.serving.http.guard import Guard
from fastgen.serving.log import set_up_logging
from fastgen.serving.options import ServeOptions
from fastgen.serving.service import Service

_FLUSH_S = 5.0
"""How long the last words of a server that ends may take to reach their clients."""
_FILES_BESIDE_CONNECTIONS = 256
_log = logging.getLogger(__name__)


def run(arguments: Mapping[str, Any], options: ServeOptions) -> None:
    """Serve the model that ``fastgen.load`` would load with ``arguments``, until SIGTERM or Ctrl-C.

    The first lets requests that run finish, the second ends them. Raises ``FastgenError`` where the server cannot
    start, or its engine cannot be started again.
    """
    set_up_logging(options.log_format)
    asyncio.run(_run(arguments, options))


async def _run(arguments: Mapping[str, Any], options: ServeOptions) -> None:
    endings = _Endings()
    service = Service(
        arguments,
        model_name=options.model_name,
        limits=options.limits,
        engine_timeout_s=options.engine_timeout_s,
    )
    listener = _listen(options)
    http = _HttpServer(_config(service, options))
    service.metrics.connections.set_function(lambda: len(http.server_state.connections))
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    closing = asyncio.create_task(close_slow(http.server_state, options.connections))
    try:
        if await endings.first_or(service.start()):
            _announce(service, options, listener)
            await endings.first_or(_failure(service))
            _log.info("ending: requests that run may take %g s to finish", options.drain_timeout_s)
            await endings.second_or(service.drain(options.drain_timeout_s))
    finally:
        await service.stop(0.0 if endings.second.is_set() else _FLUSH_S)
        http.should_exit = True
        http.force_exit = endings.second.is_set()
        await asyncio.wait({serving, asyncio.create_task(endings.second.wait())}, return_when=asyncio.FIRST_COMPLETED)
        http.force_exit = True
        await serving
        closing.cancel()


class _Endings:
    """The signals that end a server: the first kindly, the second at once."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._came)

    def _came(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    async def first_or(self, work: Coroutine[Any, Any, object]) -> bool:
        """Do ``work``, which is given up at the first signal; whether it was done."""
        return await _do_unless(work, self.first)

    async def second_or(self, work: Coroutine[Any, Any, object]) -> bool:
        """The same, up to the second signal."""
        return await _do_unless(work, self.second)


async def _do_unless(work: Coroutine[Any, Any, object], event: asyncio.Event) -> bool:
    doing, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        for task in (doing, waiting):
            task.cancel()
        await asyncio.wait({doing, waiting})


async def _failure(service: Service) -> None:
    """Wait until the engine cannot be started again, and raise why."""
    assert service.engine.failure is not None
    raise FastgenError(await asyncio.shield(service.engine.failure))


class _HttpServer(uvicorn.Server):
    """Signals are not its business."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(service: Service, options: ServeOptions) -> uvicorn.Config:
    limits = options.connections
    app: ASGIApp = Guard(create_app(service, options), options, service.metrics)
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
        http=partial(LimitedConnection, limits),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=_FLUSH_S,  # type: ignore[arg-type]
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )
    try:
        config.load()
    except OSError as error:
        raise InvalidArgumentError(f"cannot use {options.tls_cert} and {options.tls_key} for TLS: {error}") from error
    return config


def _listen(options: ServeOptions) -> socket.socket:
    _allow_files(options.connections.max_connections + _FILES_BESIDE_CONNECTIONS)
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidArgumentError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from error


def _allow_files(number: int) -> None:
    """Have this process allowed so many open files, or as many as it can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        most = number if hard == resource.RLIM_INFINITY else min(number, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _announce(service: Service, options: ServeOptions, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.tls_cert is None else "https"
    address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    print(service.facts.ledger, file=sys.stderr)
    print(f"fastgen: {service.model_name} is served at {address}", flush=True)
