"""An engine's process as its server sees it: started, watched, restarted and stopped.

The process is restarted if it ends by itself or is silent for too long. It reports a status several times a second
between its steps, so silence means a step that does not end, or a suspended process.
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
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import zmq

from fastgen.errors import FastgenError
from fastgen.serving.api_keys import environment_without_keys
from fastgen.serving.breaks import BREAKS
from fastgen.serving.engine.messages import (
    EngineFacts,
    LoadFailed,
    Ready,
    Reply,
    Report,
    RequestEncoder,
    Stop,
    ToEngine,
    has_come,
    to_server,
)
from fastgen.serving.engine.restarts import Restarts
from fastgen.serving.engine.socket_directory import SocketDirectory
from fastgen.serving.refusals import EngineDiedError, UnavailableError

State = Literal["starting", "ready", "restarting", "stopped", "failed"]
_log = logging.getLogger(__name__)

# How often the process's silence is checked.
_BEAT_S = 0.5
# Consecutive failed starts of the engine after which no more are tried.
_MAX_STARTS = 3


class EngineListener(Protocol):
    """Receives what comes from an engine's process."""

    def engine_ready(self, facts: EngineFacts) -> None:
        """A new process is ready and has no requests yet."""

    def engine_sent(self, message: Report | Reply, encoded: bytes) -> None:
        """The process sent ``message``; ``encoded`` is the same as MessagePack."""

    def engine_read(self) -> None:
        """All messages that had come were passed on."""

    def engine_beat(self) -> None:
        """Called about every half second while the process runs."""

    def engine_ended(self, failure: Exception) -> None:
        """The process has ended, and all its requests with it."""


