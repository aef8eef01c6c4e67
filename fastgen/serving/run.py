"""A server in the foreground, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Coroutine, Mapping
from typing import Any

from fastgen.errors import FastgenError
from fastgen.serving.http.app import create_app
from fastgen.serving.http.connection import close_slow
from fastgen.serving.http.server import FLUSH_S, HttpServer, listen
from fastgen.serving.log import set_up_logging
from fastgen.serving.options import ServeOptions
from fastgen.serving.service import Service

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
    listener = listen(options)
    http = HttpServer(create_app(service, options), options, service.metrics)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    closing = asyncio.create_task(close_slow(http.server_state, options.connections))
    try:
        if await endings.first_or(service.start()):
            _announce(service, options, listener)
            await endings.first_or(_failure(service))
            _log.info("ending: requests that run may take %g s to finish", options.drain_timeout_s)
            await endings.second_or(service.drain(options.drain_timeout_s))
    finally:
        await service.stop(0.0 if endings.second.is_set() else FLUSH_S)
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


def _announce(service: Service, options: ServeOptions, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.tls_cert is None else "https"
    address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    print(service.facts.ledger, file=sys.stderr)
    print(f"fastgen: {service.model_name} is served at {address}", flush=True)
