"""The server's side of the engine: its process, the requests in it, and what is told of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import zmq

from fastgen.errors import FastgenError
from fastgen.runtime.sampling_params import SamplingParams
from fastgen.serving.messages import (
    Ask,
    Cancel,
    EngineFacts,
    LoadFailed,
    Progress,
    Ready,
    Reply,
    Report,
    Status,
    Stop,
    Submit,
    ToEngine,
    encoder,
    pack_sampling,
    to_server,
)
from fastgen.serving.refusals import BadRequestError, EngineDiedError, UnavailableError

State = Literal["starting", "ready", "restarting", "stopped"]
_T = TypeVar("_T")


class EngineRequest:
    """A request in the engine. Its news are there to be taken as they come; a failure comes as an exception."""

    def __init__(self, number: int):
        self.number = number
        self._news: list[Progress] = []
        self._failure: Exception | None = None
        self._has_news = asyncio.Event()

    async def news(self) -> list[Progress]:
        """What has come since the last call, at least something. Raises :class:`RefusedError` where it failed."""
        await self._has_news.wait()
        if self._failure is not None and not self._news:
            raise self._failure
        self._has_news.clear()
        if self._failure is not None:
            self._has_news.set()
        news, self._news = self._news, []
        return news

    def add(self, progress: Progress) -> None:
        self._news.append(progress)
        self._has_news.set()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._has_news.set()


class EngineClient:
    """Starts an engine's process, and again where it ends by itself.

    ``arguments`` are those of ``fastgen.load``. All methods belong to one event loop.
    """

    def __init__(self, arguments: Mapping[str, Any]):
        self._arguments = dict(arguments)
        self.state: State = "starting"
        self.facts: EngineFacts | None = None
        self.status = Status(0, 0, 0)
        self.heard_s = time.monotonic()
        self.num_restarts = 0
        self._numbers = count()
        self._requests: dict[int, EngineRequest] = {}
        self._asked: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._ready: asyncio.Future[EngineFacts] | None = None
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="fastgen-")
        self._waiter: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Requests in the engine."""
        return len(self._requests)

    async def start(self) -> EngineFacts:
        """Start the process and wait until its model is loaded. Raises ``FastgenError`` where that fails."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._open_socket()
        ready, process = self._ready, self._process
        assert process is not None
        self._waiter = loop.create_task(self._wait(process))
        self.facts = await ready
        self.state = "ready"
        return self.facts

    def submit(self, prompt_ids: list[int], sampling: SamplingParams, *, is_stream: bool) -> EngineRequest:
        """Send a request. Whether the engine takes it comes with the first news."""
        self._check_ready()
        request = EngineRequest(next(self._numbers))
        self._requests[request.number] = request
        self._send(Submit(request.number, prompt_ids, pack_sampling(sampling), is_stream))
        return request

    def cancel(self, request: EngineRequest) -> None:
        """Nobody waits for ``request`` any more. It is gone before the next step."""
        if self._requests.pop(request.number, None) is not None and self.state == "ready":
            self._send(Cancel(request.number))

    async def ask(self, what: str, kind: type[_T]) -> _T:
        """What the engine answers, between two steps, when asked for ``what``, a key of ``engine_process.ANSWERS``."""
        self._check_ready()
        number = next(self._numbers)
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        self._send(Ask(number, what))
        try:
            return msgspec.msgpack.decode(await answer, type=kind)
        finally:
            self._asked.pop(number, None)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the process, by force after ``timeout_s``. What is in it fails."""
        self.state = "stopped"
        self._fail_all(UnavailableError("the server is ending"))
        if self._process is not None and self._process.poll() is None:
            self._send(Stop())
            if self._waiter is not None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.shield(self._waiter), timeout_s)
            self._process.kill()
        if self._waiter is not None:
            await self._waiter
        self._close_socket()
        self._context.term()
        self._directory.cleanup()

    def _check_ready(self) -> None:
        if self.state != "ready":
            raise UnavailableError(f"the engine is not ready: it is {self.state}; try again in a moment")

    def _open_socket(self) -> None:
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        # An address of its own for each process, so that a new one hears nothing that was meant for the last.
        address = f"ipc://{Path(self._directory.name) / f'engine-{self.num_restarts}'}"
        socket.bind(address)
        self._socket = socket
        asyncio.get_running_loop().add_reader(socket.fileno(), self._receive)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastgen.serving.engine_process", address], stdin=subprocess.PIPE, env=os.environ
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(self._arguments).encode())

    def _close_socket(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _send(self, message: ToEngine) -> None:
        assert self._socket is not None
        self._socket.send(encoder.encode(message), zmq.NOBLOCK)
        # The descriptor tells of a change only, and sending may have seen and forgotten one.
        asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        """Take all that has come."""
        while self._socket is not None:
            try:
                message = to_server.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.heard_s = time.monotonic()
            match message:
                case Report():
                    self._take(message)
                case Reply():
                    if (asked := self._asked.get(message.number)) is not None and not asked.done():
                        asked.set_result(message.body)
                case Ready():
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_result(message.facts)
                case LoadFailed():
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_exception(FastgenError(message.error))

    def _take(self, report: Report) -> None:
        for progress in report.progress:
            if (request := self._requests.get(progress.number)) is not None:
                request.add(progress)
        for refused in report.refused:
            if (request := self._requests.pop(refused.number, None)) is not None:
                request.fail(BadRequestError(refused.error))
        if report.status is not None:
            self.status = report.status

    def finish(self, request: EngineRequest) -> None:
        """All of ``request`` was told."""
        self._requests.pop(request.number, None)

    def _fail_all(self, failure: Exception) -> None:
        for request in self._requests.values():
            request.fail(failure)
        self._requests.clear()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(failure)

    async def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the process to end; where nobody asked it to, start another."""
        status = await asyncio.to_thread(process.wait)
        self._receive()  # what it said before it ended
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(FastgenError(f"the engine's process ended while it loaded, with status {status}"))
            return
        if self.state != "ready":
            return
        self.state = "restarting"
        self._fail_all(EngineDiedError(f"the engine's process ended (status {status}) while this request was in it"))
        self._close_socket()
        self.num_restarts += 1
        await self.start()
