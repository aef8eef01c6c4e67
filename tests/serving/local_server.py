"""The HTTP server in this process, with an application that needs no model."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop
from starlette.types import Receive, Scope, Send

from fastgen.serving.http.connection import close_slow
from fastgen.serving.http.server import HttpServer, listen
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ConnectionLimits, ServeOptions

# Longer than anything here takes.
WAIT_S = 20.0


@dataclass
class Application:
    """``/echo`` returns the body, ``/later`` too once it is let go, ``/endless`` sends as much as the client reads,
    ``/never`` sends nothing.
    """

    bodies: list[bytes] = field(default_factory=list)
    num_sent: int = 0
    # Set when the client of ``/endless`` or ``/never`` has gone.
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        self.bodies.append(body)
        leaving = asyncio.create_task(self._leave(receive))
        try:
            if scope["path"] == "/never":
                await leaving
            if scope["path"] == "/later":
                await self.let_go.wait()
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while scope["path"] == "/endless" and not self.gone.is_set():
                await send({"type": "http.response.body", "body": bytes(4096), "more_body": True})
                self.num_sent += 4096
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": body})
        finally:
            leaving.cancel()

    async def _leave(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


@dataclass
class Served:
    app: Application
    http: HttpServer
    metrics: ServerMetrics
    port: int

    async def connect(self, tls: ssl.SSLContext | None = None) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port, ssl=tls))

    async def ask(self, request: bytes, tls: ssl.SSLContext | None = None) -> tuple[int, dict[str, str], bytes]:
        client = await self.connect(tls)
        client.writer.write(request)
        try:
            return await client.response()
        finally:
            client.writer.close()

    async def until_closed(self) -> None:
        while self.http.server_state.connections:
            await asyncio.sleep(0.01)


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body of a response with a length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readline()
            await self.reader.readline()
        return int(head[0].split()[1]), headers, body


@asynccontextmanager
async def serving(options: ServeOptions) -> AsyncIterator[Served]:
    app, metrics = Application(), ServerMetrics(lambda: True)
    listener = listen(options.host, options.port)
    http = HttpServer(app, options, metrics, listener.getsockname()[0])
    tasks = [asyncio.create_task(http.serve_at(listener))]
    tasks.append(asyncio.create_task(close_slow(http.server_state, options.connections)))
    try:
        while not http.started:
            await asyncio.sleep(0.01)
        yield Served(app, http, metrics, listener.getsockname()[1])
    finally:
        app.gone.set()
        http.should_exit = http.force_exit = True
        tasks[1].cancel()
        await asyncio.wait(tasks)


def on_uvloop(work: Coroutine[Any, Any, None]) -> None:
    """Runs ``work`` on the event loop that a server uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def check(test: Callable[[Served], Awaitable[None]], options: ServeOptions | None = None, **limits: Any) -> None:
    """Runs ``test`` against a server with these options or limits, within a time limit."""

    async def run() -> None:
        nonlocal options
        options = options or ServeOptions(port=0, connections=ConnectionLimits(**limits))
        async with asyncio.timeout(WAIT_S), serving(options) as server:
            await test(server)

    on_uvloop(run())


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error_of(body: bytes) -> str:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    message: str = error["message"]
    return message
