"""HTTP/1.1 for load generators: one request at a time on a connection, and the time at which each piece arrived.

A piece of a body gets its time in the callback that receives it, before any task wakes up. Connections are kept and
used again, so a request costs a handshake only where none is free.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fastgen.lab.load.target import RequestFailedError
from fastgen.serving.clients.addresses import split_url

# Longest wait for a connection.
CONNECT_TIMEOUT_S = 10.0
# Most bytes in the head of a response.
MAX_HEAD_BYTES = 1 << 16

# Gets a piece of the body of a response with status 200, and when it arrived by ``time.perf_counter``.
OnBody = Callable[[bytes, float], None]


class BadResponseError(ValueError):
    """The server sent something that is no HTTP response."""


@dataclass
class Response:
    """Parses a response from the bytes that arrive; it does no input or output itself."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    is_complete: bool = False
    # The body of a response with another status than 200.
    refusal: bytes = b""
    # Bytes that are not parsed yet.
    _rest: bytes = b""
    _in_head: bool = True
    # Bytes that are still to come of the body or the chunk; ``None`` where the end of the connection ends the body.
    _left: int | None = 0
    _is_chunked: bool = False

    @property
    def keeps_connection(self) -> bool:
        """Returns whether another request may follow on the same connection."""
        return self.is_complete and self._left is not None and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """Returns the piece of the body that ``data`` adds. Raises :class:`BadResponseError`."""
        self._rest += data
        if self._in_head and not self._parse_head():
            return b""
        return self._chunks() if self._is_chunked else self._plain()

    def end(self) -> None:
        """Notes that the connection has ended. Raises :class:`BadResponseError` if the response was not complete."""
        if self._in_head or self._is_chunked or self._left is not None:
            raise BadResponseError("the connection ended before the response was complete")
        self.is_complete = True

    def _parse_head(self) -> bool:
        head, end, rest = self._rest.partition(b"\r\n\r\n")
        if not end:
            if len(self._rest) > MAX_HEAD_BYTES:
                raise BadResponseError(f"the head of the response has more than {MAX_HEAD_BYTES} bytes")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdecimal():
            raise BadResponseError(f"the response does not begin like HTTP/1.1: {first[:60]!r}")
        self.status = int(status[:3])
        if 100 <= self.status < 200:  # such as "continue" or "early hints": the response is still to come
            self._rest = rest
            return self._parse_head()
        fields = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        if version == "HTTP/1.0":
            self.headers.setdefault("connection", "close")
        self._in_head, self._rest = False, rest
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        self._left = 0 if self._is_chunked else None if length is None else int(length)
        return True

    def _plain(self) -> bytes:
        piece, self._rest = self._rest, b""
        if self._left is not None:
            piece = piece[: self._left]
            self._left -= len(piece)
            self.is_complete = self._left == 0
        return piece

    def _chunks(self) -> bytes:
        pieces = []
        while not self.is_complete:
            size_text, end, rest = self._rest.partition(b"\r\n")
            if not end:
                break
            try:
                size = int(size_text.partition(b";")[0], 16)
            except ValueError:
                raise BadResponseError(f"the size of a chunk is {size_text[:20]!r}") from None
            if len(rest) < size + 2:
                break
            pieces.append(rest[:size])
            self._rest = rest[size + 2 :]
            self.is_complete = size == 0
        return b"".join(pieces)


class _Connection(asyncio.Protocol):
    """A connection, with at most one request on it."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.is_lost = False
        self._response: Response | None = None
        self._on_body: OnBody = lambda piece, at: None
        self._done: asyncio.Future[Response] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def exchange(self, request: bytes, on_body: OnBody) -> Response:
        self._response, self._on_body = Response(), on_body
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            return await self._done
        finally:
            self._response = None

    def data_received(self, data: bytes) -> None:
        at = time.perf_counter()
        if self._response is None:  # nothing was asked for
            self.transport.abort()
            return
        try:
            piece = self._response.feed(data)
        except (BadResponseError, ValueError) as error:
            self._fail(error)
            return
        if self._response.status != 200:
            self._response.refusal += piece
        elif piece:
            self._on_body(piece, at)
        if self._response.is_complete:
            self._finish(self._response)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self._response is not None:
            try:
                self._response.end()
            except BadResponseError as incomplete:
                self._fail(error or incomplete)
            else:
                self._finish(self._response)

    def _finish(self, response: Response) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(response)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class HttpPool:
    """Connections to the server of ``url``, as many as there are requests at the same time.

    :raises InvalidArgumentError: if ``url`` is not one of HTTP.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None):
        place = split_url(url)
        assert place.hostname is not None
        is_https = place.scheme == "https"
        self.url = url
        self.prefix = place.path.rstrip("/")
        self._host, self._port = place.hostname, place.port or (443 if is_https else 80)
        self._authority = place.netloc.rpartition("@")[2]
        self._tls = (tls or ssl.create_default_context()) if is_https else None
        self._free: list[_Connection] = []

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
        """Returns the bytes of a request."""
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"host: {self._authority}", f"content-length: {len(body)}"]
        lines += (f"{name}: {value}" for name, value in headers.items())
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    async def exchange(self, request: bytes, on_body: OnBody) -> Response:
        """Sends ``request`` and returns the response when it is complete; ``on_body`` gets its body in pieces.

        :raises RequestFailedError: if there is no connection, or it breaks.
        """
        while True:
            connection, is_fresh = self._take(), False
            if connection is None:
                connection, is_fresh = await self._connect(), True
            began = False

            def note(piece: bytes, at: float) -> None:
                nonlocal began
                began = True
                on_body(piece, at)

            try:
                response = await connection.exchange(request, note)
            except (OSError, BadResponseError, ValueError) as error:
                connection.transport.abort()
                if is_fresh or began:
                    reason = str(error) or type(error).__name__
                    raise RequestFailedError(f"the connection to {self.url} broke: {reason}") from error
                continue  # the server had closed a connection that it had kept: ask again on another
            except BaseException:
                connection.transport.abort()
                raise
            if response.keeps_connection:
                self._free.append(connection)
            else:
                connection.transport.close()
            return response

    async def close(self) -> None:
        """Closes the connections that are free."""
        for connection in self._free:
            connection.transport.close()
        self._free.clear()

    def _take(self) -> _Connection | None:
        while self._free:
            connection = self._free.pop()
            if not connection.is_lost and not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise RequestFailedError(f"no server answers at {self.url} within {CONNECT_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise RequestFailedError(f"no server answers at {self.url}: {error.strerror or error}") from error
        return connection
