"""Calls by gRPC, frame by frame, so that they may send a part of a request, and read no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PREFACE = _PREFACE + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # with empty SETTINGS
# Kinds of frames, and their flags.
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4
_MAX_FRAME = 16_384
_WINDOW = 65_535


class PartialCall:
    """One call, on a connection of its own (RFC 9113), that sends only as much as the server takes.

    With ``reads`` false it takes nothing of an answer. With ``pongs`` false it answers no ping.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, pongs: bool = True):
        self._reader, self._writer, self._pongs = reader, writer, pongs
        # What the server takes now: on the connection, and in the call.
        self._windows = {0: _WINDOW, 1: _WINDOW}
        self._initial_window = _WINDOW
        self._has_news = asyncio.Event()
        self.num_sent = 0
        self.is_over = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def open(
        cls, address: str, method: str, *, encoding: str | None = None, reads: bool = True, pongs: bool = True
    ) -> Self:
        """Calls ``method`` of the server at ``address``. Requests are compressed as ``encoding`` says."""
        host, _, port = address.rpartition(":")
        call = cls(*await asyncio.open_connection(host, int(port)), pongs=pongs)
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", method.encode()), (b":authority", b"a")]
        fields += [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
        if encoding is not None:
            fields.append((b"grpc-encoding", encoding.encode()))
        preface = PREFACE if reads else _PREFACE + _frame(_SETTINGS, 0, 0, _setting(_INITIAL_WINDOW_SIZE, 0))
        call._writer.write(preface + _frame(_HEADERS, _END_HEADERS, 1, _literal(fields)))
        return call

    async def send(self, size: int, num_bytes: int) -> None:
        """Begins a request of ``size`` bytes and sends ``num_bytes`` of it, until the call is over."""
        await self._send(b"\0" + size.to_bytes(4, "big") + bytes(num_bytes))

    async def send_request(self, request: bytes, *, is_compressed: bool = False) -> None:
        """Sends a whole request, until the call is over."""
        await self._send(bytes([is_compressed]) + len(request).to_bytes(4, "big") + request)

    async def _send(self, left: bytes) -> None:
        while left and not self.is_over:
            num_taken = min(_MAX_FRAME, len(left), *self._windows.values())
            if num_taken <= 0:
                self._has_news.clear()
                await self._has_news.wait()
                continue
            self._windows = {stream: window - num_taken for stream, window in self._windows.items()}
            self._writer.write(_frame(_DATA, 0, 1, left[:num_taken]))
            self.num_sent += num_taken
            left = left[num_taken:]
            with suppress(ConnectionError):
                await self._writer.drain()

    async def until_over(self) -> None:
        """Waits until the server has ended the call, or the connection."""
        await asyncio.wait([self._listening])

    def leave(self) -> None:
        self._listening.cancel()
        self._writer.transport.abort()

    async def _listen(self) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while not self.is_over:
                head = await self._reader.readexactly(9)
                content = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], int.from_bytes(head[5:9], "big"), content)
                self._has_news.set()
        self.is_over = True
        self._has_news.set()

    def _take(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        if kind == _WINDOW_UPDATE and stream in self._windows:
            self._windows[stream] += int.from_bytes(content, "big")
        elif kind == _SETTINGS and not flags & _ACK:
            for place in range(0, len(content), 6):
                if int.from_bytes(content[place : place + 2], "big") == _INITIAL_WINDOW_SIZE:
                    size = int.from_bytes(content[place + 2 : place + 6], "big")
                    self._windows[1] += size - self._initial_window
                    self._initial_window = size
            self._writer.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK and self._pongs:
            self._writer.write(_frame(_PING, _ACK, 0, content))
        elif kind in (_RST_STREAM, _GOAWAY) or (kind == _HEADERS and flags & _END_STREAM):
            self.is_over = True


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def _setting(number: int, value: int) -> bytes:
    return number.to_bytes(2, "big") + value.to_bytes(4, "big")


def _literal(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns a block of header fields, each written out (RFC 7541, 6.2.2). Names and values have at most 126 bytes."""
    return b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields)
