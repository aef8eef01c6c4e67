"""The server's side of the engine: its process, the requests in it, and what is told of them.

The process is started again where it ends by itself, or is silent for too long; what was in it fails, at once. It
tells a status several times a second between its steps, so silence is a step that does not end, or a process that was
stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import zmq

from fastgen.errors import FastgenError, GenerationError
from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.api_keys import environment_without_keys
from fastgen.serving.engine.messages import (
    Ask,
    Cancel,
    Check,
    EngineFacts,
    LoadFailed,
    Ready,
    Reply,
    Report,
    Status,
    Stop,
    Submit,
    ToEngine,
    encoder,
    has_come,
    pack_sampling,
    to_server,
)
from fastgen.serving.engine.request import EngineRequest, EngineWatcher
from fastgen.serving.refusals import BadRequestError, EngineDiedError, UnavailableError

State = Literal["starting", "ready", "restarting", "stopped", "failed"]
_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# How often the engine's counters are asked for, and its silence is looked at.
_BEAT_S = 0.5
# How often in a row the engine may fail to start before nothing more is tried.
_MOST_STARTS = 3


class EngineClient:
    """Starts an engine's process, and again where it ends by itself or is silent for ``timeout_s`` seconds.

    ``arguments`` are those of ``fastgen.load``. All methods belong to one event loop.
    """

    def __init__(self, arguments: Mapping[str, Any], watcher: EngineWatcher, *, timeout_s: float):
        self._arguments, self._watcher, self._timeout_s = dict(arguments), watcher, timeout_s
        self.state: State = "starting"
        self.facts: EngineFacts | None = None
        self.status = Status(0, 0, 0)
        self.num_restarts = 0
        # Why the engine could not be started again, once nothing more is tried.
        self.failure: asyncio.Future[str] | None = None
        self._heard_s = time.monotonic()
        self._numbers, self._num_processes = count(), 0
        self._requests: dict[int, EngineRequest] = {}
        self._asked: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._ready: asyncio.Future[EngineFacts] | None = None
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._will_receive = False
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[int] | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="fastgen-")
        self._keeper: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Requests whose last word has not been taken."""
        return len(self._requests)

    @property
    def pid(self) -> int | None:
        """The process that there is, if any."""
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineFacts:
        """Start the process and wait until its model is loaded. Raises ``FastgenError`` where that fails."""
        self.failure = asyncio.get_running_loop().create_future()
        facts = await self._launch()
        self._keeper = asyncio.create_task(self._keep())
        return facts

    def check_ready(self) -> None:
        """Raise ``UnavailableError`` where no request can be taken."""
        if self.state != "ready":
            retry_after_s = 1.0 if self.facts is None else self.facts.load_s
            raise UnavailableError(
                f"the engine is not ready: it is {self.state}; try again in a moment", retry_after_s=retry_after_s
            )

    def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, is_stream: bool, arrived_s: float
    ) -> EngineRequest:
        """Send a request that came at ``arrived_s`` of ``time.monotonic``. Whether the engine takes it comes with the
        first news."""
        self.check_ready()
        request = EngineRequest(next(self._numbers), len(prompt_ids), sampling, arrived_s)
        self._send(Submit(request.number, prompt_ids, pack_sampling(sampling), is_stream))
        self._requests[request.number] = request
        return request

    def cancel(self, request: EngineRequest) -> None:
        """Nobody waits for ``request`` any more. It is gone before the next step."""
        if self._drop(request) and request.num_open and self.state == "ready":
            with contextlib.suppress(UnavailableError):
                self._send(Cancel(request.number))

    def finish(self, request: EngineRequest) -> None:
        """All that was told of ``request`` was taken."""
        self._drop(request)

    async def ask(self, what: str, kind: type[_T]) -> _T:
        """What the engine answers, between two steps, when asked for ``what``, a key of ``engine_process.ANSWERS``.
        Raises ``GenerationError`` where it cannot tell."""
        return msgspec.msgpack.decode(await self._reply_to(Ask(next(self._numbers), what)), type=kind)

    async def refusal(self, prompt_ids: list[int], sampling: SamplingParams) -> str | None:
        """Why the engine would refuse such a request, if it would. Raises as :meth:`ask`."""
        asked = Check(next(self._numbers), prompt_ids, pack_sampling(sampling))
        return msgspec.msgpack.decode(await self._reply_to(asked), type=str | None)

    async def _reply_to(self, message: Ask | Check) -> msgspec.Raw:
        self.check_ready()
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._asked[message.number] = answer
        try:
            self._send(message)
            return await answer
        finally:
            self._asked.pop(message.number, None)

    def fail_all(self, failure: Exception) -> None:
        """End what is in the engine with ``failure``."""
        for request in list(self._requests.values()):
            request.fail(failure)
            self.cancel(request)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(failure)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the process, by force after ``timeout_s``. What is in it fails."""
        was_ready, self.state = self.state == "ready", "stopped"
        self.fail_all(UnavailableError("the server is ending"))
        for task in (self._keeper, self._counting):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        if self._ended is not None and not self._ended.done():
            assert self._process is not None
            if was_ready:
                with contextlib.suppress(UnavailableError):
                    self._send(Stop())
                await asyncio.wait({self._ended}, timeout=timeout_s)
            self._process.kill()
            await self._ended
        self._close_socket()
        self._context.term()
        self._directory.cleanup()

    # --- the process

    async def _launch(self) -> EngineFacts:
        """Start a process and wait until it is ready."""
        self._ready = asyncio.get_running_loop().create_future()
        try:
            self._open_socket()
            process = self._start_process()
        except (OSError, zmq.ZMQError) as error:  # no memory, no descriptors
            raise FastgenError(f"the engine's process cannot be started: {error}") from error
        self._ended = _end_of(process)
        awaited: set[asyncio.Future[Any]] = {self._ready, self._ended}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        self._receive()  # what it said before it ended
        if not self._ready.done():
            raise FastgenError(f"the engine's process {_how(self._ended.result())} while it loaded")
        self.facts = self._ready.result()
        self._heard_s = time.monotonic()
        self._watcher.engine_ready(self.facts)
        self.state = "ready"
        return self.facts

    async def _keep(self) -> None:
        """Watch the process, and start another where it ends, for as long as that works."""
        while True:
            why = await self._end_of_process()
            _log.error("the engine's process %s; starting another", why)
            self.state = "restarting"
            self._let_go(EngineDiedError(f"the engine's process {why} while this request was in it; send it again"))
            for attempt in range(1, _MOST_STARTS + 1):
                self.num_restarts += 1
                try:
                    await self._launch()
                    break
                except FastgenError as error:
                    self._let_go(EngineDiedError(str(error)))
                    _log.error("the engine did not start, attempt %d of %d: %s", attempt, _MOST_STARTS, error)
                    if attempt == _MOST_STARTS:
                        self.state = "failed"
                        assert self.failure is not None
                        self.failure.set_result(f"the engine did not start {_MOST_STARTS} times in a row: {error}")
                        return

    async def _end_of_process(self) -> str:
        """Wait until the process has ended, and end it where it is silent for too long. Returns how it ended.

        Time in which this loop stood still counts as two beats at most: what held it up, a machine that was paused for
        one, may have held the engine up as well.
        """
        assert self._process is not None
        assert self._ended is not None
        silent_s = 0.0
        while not self._ended.done():
            heard_s, began_s = self._heard_s, time.monotonic()
            await asyncio.wait({self._ended}, timeout=_BEAT_S)
            self._receive()  # what has come while this loop was busy counts
            silent_s += min(time.monotonic() - began_s, 2 * _BEAT_S)
            if self._heard_s > heard_s:
                silent_s = 0.0
            if silent_s > self._timeout_s and not self._ended.done():
                self._process.kill()
                await asyncio.wait({self._ended})  # to be cancelled here must not cancel what others wait for
                return f"was silent for {silent_s:.1f} s and was ended"
            if self._counting is None or self._counting.done():
                self._counting = asyncio.create_task(self.count())
        return _how(self._ended.result())

    async def count(self) -> None:
        """Have the watcher told what the engine has counted, if it is there."""
        with contextlib.suppress(UnavailableError, EngineDiedError, GenerationError):
            counted = await self.ask("metrics", Metrics)
            if self.state == "ready":  # else the process has ended meanwhile, and with it its counters
                self._watcher.engine_counted(counted)

    def _let_go(self, failure: Exception) -> None:
        """The process has ended, and with it all that was in it."""
        self._receive()
        self.fail_all(failure)
        self._close_socket()
        self._watcher.engine_ended()

    def _start_process(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "fastgen.serving.engine.process", self._address(), str(os.getpid())]
        environment = environment_without_keys()
        self._process = process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(self._arguments).encode())
        return process

    def _address(self) -> str:
        return f"ipc://{Path(self._directory.name) / f'engine-{self._num_processes}'}"

    def _open_socket(self) -> None:
        self._num_processes += 1  # each has an address of its own, and hears nothing that was meant for the last
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(self._address())
        self._socket = socket
        asyncio.get_running_loop().add_reader(socket.fileno(), self._receive)

    def _close_socket(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    # --- what is said

    def _send(self, message: ToEngine) -> None:
        """Raises ``UnavailableError`` where the process is gone, though that was not noticed yet."""
        assert self._socket is not None
        try:
            self._socket.send(encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise UnavailableError("the engine's process has ended; another starts, try again in a moment") from None
        # The descriptor tells of a change only, and sending may have seen and forgotten one.
        if not self._will_receive:
            self._will_receive = True
            asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        """Take all that has come."""
        self._will_receive = False
        while self._socket is not None and has_come(self._socket):
            message = to_server.decode(self._socket.recv())
            self._heard_s = time.monotonic()
            match message:
                case Report():
                    self._take(message)
                case Reply():
                    if (asked := self._asked.get(message.number)) is not None and not asked.done():
                        if message.error is None:
                            asked.set_result(message.body)
                        else:
                            asked.set_exception(GenerationError(message.error))
                case Ready():
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_result(message.facts)
                case LoadFailed():
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_exception(FastgenError(message.error))

    def _take(self, report: Report) -> None:
        for number in report.started:
            if (request := self._requests.get(number)) is not None:
                self._start(request)
        tokens = iter(report.tokens)
        for number, token_id in zip(tokens, tokens, strict=True):
            if (request := self._requests.get(number)) is not None:
                if not request.has_started:
                    self._start(request)
                request.add_token(token_id)
        for progress in report.progress:
            if (request := self._requests.get(progress.number)) is not None:
                if progress.token_ids and not request.has_started:
                    self._start(request)
                if progress.end is not None:
                    request.num_open -= 1
                    self._watcher.completion_ended(request, progress)
                    if not request.num_open:
                        self._watcher.request_gone(request)
                request.add(progress)
        for refused in report.refused:
            if (request := self._requests.get(refused.number)) is not None:
                failure = GenerationError(refused.error) if refused.is_failure else BadRequestError(refused.error)
                request.fail(failure)
                self._drop(request)
        if report.status is not None:
            self.status = report.status

    def _start(self, request: EngineRequest) -> None:
        request.has_started = True
        self._watcher.request_started(request)

    def _drop(self, request: EngineRequest) -> bool:
        """Know nothing more of ``request``; whether anything was known."""
        if self._requests.pop(request.number, None) is None:
            return False
        if request.num_open:
            self._watcher.request_gone(request)
        return True


def _end_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """The status that ``process`` will end with. Waiting for it keeps neither the loop nor this process from ending."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def wait() -> None:
        status = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set_result, status)

    threading.Thread(target=wait, name="engine-process", daemon=True).start()
    return ended


def _how(status: int) -> str:
    """How a process ended that has this ``status``."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
