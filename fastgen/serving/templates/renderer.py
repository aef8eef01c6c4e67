"""The server's side of the process that renders chat templates: started when it is needed, and again where it ended."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

import msgspec

from fastgen.errors import InvalidArgumentError

MAX_CPU_S = 2.0
"""Of processor time, to render a conversation."""
MAX_MEMORY_BYTES = 512 << 20
"""What the process may have beside what it starts with."""
MAX_CHARACTERS = 1 << 24
"""Of a rendered conversation."""
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
    anywhere: what it does happens in a process that is ended where it takes too long or too much memory. May be used
    from several threads.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Have the process there before it is needed: it takes a second."""
        with self._lock:
            self._running()

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
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                write_message(process.stdin, request)
                answer = read_message(process.stdout)
            except OSError:
                answer = None
            if answer is None:
                status = process.wait()
                self.close()
                raise InvalidArgumentError(_why(status))
        rendered = msgspec.msgpack.decode(answer, type=Rendered)
        if rendered.text is None:
            raise InvalidArgumentError(rendered.error or "it failed")
        return rendered.text

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            command = [sys.executable, "-m", "fastgen.serving.templates.process"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        return self._process


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
