"""An OpenAI endpoint that answers by a script, on a thread of its own, for tests of load generators."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

# Longer than anything here takes.
WAIT_S = 30.0


@dataclass
class Script:
    """The way in which requests are answered."""

    first_s: float = 0.0
    gap_s: float = 0.0
    # No answer begins before this many requests have arrived.
    gathers: int = 0
    # Fields that are refused with status 400.
    refused: frozenset[str] = frozenset()
    takes_ids: bool = True
    # Whether answers have the length that was asked for; otherwise they have one token.
    ignores_eos: bool = True
    # Whether a second request on a connection ends it, without an answer.
    drops_kept: bool = False
    # What chunks report: "usage", "token ids" or "nothing".
    reports: str = "usage"
    # Tokens of a chat's answer that are reasoning, and no part of its content.
    num_reasoning: int = 0
    tokens_per_chunk: int = 1
    # After this many tokens of all answers the server is gone.
    dies_after: int | None = None
    # The next chunk is not written before this is true of the number of tokens that were.
    once: Callable[[int], bool] = lambda num_sent: True
    # Answers that are never ended, by the number of the request.
    endless_from: int | None = None


@dataclass
class FakeEndpoint:
    script: Script
    tls: ssl.SSLContext | None = None
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    # When each chunk was written, by ``time.perf_counter``, for each request.
    written: list[list[float]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    num_answered: int = 0
    num_connections: int = 0

    _num_tokens: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    # Set when a request that is no trial has arrived; released for each that was answered.
    arrived: threading.Event = field(default_factory=threading.Event)
    answered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    async def serve(self, ready: threading.Event) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 24, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._one(reader, writer):
                if self.script.drops_kept:
                    await reader.readexactly(1)
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers["content-length"]))
        self.headers.append(headers)
        if head[0].startswith("GET /v1/models"):
            _reply(writer, 200, {"data": [{"id": "fake"}]})
            return True
        if head[0].startswith("GET "):
            _reply(writer, 404, {"error": {"message": "not found"}})
            return True
        asked = json.loads(body)
        self.bodies.append(asked)
        unknown = self.script.refused & (asked.keys() | asked["stream_options"].keys())
        is_chat = head[0].startswith("POST /v1/chat/completions")
        if is_chat != ("messages" in asked):
            _reply(writer, 422, {"error": {"message": "completions have a prompt, chats have messages"}})
            return True
        if unknown or (isinstance(asked.get("prompt"), list) and not self.script.takes_ids):
            _reply(writer, 400, {"error": {"message": f"not taken: {', '.join(sorted(unknown)) or 'token ids'}"}})
            return True
        return await self._answer(asked, writer)

    async def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        script, number = self.script, len(self.written)
        times: list[float] = []
        if is_trial(asked):
            script = replace(
                script,
                first_s=0.0,
                gap_s=0.0,
                once=lambda num_sent: True,
                gathers=0,
                dies_after=None,
                endless_from=None,
            )
        else:
            self.written.append(times)
            self.arrived.set()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self._changed.set()
        try:
            async with asyncio.timeout(WAIT_S):
                while len(self.written) < self.script.gathers and script.gathers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:  # the generator does not send the others: no answer, to this request and later ones
            self.script.gathers = 0
            return False
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        num_wanted = asked["max_tokens"] if script.ignores_eos else 1
        num_sent = 0
        await asyncio.sleep(script.first_s)
        if "messages" in asked:  # as vLLM's server does: the role, before any token
            _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        while num_sent < num_wanted:
            if num_sent:
                await asyncio.sleep(script.gap_s)
                while not script.once(num_sent):
                    await asyncio.sleep(0.001)
            if script.endless_from is not None and number >= script.endless_from and num_sent:
                await asyncio.sleep(WAIT_S)
            size = min(script.tokens_per_chunk, num_wanted - num_sent)
            num_sent += size
            self._num_tokens += 0 if is_trial(asked) else size
            if script.dies_after is not None and self._num_tokens > script.dies_after:
                assert self._server is not None
                self._server.close()
                writer.transport.abort()
                self.in_flight -= 1
                return False
            times.append(time.perf_counter())
            _event(writer, self._chunk(asked, size, num_sent, is_last=num_sent == num_wanted))
            await writer.drain()
        if "include_usage" in asked["stream_options"]:
            _event(writer, {"choices": [], "usage": self._usage(asked, num_sent)})
        self.in_flight -= 1
        self.num_answered += 1
        _piece(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        if not is_trial(asked):
            self.answered.release()
        return True

    def _chunk(self, asked: dict[str, Any], size: int, num_sent: int, *, is_last: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_last else None}
        if "messages" in asked:
            is_reasoning = num_sent <= self.script.num_reasoning
            choice["delta"] = {"reasoning_content" if is_reasoning else "content": "a" * size}
        else:
            choice["text"] = "a" * size
        chunk: dict[str, Any] = {"choices": [choice]}
        if self.script.reports == "token ids":
            choice["token_ids"] = [7] * size
        if self.script.reports == "usage" and "continuous_usage_stats" in asked["stream_options"]:
            chunk["usage"] = self._usage(asked, num_sent)
        return chunk

    def _usage(self, asked: dict[str, Any], num_sent: int) -> dict[str, Any]:
        cached = {"cached_tokens": 3}
        return {
            "prompt_tokens": _size(asked),
            "completion_tokens": num_sent,
            "prompt_tokens_details": cached,
        }


def is_trial(asked: dict[str, Any]) -> bool:
    """Returns whether a request only tries what the server takes. The tests' own requests are longer."""
    return _size(asked) <= 4 and asked["max_tokens"] == 2


def _size(asked: dict[str, Any]) -> int:
    """Returns how many tokens or letters the prompt or the messages have."""
    return sum(len(each["content"]) for each in asked["messages"]) if "messages" in asked else len(asked["prompt"])


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _piece(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _piece(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _reply(writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


@contextmanager
def fake_endpoint(tls: ssl.SSLContext | None = None, **script: Any) -> Iterator[FakeEndpoint]:
    """Runs a :class:`FakeEndpoint` on a thread of its own while the block runs."""
    fake, ready = FakeEndpoint(Script(**script), tls), threading.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=[fake.serve(ready)])
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield fake
    finally:
        loop.call_soon_threadsafe(fake._stop.set)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
