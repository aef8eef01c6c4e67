"""HTTP connections with limits on their number, on the time they take, and on half-open ones."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

import httptools
from starlette.responses import JSONResponse
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from fastgen.serving.breaks import BREAKS
from fastgen.serving.http.errors import error_response
from fastgen.serving.http.sending import PIECE_BYTES, Flow, send_in_pieces, speak_http_1_0
from fastgen.serving.http.streaming import Gone
from fastgen.serving.http.unsent import UnsentAnswers, unacknowledged
from fastgen.serving.options import ConnectionLimits
from fastgen.serving.refusals import BadRequestError, OverloadedError, Refusal, RequestTimeoutError, TooLargeError

# Most bytes in the head of a request, and in what follows a body, and most fields in a head.
_MAX_HEAD_BYTES = 64 << 10
_MAX_HEAD_FIELDS = 256
# Most requests of one connection that wait for the answer before theirs, and most bytes and fields in their heads.
_MAX_PIPELINED = 64
_MAX_PIPELINED_BYTES = 64 << 10
_MAX_PIPELINED_FIELDS = 1024
# Most chunks of a body, beyond one for each so many bytes. Each chunk costs as much as a kilobyte.
_MAX_SMALL_CHUNKS = 4096
_SMALL_CHUNK_BYTES = 64
# How long an idle connection by TLS waits for its client to agree to its end. A client that keeps it for later does not
# look.
_GOODBYE_S = 1.0
# A client that takes so many bytes of what waits for it is not too slow.
_LEAST_TAKEN_BYTES = 64 << 10


class LimitedConnection(HttpToolsProtocol):
    """A connection that enforces ``limits``.

    A violation is answered with an error if that is possible; then the connection is closed, and ``on_refused``
    receives the reason. :func:`close_slow` handles connections that take too long. All connections of a server have the
    same ``unsent``, which closes some where much waits for slow clients.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        on_refused: Callable[[Refusal], None],
        unsent: UnsentAnswers,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self._limits, self._on_refused, self._unsent = limits, on_refused, unsent
        self.flow: Flow
        self._gone = Gone()
        # The request before the newest one.
        self._before: RequestResponseCycle | None = None
        self._is_one_too_many = False
        # The time since which the head of a request is awaited, and whether some of it is here.
        self._head_since_s: float | None = None
        self._has_head_begun = False
        # Whether the bytes received last completed a head or brought something of a body, and how many bytes came since
        # some that did.
        self._has_progressed = False
        self._num_idle_bytes = 0
        # Chunks and bytes of the body that is received.
        self._num_chunks = self._num_body_bytes = 0
        # Bytes and fields in the heads of requests that wait for the answer before theirs, and whether such requests
        # are too many.
        self._num_pipelined_bytes = self._num_pipelined_fields = 0
        self._is_full = False
        # The time since which the client reads too slowly, or a closing connection still has output, and how many bytes
        # waited for the client then.
        self._stuck_since_s: float | None = None
        self._num_waiting_bytes = 0
        # Bytes of the answer that is being sent, all of which are here until its end.
        self._num_held_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        BREAKS.take()
        super().connection_made(transport)
        self.flow = Flow(transport)
        self._head_since_s = time.monotonic()
        num_more = len(self.connections) - self._limits.max_connections
        self._is_one_too_many = num_more > 0
        if num_more > self._limits.max_connections:  # too many to send an error to each
            self._on_refused("connections")
            transport.abort()

    def data_received(self, data: bytes) -> None:
        BREAKS.take()
        if self.transport.is_closing():  # what was done in the break has closed it
            return
        if self._is_one_too_many:  # the request is read first: closing with unread data would cut off the answer
            limit = self._limits.max_connections
            error = OverloadedError(f"{limit} connections are open, no more are taken", retry_after_s=1.0)
            self._refuse(error, "connections")
            return
        if self._is_full:
            return
        self._has_progressed = False
        rest: bytes | None = data
        while rest is not None:
            rest = self._parse(rest)
        self._num_idle_bytes = 0 if self._has_progressed else self._num_idle_bytes + len(data)
        if self._num_idle_bytes > _MAX_HEAD_BYTES:
            self._refuse_received(_head_too_large(), "head_size")
        BREAKS.take_soon()  # after the task that goes on with these bytes

    def _parse(self, data: bytes) -> bytes | None:
        """Parses ``data``. Returns what is to be parsed next, if a request offers another protocol.

        A server may ignore such an offer. But the parser stops there, and would take the request's body for the other
        protocol. So the request, and all after its head, is parsed again without the offer. Java's client offers HTTP/2
        in this way, and curl does with a flag.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            if self._offers_another_protocol:  # a CONNECT request has none
                return self._without_offer() + data[stopped.args[0] :]
        except httptools.HttpParserError as error:
            reason = str(error.__context__ or error)[:200]  # a callback's error is the context of the parser's
            self._refuse_received(BadRequestError(f"this cannot be read as HTTP/1.1: {reason}"), "not_http")
        return None

    def _without_offer(self) -> bytes:
        """Returns the head of the present request without its offer of another protocol, for a new parser."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"\r\n".join([*lines, b"", b""])

    @property
    def _offers_another_protocol(self) -> bool:
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._head_since_s, self._has_head_begun = time.monotonic(), True
        self._num_chunks = self._num_body_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a field of the head. Fields after the body are dropped: they are no fields of the head (RFC 9110,
        section 6.5.1), and the head may have been acted on already.
        """
        if self._head_since_s is None:
            return
        if len(self.headers) == _MAX_HEAD_FIELDS:
            error = TooLargeError(f"the head of a request may have {_MAX_HEAD_FIELDS} fields")
            self._refuse_received(error, "head_size")
            raise httptools.HttpParserCallbackError  # ends the parsing
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._offers_another_protocol:
            return
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > _MAX_HEAD_BYTES:
            self._refuse_received(_head_too_large(), "head_size")
            raise httptools.HttpParserCallbackError  # ends the parsing
        if not self.pipeline:
            self._num_pipelined_bytes = self._num_pipelined_fields = 0
        if self.cycle is not None and not self.cycle.response_complete:
            self._num_pipelined_bytes += num_bytes
            self._num_pipelined_fields += len(self.headers)
        if (
            len(self.pipeline) == _MAX_PIPELINED
            or self._num_pipelined_bytes > _MAX_PIPELINED_BYTES
            or self._num_pipelined_fields > _MAX_PIPELINED_FIELDS
        ):
            self._close_after_answers("pipelined")
            raise httptools.HttpParserCallbackError
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.0"):
            error = BadRequestError(f"a request needs one Host field, and has {num_hosts}")
            self._refuse_received(error, "not_http")
            raise httptools.HttpParserCallbackError
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and [each.strip().lower() for each in codings] != [b"chunked"]:
            coding = repr(b", ".join(codings).decode("latin-1"))
            error = BadRequestError(f"transfer-encoding {coding:.100} is not read here: send the body as it is")
            self._refuse_received(error, "encoding")
            raise httptools.HttpParserCallbackError
        if self.url[:1] not in (b"/", b"*"):
            self._take_absolute_url()
        self._unset_keepalive_if_required()
        self._head_since_s, self._has_head_begun, self._has_progressed = None, False, True
        self.scope["state"]["gone"] = self._gone
        self._before = self.cycle
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            speak_http_1_0(self.cycle)
        send_in_pieces(self.cycle, self.flow, self.transport, self._hold)

    def _take_absolute_url(self) -> None:
        """Puts the host of an absolute URL in place of the field ``Host`` (RFC 9112, section 3.2.2), and takes the root
        for a URL without a path (RFC 9110, section 4.2.3).
        """
        parsed = httptools.parse_url(self.url)
        host = b"[%b]" % parsed.host if b":" in parsed.host else parsed.host
        if parsed.port is not None:
            host += b":%d" % parsed.port
        self.headers[:] = [(b"host", host), *(header for header in self.headers if header[0] != b"host")]
        if parsed.path is None:
            self.url = b"/" if parsed.query is None else b"/?" + parsed.query

    def on_chunk_header(self) -> None:
        self._has_progressed = True
        self._num_chunks += 1
        if self._num_chunks > _MAX_SMALL_CHUNKS + self._num_body_bytes // _SMALL_CHUNK_BYTES:
            self._refuse_received(
                BadRequestError(
                    f"the body has more than {_MAX_SMALL_CHUNKS} chunks of less than {_SMALL_CHUNK_BYTES} bytes; send "
                    "larger ones"
                ),
                "body_size",
            )
            raise httptools.HttpParserCallbackError

    def on_body(self, body: bytes) -> None:
        self._has_progressed = True
        self._num_body_bytes += len(body)
        super().on_body(body)
        if self.pipeline:
            self.flow.num_waiting_bytes += len(body)
            if self.flow.waits_for_much:
                self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if not self._offers_another_protocol:
            self._has_progressed = True
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.flow.num_waiting_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unsent.discard(self)
        self._gone.set()

    def eof_received(self) -> None:
        """Handles the end of the client's data. It cannot be known whether the client is gone altogether, so it counts
        as gone. If it still listens, it receives the reason why there is no answer.
        """
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.response_started:
            self._refuse(BadRequestError("the client closed its side before it had its answer, which ends the request"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck_since_s, self._num_waiting_bytes = time.monotonic(), self._num_not_taken
        self._unsent.add(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stuck_since_s = None
        if not self._num_held_bytes:
            self._unsent.discard(self)

    @property
    def num_unsent(self) -> int:
        """Returns how many bytes wait for the client in this process."""
        return self.transport.get_write_buffer_size() + self._num_held_bytes

    def _hold(self, num_bytes: int) -> None:
        """Counts an answer of which so many bytes are here, though the transport may not have them yet."""
        self._num_held_bytes = num_bytes
        if num_bytes > PIECE_BYTES and not self.transport.is_closing():
            self._unsent.add(self)
        elif not self.flow.write_paused:
            self._unsent.discard(self)

    @property
    def _num_not_taken(self) -> int:
        """Returns how many bytes wait for the client here and in the system. Those in the system may be megabytes, and
        room for more is made there in large steps.
        """
        return self.num_unsent + unacknowledged(self.transport.get_extra_info("socket"))

    def close_if_slow(self, now_s: float) -> None:
        """Closes the connection if its client takes more time than allowed."""
        if self._is_slow(now_s):
            self.transport.abort()
        elif self._head_since_s is not None and self.flow.read_paused:
            self._head_since_s = now_s  # it is the server that lets the head wait
        elif self._head_since_s is not None and now_s - self._head_since_s > self._limits.header_timeout_s:
            self._head_since_s = None
            if self._has_head_begun:
                error = RequestTimeoutError("the head of the request did not come in time")
                self._refuse_received(error, "head_time")
            else:
                self.transport.close()
                self._end_soon()

    def _is_slow(self, now_s: float) -> bool:
        """Returns whether the client takes too little of what waits for it."""
        if self._stuck_since_s is None:
            if not self.transport.is_closing():
                return False
            self._stuck_since_s, self._num_waiting_bytes = now_s, self._num_not_taken
        num_waiting = self._num_not_taken
        if self._num_waiting_bytes - num_waiting >= _LEAST_TAKEN_BYTES:
            self._stuck_since_s, self._num_waiting_bytes = now_s, num_waiting
        return now_s - self._stuck_since_s > self._limits.write_timeout_s

    def abort(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def shutdown(self) -> None:
        """Ends the connection with its present answer, because the server ends."""
        super().shutdown()
        self._end_soon()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_soon()

    def _end_soon(self) -> None:
        """Lets no client by TLS keep a connection on which nothing is sent any more by not agreeing to its end."""
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self.loop.call_later(_GOODBYE_S, self.transport.abort)

    def leave(self) -> None:
        """Ends the connection with its present answer, or at once if it is idle after an answer. One on which a request
        is coming remains.
        """
        if self.cycle is not None and not (self.cycle.response_complete and self._has_head_begun):
            self.shutdown()

    def _close_after_answers(self, reason: Refusal) -> None:
        """Takes no more requests. The connection is closed after the answer to the last one taken."""
        self._is_full = True
        self._head_since_s = None  # the head of a request that is not taken does not become late
        self.cycle.keep_alive = False
        self._on_refused(reason)

    @property
    def _is_answering(self) -> bool:
        """Returns whether new output might end up inside another answer: that of the last request, or that of a request
        in the pipeline.
        """
        if self.pipeline:
            return True
        return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

    def _refuse_received(self, error: Exception, reason: Refusal) -> None:
        """Refuses what is being received. If that comes after requests that are here and not answered yet, these are
        answered, and it is not.
        """
        if self._is_full:  # it is refused already
            return
        if self.pipeline and self.cycle.more_body:  # the newest one waits, and came in part
            assert self._before is not None
            self.pipeline.popleft()
            self.cycle = self._before
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self._close_after_answers(reason)
        else:
            self._refuse(error, reason)

    def _refuse(self, error: Exception, reason: Refusal | None = None) -> None:
        """Answers with ``error`` only, and closes. If another answer has begun, closes without an answer."""
        if self.transport.is_closing():
            return
        if reason is not None:
            self._on_refused(reason)
        if self._is_answering:
            self._gone.set()
            self.transport.close()
            return
        response: JSONResponse = error_response(error)
        response.headers["x-request-id"] = uuid.uuid4().hex
        content = [STATUS_LINE[response.status_code], b"connection: close\r\n"]
        content += [b"%b: %b\r\n" % header for header in response.raw_headers]
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._gone.set()
        self.transport.write(b"".join([*content, b"\r\n", response.body]))
        self.transport.close()
        self._end_soon()


def _head_too_large() -> TooLargeError:
    return TooLargeError(f"the head of a request may have {_MAX_HEAD_BYTES} bytes, and so may what follows its body")


async def close_slow(server_state: ServerState, limits: ConnectionLimits) -> None:
    """Closes connections whose clients take too long, at regular intervals, until it is cancelled."""
    every_s = min(limits.header_timeout_s, limits.write_timeout_s, 4.0) / 4
    while True:
        await asyncio.sleep(every_s)
        now_s = time.monotonic()
        for connection in list(server_state.connections):
            if isinstance(connection, LimitedConnection):
                connection.close_if_slow(now_s)
