"""A server in the foreground, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from fastgen.errors import InvalidArgumentError
from fastgen.serving.http.app import create_app
from fastgen.serving.options import ServeOptions
from fastgen.serving.service import Service


def run(arguments: Mapping[str, Any], options: ServeOptions) -> None:
    """Serve the model that ``fastgen.load`` would load with ``arguments``, until SIGTERM or Ctrl-C.

    Raises ``FastgenError`` where it cannot start.
    """
    asyncio.run(_run(arguments, options))


async def _run(arguments: Mapping[str, Any], options: ServeOptions) -> None:
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    service = Service(arguments, model_name=options.model_name)
    listener = _listen(options)
    http = _HttpServer(uvicorn.Config(create_app(service, options), log_level="warning", lifespan="off"))
    serving = loop.create_task(http.serve(sockets=[listener]))
    asked_to_end = loop.create_task(ending.wait())
    starting = loop.create_task(service.start())
    try:
        await asyncio.wait({starting, asked_to_end}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _announce(service, listener)
            await asked_to_end
            print("fastgen: ending; requests that run may finish", file=sys.stderr)
            with contextlib.suppress(TimeoutError):
                await service.drain(options.drain_timeout_s)
    finally:
        await service.stop()
        for task in (starting, asked_to_end):
            task.cancel()
        await asyncio.gather(starting, asked_to_end, return_exceptions=True)
        http.should_exit = True
        await serving


class _HttpServer(uvicorn.Server):
    """Signals are not its business."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(options: ServeOptions) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidArgumentError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from error


def _announce(service: Service, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(service.facts.ledger, file=sys.stderr)
    print(f"fastgen: {service.model_name} is served at {address}", flush=True)
