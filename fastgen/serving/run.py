"""A server in the foreground, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import uvicorn

from fastgen.errors import InvalidArgumentError
from fastgen.serving.deployments import Deployment, process_birth, registered
from fastgen.serving.grpc.server import GenerationServicer, create_server
from fastgen.serving.http.app import create_app
from fastgen.serving.http.generate import terminate_routes
from fastgen.serving.keys import ApiKeys
from fastgen.serving.options import ServeOptions
from fastgen.serving.service import Service


def run(
    arguments: Mapping[str, Any], options: ServeOptions, *, on_ready: Callable[[Deployment], None] | None = None
) -> None:
    """Serve the model that ``fastgen.load`` would load with ``arguments``, until SIGTERM or Ctrl-C, or until a client
    ends it. ``on_ready`` is told where it is served, once it is.

    Raises ``FastgenError`` where it cannot start.
    """
    asyncio.run(_run(arguments, options, on_ready or (lambda deployment: None)))


async def _run(arguments: Mapping[str, Any], options: ServeOptions, on_ready: Callable[[Deployment], None]) -> None:
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    keys = ApiKeys.read(options.api_key_file, os.environ)
    token = secrets.token_urlsafe(32)
    service = Service(arguments, model_name=options.name)
    app = create_app(service, options, keys)
    app.include_router(terminate_routes(keys, token, ending.set))
    listener = _listen(options)
    http = _HttpServer(
        uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            ssl_certfile=options.tls_cert_file,
            ssl_keyfile=options.tls_key_file,
        )
    )
    serving = loop.create_task(http.serve(sockets=[listener]))
    grpc_server: grpc.aio.Server | None = None
    asked_to_end = loop.create_task(ending.wait())
    starting = loop.create_task(service.start())
    try:
        grpc_server, grpc_address = await _serve_grpc(options, service, keys, token, ending)
        await asyncio.wait({starting, asked_to_end}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            deployment = _deployment(service, options, arguments, listener, grpc_address, token)
            with registered(deployment):
                _announce(service, deployment)
                on_ready(deployment)
                await asked_to_end
                print("fastgen: ending; requests that run may finish", file=sys.stderr)
                with contextlib.suppress(TimeoutError):
                    await service.drain(options.drain_timeout_s)
    finally:
        await service.stop()
        for task in (starting, asked_to_end):
            task.cancel()
        await asyncio.gather(starting, asked_to_end, return_exceptions=True)
        if grpc_server is not None:
            await grpc_server.stop(grace=1.0)
        http.should_exit = True
        await serving


async def _serve_grpc(
    options: ServeOptions, service: Service, keys: ApiKeys, token: str, ending: asyncio.Event
) -> tuple[grpc.aio.Server | None, str | None]:
    """The server, started, and its address; where it is asked for."""
    if options.grpc_port is None:
        return None, None
    servicer = GenerationServicer(service, keys=keys, token=token, end=ending.set)
    server = create_server(servicer, service)
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"{host}:{options.grpc_port}"
    try:
        if options.tls_cert_file is None or options.tls_key_file is None:
            port = server.add_insecure_port(address)
        else:
            pair = (Path(options.tls_key_file).read_bytes(), Path(options.tls_cert_file).read_bytes())
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise InvalidArgumentError(f"cannot listen on {address} for gRPC: {error}") from None
    await server.start()
    return server, f"{host}:{port}"


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


def _deployment(
    service: Service,
    options: ServeOptions,
    arguments: Mapping[str, Any],
    listener: socket.socket,
    grpc_address: str | None,
    token: str,
) -> Deployment:
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.tls_cert_file is None else "https"
    birth = process_birth(os.getpid())
    assert birth is not None, "this process lives"
    return Deployment(
        name=service.model_name,
        model=str(arguments["model"]),
        address=f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}",
        grpc_address=grpc_address if scheme == "http" or grpc_address is None else f"grpcs://{grpc_address}",
        tls_file=None if options.tls_cert_file is None else str(Path(options.tls_cert_file).absolute()),
        pid=os.getpid(),
        birth=birth,
        token=token,
    )


def _announce(service: Service, deployment: Deployment) -> None:
    """What a person wants to know first, and a line to try."""
    print(service.facts.ledger, file=sys.stderr)
    print(f"fastgen: {service.model_name} is served at {deployment.address}", flush=True)
    if deployment.grpc_address is not None:
        print(f"fastgen: and by gRPC at {deployment.grpc_address}", flush=True)
    body = json.dumps({"model": service.model_name, "prompt": "Once upon a time", "max_tokens": 32})
    print(
        f"fastgen: try  curl {deployment.address}/v1/completions -H 'content-type: application/json' -d '{body}'",
        flush=True,
    )
