"""Helper processes for work that may take too long. A process that exceeds its limits ends, and another is started."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from fastgen.errors import FastgenError
from fastgen.serving.api_keys import environment_without_keys
from fastgen.serving.refusals import UnavailableError

# How long work waits for a process before another is started, which takes about ten times as long.
_PATIENCE_S = 0.05
# Seconds by the wall clock that a process may take for an answer. Work is limited by its processor time, which is far
# shorter; this ends a process that does not run, because something has stopped it.
MAX_WALL_S = 30.0
# The same for its start, which imports libraries.
MAX_START_S = 120.0
# The ``nice`` value of the processes: their work must not delay the steps and the streams of others.
LOW_PRIORITY = 10
# How often work is given to another process if something else has ended the one that did it.
_MAX_TRIES = 2
# The exit statuses of a process that something else has ended.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
_LENGTH = struct.Struct("<I")


class HelperEndedError(Exception):
    """The process ended, with ``status``, because of the work that it was given."""

    def __init__(self, status: int):
        super().__init__(f"the process ended with status {status}")
        self.took_too_long = status == -signal.SIGPROF
        self.status = status


class HelperProcesses:
    """At most ``max_processes`` processes of ``python -m MODULE``, each of which runs :func:`answer_all`.

    Each process is first sent ``beginning``. A call that has to wait for a process starts another one, so that slow
    work does not hold up the rest. May be used from several threads.
    """

    def __init__(self, module: str, beginning: bytes = b"", *, max_processes: int):
        self._command, self._beginning = [sys.executable, "-m", module], beginning
        self._max_processes = max_processes
        self._lock = threading.Lock()
        self._processes: set[_Process] = set()
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._is_closed = False

    def start(self) -> None:
        """Starts one process before it is needed, because that takes a second. Raises ``FastgenError`` if that
        fails.
        """
        self._put_another()

    def ask(self, request: bytes) -> bytes:
        """Returns the answer of one process.

        Raises ``HelperEndedError`` if the work itself ends the process. A process that was killed from outside, as by
        the system for want of memory, or that gave no answer for ``MAX_WALL_S`` seconds, says nothing of the work: then
        another process tries. Raises ``UnavailableError`` if that one ends the same way, and after :meth:`close`.
        """
        for _ in range(_MAX_TRIES):
            process = self._take()
            answer = process.ask(request, MAX_WALL_S)
            if answer is not None:
                self._idle.put(process)
                return answer
            status = self._drop(process)
            with contextlib.suppress(FastgenError):  # it would meet the next calls, too
                self._put_another()  # this call is late already, but the next ones need not be
            if status not in _FROM_OUTSIDE:
                raise HelperEndedError(status)
        raise UnavailableError(f"{_MAX_TRIES} helper processes were killed while they worked on this request")

    def close(self) -> None:
        """Ends all processes; their work fails."""
        with self._lock:
            self._is_closed = True
        for process in list(self._processes):
            process.kill()
        with contextlib.suppress(queue.Empty):
            while True:
                self._drop(self._idle.get_nowait())

    def _take(self) -> _Process:
        """Returns an idle process."""
        while True:
            try:
                process = self._idle.get(timeout=_PATIENCE_S if self._processes else 0)
            except queue.Empty:
                self._put_another()
                continue
            if process.is_alive:
                return process
            self._drop(process)

    def _put_another(self) -> None:
        """Starts one more idle process, unless the maximum is reached. Raises ``UnavailableError`` if the system
        refuses it, or ends it before it is ready, and ``FastgenError`` if it ends by itself.
        """
        name = " ".join(self._command[1:])
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the server is ending")
            if len(self._processes) == self._max_processes:
                return
            try:
                process = _Process(self._command)
            except OSError as error:
                raise UnavailableError(f"{name} cannot be started now: {error}") from error
            self._processes.add(process)
        if process.ask(self._beginning, MAX_START_S) is None:
            status = self._drop(process)
            if status in _FROM_OUTSIDE:
                raise UnavailableError(f"{name} was killed before it was ready")
            raise FastgenError(f"{name} ended with status {status} before it was ready")
        self._idle.put(process)

    def _drop(self, process: _Process) -> int:
        """Ends the process and returns its exit status."""
        with self._lock:
            self._processes.discard(process)
        return process.end()


class _Process:
    """A process that answers one thread at a time."""

    def __init__(self, command: list[str]) -> None:
        environment = environment_without_keys()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=environment)
        with contextlib.suppress(OSError):  # it has ended, or this process may not
            priority = max(LOW_PRIORITY, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PROCESS, self._process.pid, priority)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Returns its answer, or ``None`` if it ends before it has one. It is killed after ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        try:
            _write_message(_Until(self._to, select.POLLOUT, deadline_s), request)
            return _read_message(_Until(self._from, select.POLLIN, deadline_s))
        except TimeoutError:
            self.kill()
            return None
        except OSError:
            return None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """Ends it if it still runs. Returns its exit status."""
        if self._process.poll() is None:
            self._to.close()  # closing its input ends it
        status = self._process.wait()
        self._to.close()
        self._from.close()
        return status


class _Stream(Protocol):
    """A binary file."""

    def read(self, size: int, /) -> bytes | None: ...

    def write(self, data: memoryview, /) -> int | None: ...


class _Until:
    """A pipe that is waited for until ``deadline_s`` of ``time.monotonic``; then it raises ``TimeoutError``."""

    def __init__(self, pipe: IO[bytes], event: int, deadline_s: float):
        self._pipe, self._deadline_s = pipe, deadline_s
        self._poll = select.poll()
        self._poll.register(pipe.fileno(), event)

    def read(self, size: int) -> bytes | None:
        self._wait()
        return self._pipe.read(size)

    def write(self, data: memoryview) -> int | None:
        self._wait()
        return self._pipe.write(data)

    def _wait(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0 or not self._poll.poll(1000 * left_s):
            raise TimeoutError


def answer_all(begin: Callable[[bytes], Callable[[bytes], bytes]], *, max_cpu_s: float, max_memory_bytes: int) -> None:
    """Runs in a helper process: answers messages from standard input until it is closed.

    ``begin`` builds the answering function from the first message. An answer that takes more than ``max_cpu_s`` seconds
    of processor time ends the process, by a signal that cannot be caught.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal; the server handles it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    requests, answers = os.fdopen(0, "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # printed text must not be taken for an answer
    beginning = _read_message(requests)
    if beginning is None:
        return
    answer = begin(beginning)
    _limit_memory(max_memory_bytes)
    _write_message(answers, b"")  # reports that it is ready
    while (request := _read_message(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        answered = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write_message(answers, answered)


def _limit_memory(max_more_bytes: int) -> None:
    """Allows this process ``max_more_bytes`` beyond the memory that it has now, if the system reports that."""
    if sys.platform == "linux":
        size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size_bytes + max_more_bytes,) * 2)


def _write_message(stream: _Stream, message: bytes) -> None:
    """Writes the length of ``message``, then ``message``."""
    left = memoryview(_LENGTH.pack(len(message)) + message)
    while left:
        left = left[stream.write(left) or 0 :]


def _read_message(stream: _Stream) -> bytes | None:
    """Returns the next message, or ``None`` if the other end has closed."""
    head = _read_exactly(stream, _LENGTH.size)
    return None if head is None else _read_exactly(stream, _LENGTH.unpack(head)[0])


def _read_exactly(stream: _Stream, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        piece = stream.read(size - len(found))
        if not piece:
            return None
        found += piece
    return bytes(found)
