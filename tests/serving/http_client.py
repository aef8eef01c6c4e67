"""A client over bare sockets, for behaviour that ordinary clients do not have."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


class BrokenAnswerError(Exception):
    """The response is neither an answer nor an error that says what is wrong."""


@dataclass
class Answered:
    """The result of a request: its whole text, or the server's ``error``."""

    status: int
    text: str = ""
    error: str | None = None
    # Arrival time of each event of a stream.
    arrivals_s: list[float] = field(default_factory=list)


class RawClient:
    """One connection, for one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, address: str) -> RawClient:
        place = urlsplit(address)
        return cls(*await asyncio.open_connection(place.hostname, place.port))

    def send(self, body: bytes, *headers: str, path: str = "/v1/completions") -> None:
        lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", "connection: close"]
        if not any(header.startswith(("content-length", "transfer-encoding")) for header in headers):
            lines.append(f"content-length: {len(body)}")
        self.writer.write("\r\n".join([*lines, *headers, "", ""]).encode() + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Returns status and headers. Raises :class:`BrokenAnswerError`."""
        try:
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
            return int(lines[0].split()[1]), headers
        except (asyncio.IncompleteReadError, ValueError, IndexError) as error:
            raise BrokenAnswerError(f"no head of a response: {error}") from error

    async def answer(self, *, pause_s: float = 0.0) -> Answered:
        """Returns the whole answer, reading with a pause after each event of a stream. Raises
        :class:`BrokenAnswerError`.
        """
        status, headers = await self.head()
        if "content-length" in headers:
            return _whole(status, await self._exactly(int(headers["content-length"])))
        answered = Answered(status)
        rest, is_done = b"", False
        while (piece := await self._chunk()) is not None:
            *events, rest = (rest + piece).split(b"\n\n")
            answered.arrivals_s += [time.perf_counter()] * len(events)
            for event in events:
                if event == b"data: [DONE]":
                    is_done = True
                elif event.startswith(b"event: error\n"):
                    answered.error = _error(event.removeprefix(b"event: error\ndata: "))
                else:
                    choice = _parse(event.removeprefix(b"data: "))["choices"][0]
                    answered.text += choice["text"]
            await asyncio.sleep(pause_s)
        if not is_done and answered.error is None:
            raise BrokenAnswerError(f"a stream ended without [DONE] or an error, after {answered.text!r}")
        return answered

    def leave(self) -> None:
        """Disconnects without notice."""
        self.writer.transport.abort()

    async def _chunk(self) -> bytes | None:
        try:
            size = int(await self.reader.readline(), 16)
            piece = await self._exactly(size + 2)
        except ValueError as error:
            raise BrokenAnswerError("a stream was cut off") from error
        return piece[:-2] if size else None

    async def _exactly(self, size: int) -> bytes:
        try:
            return await self.reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise BrokenAnswerError(f"{len(error.partial)} bytes came of {size}") from error


async def ask(address: str, body: dict[str, Any]) -> Answered:
    """Returns the answer to a completion request."""
    client = await RawClient.connect(address)
    try:
        client.send(json.dumps(body).encode())
        return await client.answer()
    finally:
        client.leave()


async def get(address: str, path: str) -> tuple[int, bytes]:
    """Returns status and body."""
    client = await RawClient.connect(address)
    try:
        client.writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        status, headers = await client.head()
        return status, await client._exactly(int(headers["content-length"]))
    finally:
        client.leave()


def _whole(status: int, body: bytes) -> Answered:
    if status == 200:
        return Answered(status, _parse(body)["choices"][0]["text"])
    return Answered(status, error=_error(body))


def _error(body: bytes) -> str:
    error = _parse(body).get("error")
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"} or not error["message"]:
        raise BrokenAnswerError(f"an error that is not OpenAI's: {body!r:.200}")
    message: str = error["message"]
    return message


def _parse(body: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(body)
    except ValueError as error:
        raise BrokenAnswerError(f"not JSON: {body!r:.200}") from error
    return found
