"""Slow, large, half-closed and too many connections, with an application that needs no model."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import suppress

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from fastgen.errors import InvalidArgumentError
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.http.connection import LimitedConnection
from fastgen.serving.http.server import HttpServer, listen
from fastgen.serving.http.streaming import unless_gone
from fastgen.serving.http.unsent import UnsentAnswers
from fastgen.serving.monitoring.log import set_up_logging
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ConnectionLimits, ServeOptions
from tests.serving.local_server import WAIT_S, Application, Served, check, error_of, on_uvloop, post


def test_a_body_comes_whole() -> None:
    async def test(server: Served) -> None:
        body = bytes(range(256)) * 500
        status, headers, answer = await server.ask(post("/echo", body))
        assert (status, answer) == (200, body)
        assert len(headers["x-request-id"]) == 32
        chunked = (
            b"POST /echo HTTP/1.1\r\nhost: [::1]\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        )
        assert (await server.ask(chunked))[2] == b"abcde"

    check(test)


@pytest.mark.parametrize("given", ["abc-1.2", "x" * 129, "a b", "näme", ""])
def test_a_request_keeps_its_name_where_that_is_sane(given: str) -> None:
    async def test(server: Served) -> None:
        _, headers, _ = await server.ask(post("/echo", b"", f"x-request-id: {given}"))
        assert (headers["x-request-id"] == given) is (given == "abc-1.2")

    check(test)


def test_a_body_that_says_it_is_too_large_is_refused_unread() -> None:
    async def test(server: Served) -> None:
        head = post("/echo", b"").replace(b"content-length: 0", b"content-length: 1001")
        status, headers, body = await server.ask(head)
        assert (status, headers["connection"]) == (413, "close")
        assert "1000 bytes" in error_of(body)
        assert (await server.ask(post("/echo", bytes(1000))))[0] == 200
        assert server.app.bodies == [bytes(1000)]

    check(test, max_body_bytes=1000)


def test_a_body_without_a_length_is_refused_once_it_is_too_large() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(b"POST /echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(11):
            client.writer.write(b"64\r\n" + bytes(100) + b"\r\n")
        status, _, body = await client.response()
        assert status == 413
        error_of(body)
        assert await client.reader.read() == b"", "and the connection is closed"
        assert server.app.bodies == []

    check(test, max_body_bytes=1000)


def test_a_head_that_does_not_end_is_refused() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(b"GET /echo HTTP/1.1\r\n")
        for number in range(100):
            client.writer.write(b"x-%d: " % number + b"a" * 1000 + b"\r\n")
        status, _, body = await client.response()
        assert status == 413
        error_of(body)
        await server.until_closed()

    check(test)


def test_what_connections_refuse_is_counted_by_why() -> None:
    async def test(server: Served) -> None:
        for sent in (b"no HTTP at all\r\n\r\n", post("/echo", b"", "x-a: " + "a" * 70_000), b"GET /late HTTP/1.1\r\n"):
            client = await server.connect()
            client.writer.write(sent)
            _, headers, _ = await client.response()
            assert len(headers["x-request-id"]) == 32, "as every answer has"
            await server.until_closed()
        kept = [await server.connect(), await server.connect()]
        one_more = await server.connect()
        one_more.writer.write(post("/echo", b""))
        assert (await one_more.response())[0] == 429
        assert len(kept) == 2
        counted = re.findall(r'^fastgen_refused_total{reason="(\w+)"} ([1-9].*)$', server.metrics.text().decode(), re.M)
        assert dict(counted) == {"not_http": "1.0", "head_size": "1.0", "head_time": "1.0", "connections": "1.0"}

    check(test, header_timeout_s=0.2, max_connections=2)


def test_a_head_may_have_so_many_fields() -> None:
    async def test(server: Served) -> None:
        for number, expected in ((254, 200), (255, 413)):  # beside host and content-length
            fields = [f"x-{index}: a" for index in range(number)]
            status, _, body = await server.ask(post("/echo", b"x", *fields))
            assert status == expected
        assert "256 fields" in error_of(body)
        client = await server.connect()
        client.writer.write(b"GET /echo HTTP/1.1\r\n" + b"x: a\r\n" * 258)  # and does not end
        assert (await client.response())[0] == 413

    check(test)


def test_a_head_that_comes_at_once_may_be_as_long_as_one_that_comes_slowly() -> None:
    async def test(server: Served) -> None:
        assert (await server.ask(post("/echo", b"x", "x-a: " + "a" * 60_000)))[0] == 200
        for more in (["x-a: " + "a" * 70_000], [f"x-{number}: a" for number in range(9000)]):
            status, _, body = await server.ask(post("/echo", b"x", *more))
            assert status == 413
            error_of(body)

    check(test)


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_another_protocol_that_is_offered_is_not_taken_and_the_request_is_answered(upgrade: str) -> None:
    offer = (f"upgrade: {upgrade}", "connection: Upgrade, HTTP2-Settings", "http2-settings: AAEAAEAAAAIAAAAA")

    async def test(server: Served) -> None:
        request = post("/echo", b"body", *offer)
        assert (await server.ask(request))[::2] == (200, b"body")
        client = await server.connect()
        for piece in (request[:50], request[50:-2], request[-2:] + post("/echo", b"next")):
            client.writer.write(piece)
            await client.writer.drain()
        assert [(await client.response())[2] for _ in range(2)] == [b"body", b"next"]
        client.writer.close()
        assert (await server.ask(b"CONNECT here:1 HTTP/1.1\r\nhost: localhost\r\nupgrade: h2c\r\n\r\n"))[0] >= 400

    check(test)


def test_a_request_that_only_names_another_protocol_is_answered() -> None:
    async def test(server: Served) -> None:
        assert (await server.ask(post("/echo", b"body", "upgrade: h2c")))[::2] == (200, b"body")
        assert (await server.ask(post("/echo", b"body", "connection: upgrade")))[::2] == (200, b"body")
        assert (await server.ask(b"CONNECT here:1 HTTP/1.1\r\nhost: localhost\r\n\r\n"))[0] >= 400

    check(test)


@pytest.mark.parametrize("path", ["/echo", "/endless"])
def test_an_answer_by_http_1_0_has_no_chunks_and_ends_with_the_connection(path: str) -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        request = post(path, b"ab", "connection: keep-alive", "expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
        client.writer.write(request)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        if path == "/endless":
            assert await client.reader.readexactly(10_000) == bytes(10_000)
            server.app.gone.set()
            assert set(await client.reader.read()) <= {*b"\0ab"}
        else:
            assert await client.reader.read() == b"ab"
        client.writer.close()
        status, headers, refusal = await server.ask(post("/echo", bytes(101)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (status, int(headers["content-length"])) == (413, len(refusal))

    check(test, max_body_bytes=100)


def test_bytes_that_are_not_http_get_an_error() -> None:
    async def test(server: Served) -> None:
        status, _, body = await server.ask(b"\x16\x03\x01 is not HTTP\r\n\r\n")
        assert status == 400
        error_of(body)

    check(test)


@pytest.mark.parametrize("sent", [b"", b"POST /echo HTT", b"POST /echo HTTP/1.1\r\nhost: he"])
def test_a_head_that_takes_too_long_is_given_up(sent: bytes) -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(sent)
        answer = await client.reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""
        await server.until_closed()

    check(test, header_timeout_s=0.2)


def test_a_second_request_has_as_little_time_for_its_head() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(post("/echo", b"abc"))
        assert (await client.response())[2] == b"abc"
        client.writer.write(b"POST /ec")
        assert (await client.response())[0] == 408
        await server.until_closed()

    check(test, header_timeout_s=0.3)


def test_line_ends_between_requests_do_not_keep_a_connection() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(post("/echo", b"abc"))
        assert (await client.response())[2] == b"abc"
        client.writer.write(b"\r\n")
        assert await client.reader.read() == b""
        await server.until_closed()

    check(test, keep_alive_s=0.2)


CHUNKED = post("/echo", b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
WRONG = {
    "no HTTP": b"no HTTP\r\n\r\n",
    "many fields": post("/echo", b"", *["x: y"] * 300),
    "a large field": post("/echo", b"", "x: " + "a" * 70_000),
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a path that is none": b"GET http:// HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "no end": b"GET /hea",
    "a body that ends as none does": CHUNKED + b"3\r\nabc\r\nno size\r\n",
    "many chunks": CHUNKED + 4200 * b"1\r\nx\r\n",
}


@pytest.mark.parametrize("num_pipelined", [0, 2])
@pytest.mark.parametrize("has_begun", [True, False], ids=["begun", "not begun"])
@pytest.mark.parametrize("behind", WRONG.values(), ids=WRONG)
def test_requests_before_one_that_is_wrong_are_answered_and_it_is_not(
    behind: bytes, has_begun: bool, num_pipelined: int
) -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        sent = post("/endless" if has_begun else "/later", b"") + num_pipelined * post("/echo", b"abc")
        client.writer.write(sent)
        if has_begun:
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
        client.writer.write(behind)
        await asyncio.sleep(0.6)  # longer than the time for a head
        server.app.gone.set()
        server.app.let_go.set()
        if not has_begun:
            assert (await client.response())[0] == 200
        else:
            while size := int(await client.reader.readline(), 16):
                assert await client.reader.readexactly(size + 2) == bytes(size) + b"\r\n"
            await client.reader.readline()
        for _ in range(num_pipelined):
            assert (await client.response())[2] == b"abc"
        assert await client.reader.read() == b""
        await server.until_closed()
        counts = re.findall(r"^fastgen_refused_total.* ([1-9].*)$", server.metrics.text().decode(), re.M)
        assert counts == ["1.0"]

    check(test, header_timeout_s=0.3)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"GET /health\xc3\xa9 HTTP/1.1\r\nhost: localhost\r\n\r\n", "url"),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\n", "url"),
        (post("/echo", b"abc", "content-length: 4"), "Duplicate Content-Length"),
        (post("/echo", b"abc", "transfer-encoding: chunked"), "Transfer-Encoding"),
        (CHUNKED + b"fffffffffffffffffff\r\n", "Chunk size overflow"),
        (
            CHUNKED.replace(b"chunked", b"gzip, chunked") + b"3\r\nabc\r\n0\r\n\r\n",
            "transfer-encoding 'gzip, chunked' is not read here: send the body as it is",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(request_: bytes, reason: str) -> None:
    async def test(server: Served) -> None:
        status, headers, body = await server.ask(request_)
        assert (status, headers["connection"]) == (400, "close")
        assert reason in error_of(body)

    check(test)


@pytest.mark.parametrize("url", ["http://localhost", "http://localhost?a=b", "http://localhost/", "/"])
def test_an_absolute_url_without_a_path_is_the_root(url: str) -> None:
    async def test(server: Served) -> None:
        answers = [await server.ask(f"GET {each} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()) for each in (url, "/")]
        (status, _, body), (expected_status, _, expected) = answers
        assert (status, body) == (expected_status, expected)
        assert status != 400

    check(test)


@pytest.mark.parametrize(("num_chunks", "num_large"), [(4160, 0), (4161, 0), (5000, 1000)])
def test_a_body_may_have_4096_small_chunks_and_one_for_64_bytes(num_chunks: int, num_large: int) -> None:
    large, small = b"3e8\r\n" + bytes(1000) + b"\r\n", b"1\r\nx\r\n"

    async def test(server: Served) -> None:
        chunks = num_large * large + (num_chunks - num_large) * small
        status, _, body = await server.ask(CHUNKED + chunks + b"0\r\n\r\n")
        if num_chunks > 4160 and not num_large:
            assert status == 400
            assert "send larger ones" in error_of(body)
        else:
            assert status == 200
            assert body == bytes(1000 * num_large) + b"x" * (num_chunks - num_large)

    check(test)


def test_small_chunks_behind_many_requests_take_no_longer_than_behind_one() -> None:
    """The connection keeps the number of waiting bytes, and does not add them up for each chunk."""
    num_read = 0

    class Watched(bytearray):
        def __len__(self) -> int:
            nonlocal num_read
            num_read += 1
            return super().__len__()

    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(post("/never", b"") + 50 * post("/echo", b"abc") + CHUNKED)
        await asyncio.sleep(0.1)
        (connection,) = server.http.server_state.connections
        assert isinstance(connection, LimitedConnection)
        assert len(connection.pipeline) == 51
        for cycle, _ in connection.pipeline:
            cycle.body = Watched(cycle.body)
        connection.data_received(1000 * b"1\r\nx\r\n")
        assert num_read <= 3 * 1000
        client.writer.close()

    check(test)


def test_a_body_that_takes_too_long_is_given_up() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(post("/echo", b"abc").removesuffix(b"c"))
        status, _, body = await client.response()
        assert status == 408
        error_of(body)
        await server.until_closed()
        assert server.app.bodies == []

    check(test, body_timeout_s=0.2)


def test_a_client_that_takes_nothing_is_cut_and_what_is_held_for_it_is_bounded() -> None:
    async def test(server: Served) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        with sock:
            sock.sendall(post("/endless", b""))
            await server.app.gone.wait()
            await server.until_closed()
        assert 0 < server.app.num_sent < 16 << 20, "no more than the buffers of the system and 64 KiB"

    check(test, write_timeout_s=0.5)


def test_a_client_that_takes_nothing_of_a_whole_answer_is_cut_too() -> None:
    async def test(server: Served) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        with sock:
            body = bytes(8 << 20)
            sock.settimeout(WAIT_S)
            await asyncio.to_thread(sock.sendall, post("/echo", body, "connection: close"))
            while server.app.bodies != [body]:
                await asyncio.sleep(0.01)
            await server.until_closed()

    check(test, write_timeout_s=0.5)


class FakeTransport(asyncio.Transport):
    is_aborted = False
    num_waiting = 1 << 20

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


def test_a_client_that_reads_slowly_but_reads_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("fastgen.serving.http.connection.time.monotonic", lambda: now_s)

    async def run() -> None:
        nonlocal now_s
        config = uvicorn.Config(Application(), lifespan="off", log_config=None)
        limits = ConnectionLimits(write_timeout_s=10)
        connection = LimitedConnection(
            limits, ServerMetrics(lambda: True).refused, UnsentAnswers(), config, ServerState(), {}
        )
        transport = FakeTransport()
        connection.connection_made(transport)
        connection.data_received(post("/never", b""))
        try:
            for _ in range(5):  # stuck for nine seconds again and again
                connection.pause_writing()
                now_s += 9
                connection.close_if_slow(now_s)
                connection.resume_writing()
            assert not transport.is_aborted
            connection.pause_writing()
            for _ in range(5):  # takes some of a large answer
                now_s += 9
                transport.num_waiting -= 64 << 10
                connection.close_if_slow(now_s)
            assert not transport.is_aborted
            transport.num_waiting -= (64 << 10) - 1
            connection.close_if_slow(now_s + 9)
            assert not transport.is_aborted
            connection.close_if_slow(now_s + 11)
            assert transport.is_aborted
        finally:
            for task in connection.tasks:
                task.cancel()
            await asyncio.wait(connection.tasks)

    on_uvloop(run())


@pytest.mark.parametrize("path", ["/never", "/endless"])
def test_a_client_that_goes_is_noticed(path: str) -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(post(path, b""))
        while not server.app.bodies:
            await asyncio.sleep(0.01)
        client.writer.transport.abort()
        await server.app.gone.wait()
        await server.until_closed()

    check(test)


def test_a_client_that_closes_its_side_is_told_that_this_ends_its_request() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(post("/never", b""))
        while not server.app.bodies:
            await asyncio.sleep(0.01)
        client.writer.write_eof()
        status, _, body = await client.response()
        assert status == 400
        assert "closed its side" in error_of(body)
        await server.app.gone.wait()
        await server.until_closed()

    check(test)


def test_connections_beyond_the_limit_get_an_error_and_have_room_later() -> None:
    async def test(server: Served) -> None:
        clients = [await server.connect() for _ in range(3)]
        for client in clients:
            client.writer.write(post("/echo", b"abc"))
            assert (await client.response())[0] == 200
        status, headers, body = await server.ask(post("/echo", b"abc"))
        assert (status, headers["retry-after"]) == (429, "1")
        assert "3 connections" in error_of(body)
        clients[0].writer.close()
        while len(server.http.server_state.connections) > 2:
            await asyncio.sleep(0.01)
        assert (await server.ask(post("/echo", b"abc")))[0] == 200
        for client in clients[1:]:
            client.writer.close()

    check(test, max_connections=3)


def test_connections_beyond_twice_the_limit_are_closed_at_once() -> None:
    async def test(server: Served) -> None:
        clients = [await server.connect() for _ in range(4)]
        while len(server.http.server_state.connections) < 4:
            await asyncio.sleep(0.01)
        one_more = await server.connect()
        with suppress(ConnectionResetError):
            assert await one_more.reader.read() == b""
        for client, status in zip(clients, (200, 200, 429, 429), strict=True):
            client.writer.write(post("/echo", b"abc"))
            assert (await client.response())[0] == status
        assert 'fastgen_refused_total{reason="connections"} 3.0' in server.metrics.text().decode()

    check(test, max_connections=2)


def test_a_request_whose_client_goes_within_its_body_is_not_run_and_counted_apart() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(post("/echo", b"abc").removesuffix(b"c"))
        while not server.http.server_state.tasks:
            await asyncio.sleep(0.01)
        client.writer.transport.abort()
        while server.http.server_state.tasks:
            await asyncio.sleep(0.01)
        assert server.app.bodies == []
        counted = 'fastgen_http_requests_total{method="POST",route="other",status="499"} 1.0'
        assert counted in server.metrics.text().decode()

    check(test)


def test_an_answer_does_not_say_which_program_sent_it() -> None:
    async def test(server: Served) -> None:
        _, headers, _ = await server.ask(post("/echo", b"abc"))
        assert headers.keys() == {"date", "content-type", "transfer-encoding", "x-request-id"}

    check(test)


def test_only_those_with_a_key_may_ask() -> None:
    async def test(server: Served) -> None:
        for headers, expected in [
            ((), 401),
            (("authorization: Bearer wrong",), 401),
            (("authorization: Basic right",), 401),
            (("authorization: Bearer right",), 200),
            (("authorization: bearer also-right",), 200),
        ]:
            status, found, body = await server.ask(post("/echo", b"abc", *headers))
            assert status == expected
            if status == 401:
                assert found["www-authenticate"] == "Bearer"
                assert "right" not in error_of(body)
                assert "wrong" not in error_of(body)
        assert (await server.ask(post("/health", b"")))[0] == 200
        assert server.app.bodies == [b"abc", b"abc", b""]

    check(test, ServeOptions(port=0, api_keys=ApiKeys(("right", "also-right"))))


@pytest.mark.parametrize("origin", ["https://a.example/", "a.example", "https://A.example", "https://a.example, *", ""])
def test_a_site_that_no_browser_would_say_is_refused(origin: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^allow_origins=.*: expected a site as browsers write it"):
        ServeOptions(allow_origins=("https://b.example:8443", "*", "null", origin))


def test_pages_of_other_sites_may_ask_only_where_that_was_said() -> None:
    async def test(server: Served) -> None:
        for origin, allowed in [("https://a.example", "https://a.example"), ("https://b.example", None)]:
            _, headers, _ = await server.ask(post("/echo", b"", f"origin: {origin}"))
            assert headers.get("access-control-allow-origin") == allowed
        preflight = b"OPTIONS /echo HTTP/1.1\r\nhost: localhost\r\norigin: https://a.example\r\n"
        preflight += b"access-control-request-method: POST\r\naccess-control-request-headers: authorization\r\n\r\n"
        status, headers, _ = await server.ask(preflight)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example"), "asked without a key"
        assert "authorization" in headers["access-control-allow-headers"]

    keys = ApiKeys(("right",))
    check(test, ServeOptions(port=0, api_keys=keys, allow_origins=("https://a.example",)))

    async def closed(server: Served) -> None:
        _, headers, _ = await server.ask(post("/echo", b"", "origin: https://a.example"))
        assert not any(name.startswith("access-control") for name in headers)

    check(closed)


@pytest.mark.parametrize(("log_requests", "log_prompts"), [(False, False), (True, False), (True, True)])
def test_a_request_is_logged_where_that_is_asked_for_and_its_prompt_and_key_are_not(
    log_requests: bool, log_prompts: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    log = set_up_logging("json")

    async def test(server: Served) -> None:
        await server.ask(post("/echo", b"a secret", "authorization: Bearer right", "x-request-id: r-1"))
        await server.ask(post("/echo", b"a secret", "authorization: Bearer wrong"))

    options = ServeOptions(port=0, api_keys=ApiKeys(("right",)), log_requests=log_requests, log_prompts=log_prompts)
    check(test, options)
    log.flush()
    told = capfd.readouterr().err
    lines = [json.loads(line) for line in told.splitlines()]
    assert [line["status"] for line in lines] == ([200, 401] if log_requests else [])
    if log_requests:
        assert (lines[0]["request_id"], lines[0]["method"], lines[0]["path"]) == ("r-1", "POST", "/echo")
        assert (lines[0]["client"], lines[0]["message"]) == ("127.0.0.1", "POST /echo 200")
        assert 0 <= lines[0]["took_s"] < WAIT_S
        assert (lines[0].get("body") == "a secret") is log_prompts
    assert ("secret" in told) is log_prompts
    assert "right" not in told
    assert "wrong" not in told


def test_a_path_cannot_make_a_line_of_its_own_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    log = set_up_logging("text")

    async def test(server: Served) -> None:
        await server.ask(b"GET /a%0Afastgen:%20GET%20/%20200%1b[1m HTTP/1.1\r\nhost: localhost\r\n\r\n")

    check(test, ServeOptions(port=0, log_requests=True))
    log.flush()
    told = capfd.readouterr().err
    assert len(told.splitlines()) == 1
    assert told.isascii()
    assert told.rstrip("\n").isprintable()


def test_a_client_that_goes_with_requests_still_queued_on_its_connection_ends_the_one_that_runs() -> None:
    """The protocol under ours tells only the last of pipelined requests."""

    async def run() -> None:
        has_left = asyncio.Event()

        async def stay(request: Request) -> None:
            async with unless_gone(request):
                waits.set()
                await asyncio.Event().wait()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            with pytest.raises(ClientDisconnect):
                await stay(Request(scope, receive))
            has_left.set()

        waits = asyncio.Event()
        options = ServeOptions(port=0)
        listener = listen(options.host, options.port)
        http = HttpServer(app, options, ServerMetrics(lambda: True), listener.getsockname()[0])
        serving = asyncio.create_task(http.serve_at(listener))
        async with asyncio.timeout(WAIT_S):
            _, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            writer.write(post("/one", b"") + post("/two", b""))
            await waits.wait()
            writer.transport.abort()
            await has_left.wait()
            http.should_exit = http.force_exit = True
            await serving

    on_uvloop(run())


def test_connections_that_wait_are_accepted_many_at_a_time() -> None:
    num_clients = 160

    async def test(server: Served) -> None:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(num_clients)]
        num_turns = 0
        while len(server.http.server_state.connections) < num_clients:
            await asyncio.sleep(0)
            num_turns += 1
        for client in clients:
            client.close()
        assert num_turns <= 15

    check(test)


@pytest.mark.parametrize("host", ["[::1]", "*"])
def test_a_host_that_is_no_address_is_refused_with_what_to_write(host: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"write IPv6 addresses without brackets, and every address as 0\.0"):
        listen(host, 0)
