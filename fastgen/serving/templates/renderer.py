"""The server's side of the processes that render chat templates: started when they are needed, and again where they
ended."""

from __future__ import annotations

import contextlib
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

import msgspec

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.serving.refusals import UnavailableError

MAX_CPU_S = 2.0
"""Of processor time, to render a conversation."""
MAX_MEMORY_BYTES = 512 << 20
"""What the process may have beside what it starts with."""
MAX_CHARACTERS = 1 << 24
"""Of a rendered conversation."""
MAX_PROCESSES = 4
_PATIENCE_S = 0.05
"""How long a conversation waits for a process until another is started, which takes some ten times as long."""
_LENGTH = struct.Struct("<I")


class Conversation(msgspec.Struct, array_like=True):
    """What is to be rendered."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    special_tokens: dict[str, Any]


class Rendered(msgspec.Struct, array_like=True):
    """Its text, or why there is none."""

    text: str | None
    error: str | None


class TemplateRenderer:
    """Renders the chat template of ``tokenizer``, one of transformers'. A template is a program, and may come from
    anywhere: what it does happens in a process that is ended where it takes too long or too much memory. Who has to
    wait for that starts another, so that a conversation that takes long holds up no other. May be used from several
    threads.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._processes: set[_Process] = set()
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._is_closed = False

    def start(self) -> None:
        """Have a process there before it is needed: it takes a second. Raises ``FastgenError`` where that fails."""
        self._put_another()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The text of a conversation, up to where the answer begins. Raises whatever stands in its way."""
        told = [dict(tool) for tool in tools] if tools is not None else None
        conversation = Conversation(
            template=self._tokenizer.get_chat_template(tools=told),
            messages=[dict(message) for message in messages],
            tools=told,
            special_tokens={name: str(token) for name, token in self._tokenizer.special_tokens_map.items()},
        )
        request = msgspec.msgpack.encode(conversation)
        process = self._take()
        answer = process.ask(request)
        if answer is None:
            status = self._drop(process)
            self._put_another()  # whose conversation this was is late already, and others need not be
            raise InvalidArgumentError(_why(status))
        self._idle.put(process)
        rendered = msgspec.msgpack.decode(answer, type=Rendered)
        if rendered.text is None:
            raise InvalidArgumentError(rendered.error or "it failed")
        return rendered.text

    def close(self) -> None:
        """End all processes; what they render fails."""
        with self._lock:
            self._is_closed = True
        for process in list(self._processes):
            process.kill()
        with contextlib.suppress(queue.Empty):
            while True:
                self._drop(self._idle.get_nowait())

    def _take(self) -> _Process:
        """One that has nothing to do."""
        while True:
            try:
                process = self._idle.get(timeout=_PATIENCE_S)
            except queue.Empty:
                self._put_another()
                continue
            if process.is_alive:
                return process
            self._drop(process)

    def _put_another(self) -> None:
        """Have one more that has nothing to do, unless there are as many as there may be."""
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the server is ending")
            if len(self._processes) == MAX_PROCESSES:
                return
            process = _Process()
            self._processes.add(process)
        if not process.is_ready():
            raise FastgenError(f"the process that renders chat templates ended with status {self._drop(process)}")
        self._idle.put(process)

    def _drop(self, process: _Process) -> int:
        """End it; its status."""
        with self._lock:
            self._processes.discard(process)
        return process.end()


class _Process:
    """A process that renders, for one thread at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "fastgen.serving.templates.process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def is_ready(self) -> bool:
        """Wait until it is; ``False`` where it ends before."""
        return read_message(self._from) is not None

    def ask(self, request: bytes) -> bytes | None:
        """Its answer; ``None`` where it ends before it has one."""
        try:
            write_message(self._to, request)
            return read_message(self._from)
        except OSError:
            return None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """End it, if it has not. Returns the status that it ended with."""
        if self._process.poll() is None:
            self._to.close()  # which tells it to
        status = self._process.wait()
        self._to.close()
        self._from.close()
        return status


def write_message(stream: IO[bytes], message: bytes) -> None:
    """``message`` behind its length, whole."""
    left = memoryview(_LENGTH.pack(len(message)) + message)
    while left:
        left = left[stream.write(left) :]


def read_message(stream: IO[bytes]) -> bytes | None:
    """The next one; ``None`` where the other end has gone."""
    head = _read_exactly(stream, _LENGTH.size)
    return None if head is None else _read_exactly(stream, _LENGTH.unpack(head)[0])


def _read_exactly(stream: IO[bytes], size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        piece = stream.read(size - len(found))
        if not piece:
            return None
        found += piece
    return bytes(found)


def _why(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it took more than {MAX_CPU_S:g} s of processor time"
    return f"the process that rendered it ended with status {status}"