class EngineProcess:
    """Starts an engine's process, and restarts it if it ends by itself or is silent for ``timeout_s`` seconds.

    ``arguments`` are those of ``fastgen.load``. All methods belong to one event loop.
    """

    def __init__(self, arguments: Mapping[str, Any], listener: EngineListener, *, timeout_s: float):
        self._arguments, self._listener, self._timeout_s = dict(arguments), listener, timeout_s
        self.state: State = "starting"
        self.facts: EngineFacts | None = None
        self.num_restarts = 0
        # Why the engine could not be restarted, once no more starts are tried.
        self.failure: asyncio.Future[str] | None = None
        self._heard_s = time.monotonic()
        self._num_processes = 0
        self._ready: asyncio.Future[EngineFacts] | None = None
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._encoder = RequestEncoder()
        self._will_receive = False
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[int] | None = None
        self._directory: SocketDirectory | None = None
        self._restarts = Restarts()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Returns the id of the process, or ``None`` if there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineFacts:
        """Starts the process and waits until its model is loaded. Raises ``FastgenError`` if that fails."""
        self.failure = asyncio.get_running_loop().create_future()
        facts = await self._launch()
        self._keeper = asyncio.create_task(self._supervise())
        return facts

    def check_ready(self) -> None:
        """Raises ``UnavailableError`` if requests cannot be accepted now."""
        if self.state != "ready":
            retry_after_s = 1.0 if self.facts is None else self.facts.load_s
            raise UnavailableError(
                f"the engine is not ready: it is {self.state}; try again in a moment", retry_after_s=retry_after_s
            )

    def answered(self) -> None:
        """Records that the engine has ended an answer by itself, so it is of use."""
        self._restarts.answered()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the process, by force after ``timeout_s``."""
        was_ready, self.state = self.state == "ready", "stopped"
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if self._ended is not None and not self._ended.done():
            assert self._process is not None
            if was_ready:
                with contextlib.suppress(UnavailableError):
                    self.send(Stop())
                await asyncio.wait({self._ended}, timeout=timeout_s)
            self._process.kill()
            await asyncio.wait({self._ended})  # cancelling this wait must not cancel the shared future
        self._close_socket()
        self._context.term()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    async def _launch(self) -> EngineFacts:
        """Starts a process and waits until it is ready."""
        self._ready = asyncio.get_running_loop().create_future()
        try:
            self._open_socket()
            process = self._start_process()
        except (OSError, zmq.ZMQError) as error:  # no memory, no descriptors
            raise FastgenError(f"the engine's process cannot be started: {error}") from error
        self._ended = end_of(process)
        awaited: set[asyncio.Future[Any]] = {self._ready, self._ended}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        self._receive()  # its last messages before it ended
        if not self._ready.done():
            raise FastgenError(f"the engine's process {ending_text(self._ended.result())} while it loaded")
        self.facts = self._ready.result()
        self._heard_s = time.monotonic()
        self._restarts.ready(self._heard_s)
        self._listener.engine_ready(self.facts)
        self.state = "ready"
        return self.facts

    async def _supervise(self) -> None:
        """Watches the process, and restarts it when it ends, until restarting fails too often."""
        while True:
            why = await self._end_of_process()
            self.state = "restarting"
            self._process_ended(
                EngineDiedError(f"the engine's process {why} while this request was in it; send it again")
            )
            delay_s = self._restarts.died(time.monotonic())
            _log.error("the engine's process %s%s", why, _what_follows(delay_s))
            if delay_s is None:
                self._fail(
                    f"the engine ended {self._restarts.num_useless} times in a row before it had answered a request; "
                    f"the last one {why}"
                )
                return
            await asyncio.sleep(delay_s)
            for attempt in range(1, _MAX_STARTS + 1):
                self.num_restarts += 1
                try:
                    await self._launch()
                    break
                except FastgenError as error:
                    self._process_ended(EngineDiedError(str(error)))
                    _log.error("the engine did not start, attempt %d of %d: %s", attempt, _MAX_STARTS, error)
                    if attempt == _MAX_STARTS:
                        self._fail(f"the engine did not start {_MAX_STARTS} times in a row: {error}")
                        return

    def _fail(self, why: str) -> None:
        """Gives up the engine."""
        self.state = "failed"
        assert self.failure is not None
        self.failure.set_result(why)

    async def _end_of_process(self) -> str:
        """Waits until the process has ended, and ends it if it is silent for too long. Returns how it ended.

        A pause of this event loop counts as two beats at most: its cause, for example a suspended machine, may have
        held up the engine as well.
        """
        assert self._process is not None
        assert self._ended is not None
        silent_s = 0.0
        while not self._ended.done():
            heard_s, began_s = self._heard_s, time.monotonic()
            await asyncio.wait({self._ended}, timeout=_BEAT_S)
            self._receive()  # messages that came while this loop was busy count
            silent_s += min(time.monotonic() - began_s, 2 * _BEAT_S)
            if self._heard_s > heard_s:
                silent_s = 0.0
            if silent_s > self._timeout_s and not self._ended.done():
                self._process.kill()
                await asyncio.wait({self._ended})  # cancelling this wait must not cancel the shared future
                return f"was silent for {silent_s:.1f} s and was ended"
            self._listener.engine_beat()
        return ending_text(self._ended.result())

    def _process_ended(self, failure: Exception) -> None:
        """Takes the last messages of a process that has ended, and closes its socket."""
        self._receive()
        self._close_socket()
        self._listener.engine_ended(failure)

    def _start_process(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "fastgen.serving.engine.process", self._address(), str(os.getpid())]
        environment = environment_without_keys()
        self._process = process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(self._arguments).encode())
        return process

    def _address(self) -> str:
        return f"ipc://{self._socket_path()}"

    def _socket_path(self) -> Path:
        assert self._directory is not None
        return self._directory.path / f"engine-{self._num_processes}"

    def _open_socket(self) -> None:
        if self._directory is None:
            self._directory = SocketDirectory()
        self._encoder = RequestEncoder()
        self._num_processes += 1  # each process has its own address, so it receives no message for the previous one
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(self._address())
        self._socket = socket
        BREAKS.add(self._receive)
        asyncio.get_running_loop().add_reader(socket.fileno(), BREAKS.take_now)

    def _close_socket(self) -> None:
        if self._socket is not None:
            BREAKS.remove(self._receive)
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._socket_path().unlink(missing_ok=True)  # closing it leaves the file

    # --- messages

    def send(self, message: ToEngine) -> None:
        """Sends a message. Raises ``UnavailableError`` if the process has ended and this was not noticed yet."""
        self.send_encoded(self._encoder.encode(message))

    def send_encoded(self, encoded: bytes) -> None:
        """Sends a ``ToEngine`` that is MessagePack already. Raises like :meth:`send`."""
        assert self._socket is not None
        try:
            self._socket.send(encoded, zmq.NOBLOCK)
        except zmq.Again:
            raise UnavailableError("the engine's process has ended; another starts, try again in a moment") from None
        # The descriptor signals changes only, and sending may have consumed a signal.
        if not self._will_receive:
            self._will_receive = True
            asyncio.get_running_loop().call_soon(BREAKS.take_now)

    def _receive(self) -> None:
        """Takes all messages that have arrived."""
        self._will_receive = False
        while self._socket is not None and has_come(self._socket):
            encoded = self._socket.recv()
            message = to_server.decode(encoded)
            self._heard_s = time.monotonic()
            match message:
                case Report() | Reply():
                    self._listener.engine_sent(message, encoded)
                case Ready():
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_result(message.facts)
                case LoadFailed():
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_exception(FastgenError(message.error))
        self._listener.engine_read()


def end_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Returns a future of the exit status of ``process``. Waiting for it blocks neither the loop nor the exit of this
    process.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def wait() -> None:
        status = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set_result, status)

    threading.Thread(target=wait, name="engine-process", daemon=True).start()
    return ended


def _what_follows(delay_s: float | None) -> str:
    if delay_s is None:
        return "; no more are started"
    return f"; starting another in {delay_s:g} s" if delay_s else "; starting another"


def ending_text(status: int) -> str:
    """Returns in words how a process with this exit status ended."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
