"""A server in the foreground, from its start to its end."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop

from fastgen.compile.host.system import memory_bytes
from fastgen.errors import FastgenError
from fastgen.serving.admission.request_memory import request_memory
from fastgen.serving.clients.deployments import Deployment, registered, this_deployment
from fastgen.serving.ending import Ending
from fastgen.serving.engine.engine import ServedEngine
from fastgen.serving.engine.request import EngineWatcher
from fastgen.serving.garbage import COLLECTOR
from fastgen.serving.grpc.server import GrpcServer
from fastgen.serving.heap import return_what_is_freed
from fastgen.serving.http.app import create_app, prepare
from fastgen.serving.http.connection import close_slow
from fastgen.serving.http.generate import terminate_routes
from fastgen.serving.http.hosts import warn_if_open
from fastgen.serving.http.server import BACKLOG, FLUSH_S, HttpServer, bind_shared, listen
from fastgen.serving.monitoring.log import set_up_logging
from fastgen.serving.monitoring.log_queue import LogQueue
from fastgen.serving.open_files import within_file_limit
from fastgen.serving.options import ServeOptions
from fastgen.serving.output import STDOUT, write_text
from fastgen.serving.process_end import end_process
from fastgen.serving.service import Service

# Threads that tokenize. They are more than the conversations that are tokenized at once, so that long ones leave some
# for others.
_MAX_THREADS = 32
_log = logging.getLogger(__name__)


def run(
    arguments: Mapping[str, Any],
    options: ServeOptions,
    *,
    on_ready: Callable[[Deployment], None] | None = None,
    on_terminate: Callable[[], None] = lambda: None,
    make_engine: Callable[[EngineWatcher], ServedEngine] | None = None,
) -> None:
    """Serves the model that ``fastgen.load`` would load with ``arguments``, until SIGTERM or Ctrl-C, or until a client
    ends the server. ``on_ready`` is called with the deployment once the model is served, ``on_terminate`` when a client
    ends the server.

    ``make_engine`` makes the engine; by default it is one process of this machine, and the server listens before the
    model is loaded. With ``make_engine`` the server may replace another one of this user at the same port. So it
    listens only once it can answer, and lets its clients go to the next server as soon as it is to end.

    The first signal lets running requests finish, the second ends them. Then this process ends, with status 0. Raises
    ``FastgenError`` where the server cannot start, or its engine cannot be restarted.
    """
    return_what_is_freed()
    log = set_up_logging(options.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(arguments, options, on_ready or (lambda deployment: None), on_terminate, log, make_engine))
            end_process()
    finally:
        log.flush()


async def _run(
    arguments: Mapping[str, Any],
    options: ServeOptions,
    on_ready: Callable[[Deployment], None],
    on_terminate: Callable[[], None],
    log: LogQueue,
    make_engine: Callable[[EngineWatcher], ServedEngine] | None,
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MAX_THREADS, "work"))
    endings = Endings()
    options = within_file_limit(options)
    is_shared = make_engine is not None

    def terminate() -> None:
        on_terminate()
        endings.first.set()

    ending = Ending(secrets.token_urlsafe(32), options.api_keys, terminate)
    service = Service(
        arguments,
        model_name=options.name,
        limits=options.limits,
        engine_timeout_s=options.engine_timeout_s,
        make_engine=make_engine,
    )
    log.on_dropped = service.metrics.log_line_dropped
    listener = (bind_shared if is_shared else listen)(options.host, options.port)
    if is_shared and options.grpc_port:  # gRPC listens there later, and a port that is taken is to be found now
        bind_shared(options.host, options.grpc_port).close()
    bound: str = listener.getsockname()[0]
    warn_if_open(options, bound)
    app = create_app(service, options)
    app.include_router(terminate_routes(ending))
    http = HttpServer(app, options, service.metrics, bound)
    by_grpc = GrpcServer(service, options, ending, address=bound, is_shared=is_shared)
    serving: asyncio.Task[None] | None = None

    async def begin() -> None:
        nonlocal serving
        listener.listen(BACKLOG)
        serving = asyncio.create_task(http.serve_at(listener))
        await by_grpc.start()

    closing = asyncio.create_task(close_slow(http.server_state, options.connections))
    preparing = asyncio.create_task(prepare(app))
    if not sys.stderr.isatty():  # a terminal shows the progress of loading
        _log.info("loading %s; its address is printed once it is served", arguments["model"])
    try:
        if not is_shared:
            await begin()
        if await endings.first_or(service.start()):
            await preparing
            if is_shared:
                await begin()
            address = _address(options, listener)
            deployment = this_deployment(
                name=service.model_name,
                model=str(arguments["model"]),
                address=address,
                grpc_address=by_grpc.address,
                certificate=options.tls_cert,
                token=ending.token,
            )
            async with COLLECTOR.running():
                with registered(deployment):
                    beside = request_memory(options, memory_bytes())
                    _log.info("memory of %s:\n%s\n%s", service.model_name, service.facts.ledger, beside)
                    log.flush()
                    takes_text = bool(service.facts.tokenizer_class)
                    write_text(
                        STDOUT, announcement(deployment, needs_key=bool(options.api_keys), takes_text=takes_text)
                    )
                    on_ready(deployment)
                    await endings.first_or(_failure(service))
                    if is_shared:
                        http.leave()
                        await endings.second_or(by_grpc.leave(options.drain_timeout_s + FLUSH_S))
                    _log.info("ending: running requests may take %g s to finish", options.drain_timeout_s)
                    await endings.second_or(service.drain(options.drain_timeout_s))
    finally:
        await stop_all(service, by_grpc, http, serving, endings)
        listener.close()
        closing.cancel()
        preparing.cancel()


async def stop_all(
    service: Service, by_grpc: GrpcServer, http: HttpServer, serving: asyncio.Task[None] | None, endings: Endings
) -> None:
    """Ends the engine, then gRPC and HTTP. Each has ``FLUSH_S`` seconds, so that the last answers reach their clients.
    The second signal ends at once what is left. ``serving`` runs ``http``, if that has begun.
    """
    if not await endings.second_or(service.stop(FLUSH_S)):
        await service.stop(0.0)
    if not await endings.second_or(by_grpc.stop(FLUSH_S)):
        await by_grpc.stop(0.0)
    if serving is None:
        return
    http.should_exit = True
    if not await endings.second_or(asyncio.wait({serving})):
        http.force_exit = True
        connections: list[Any] = [*http.server_state.connections]
        for connection in connections:
            connection.abort()
    await serving


class Endings:
    """The signals that end a server: after the first, requests may finish; the second ends it at once."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._came)

    def _came(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    async def first_or(self, work: Coroutine[Any, Any, object]) -> bool:
        """Runs ``work`` until it is done or the first signal arrives. Returns whether it is done."""
        return await _do_unless(work, self.first)

    async def second_or(self, work: Coroutine[Any, Any, object]) -> bool:
        """Runs ``work`` until it is done or the second signal arrives. Returns whether it is done."""
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
    """Waits until the engine cannot be restarted, and raises the reason."""
    raise FastgenError(await service.engine.failed())


def _address(options: ServeOptions, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def announcement(deployment: Deployment, *, needs_key: bool, takes_text: bool = True) -> str:
    """Returns the addresses and a command to try. A model without a tokenizer does not take text."""
    lines = [f"{deployment.name} is served at {deployment.address}"]
    if deployment.grpc_address is not None:
        lines.append(f"and by gRPC at {deployment.grpc_address}")
    prompt = "Once upon a time" if takes_text else [1, 2, 3]
    body = json.dumps({"model": deployment.name, "prompt": prompt, "max_tokens": 32})
    headers = "-H 'content-type: application/json'" + (" -H 'authorization: Bearer KEY'" if needs_key else "")
    lines.append(f"try  curl {deployment.address}/v1/completions {headers} -d '{body}'")
    return "\n".join(f"fastgen: {line}" for line in lines)
