"""Fields behind a body, hosts, and requests that are sent before the answer to the last one."""

from __future__ import annotations

import asyncio
import logging

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.http.connection import LimitedConnection
from fastgen.serving.http.hosts import Hosts, warn_if_open
from fastgen.serving.http.server import listen
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import ForbiddenError
from tests.serving.local_server import Served, check, error_of, post

CHUNKED = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"


def get(path: str, *hosts: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", *(f"host: {host}" for host in hosts), "", ""]).encode()


@pytest.mark.parametrize("pause_s", [0.0, 0.1])
def test_a_field_behind_the_body_is_no_field_of_the_head(pause_s: float) -> None:
    async def test(server: Served) -> None:
        async def ask(head: bytes, field: bytes) -> tuple[int, dict[str, str], bytes]:
            client = await server.connect()
            client.writer.write(head)
            if pause_s:
                await client.writer.drain()
                await asyncio.sleep(pause_s)
            client.writer.write(field + b"\r\n\r\n")
            try:
                return await client.response()
            finally:
                client.writer.close()

        assert (await ask(CHUNKED, b"authorization: Bearer right"))[0] == 401
        with_key = CHUNKED.replace(b"\r\n\r\n", b"\r\nauthorization: Bearer right\r\n\r\n", 1)
        status, headers, body = await ask(with_key, b"x-request-id: injected")
        assert (status, body) == (200, b"abc")
        assert headers["x-request-id"] != "injected"

    check(test, ServeOptions(port=0, api_keys=ApiKeys(("right",))))


@pytest.mark.parametrize("piece", [b"x-1: a\r\n" * 1000, b"a" * 8000], ids=["many", "long"])
def test_fields_behind_the_body_may_be_as_long_as_a_head(piece: bytes) -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(CHUNKED + b"x: ")
        for _ in range(7):
            client.writer.write(piece)
            await client.writer.drain()
            await asyncio.sleep(0.01)
        client.writer.write(b"\r\n\r\n")
        assert (await client.response())[2] == b"abc"
        client.writer.write(CHUNKED + b"x: ")
        answer = asyncio.create_task(client.response())
        while not answer.done():
            client.writer.write(piece)
            await asyncio.sleep(0.001)
        status, _, body = await answer
        assert status == 413
        assert "what follows its body" in error_of(body)
        await server.until_closed()

    check(test)


def test_a_body_in_small_chunks_may_be_longer_than_a_head() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(CHUNKED.partition(b"3\r\n")[0])
        for _ in range(130):
            client.writer.write(b"1;a_longer_extension\r\na\r\n" * 30)
            await asyncio.sleep(0)
        client.writer.write(b"0\r\n\r\n")
        assert (await client.response())[2] == b"a" * 3900

    check(test)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/echo"), 400),
        (get("/echo", "localhost", "localhost"), 400),
        (get("/echo", "localhost", "attacker.example"), 400),
        (get("/echo", "localhost", "localhost", version="1.0"), 400),
        (get("/echo", version="1.0"), 200),
        (get("/echo", "localhost"), 200),
    ],
)
def test_a_request_names_one_host(request_: bytes, status: int) -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(request_)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        if status != 200:
            assert b"one Host field" in await client.reader.read()
        client.writer.close()

    check(test)


HERE = ["localhost", "LOCALHOST:8000", "localhost.", "a.localhost:1", "127.0.0.1:80", "[::1]", "[::1]:80", "10.0.0.7"]
ELSEWHERE = [
    "attacker.example",
    "attacker.example:8000",
    "localhost.attacker.example",
    "127.0.0.1.example",
    "a:b",
    "[",
    "",
]


@pytest.mark.parametrize("host", HERE + ELSEWHERE)
def test_a_server_without_keys_answers_for_this_machine_alone(host: str) -> None:
    async def test(server: Served) -> None:
        status, _, body = await server.ask(get("/echo", host))
        assert status == (200 if host in HERE else 403)
        if status == 403:
            assert "--allow-host" in error_of(body)

    check(test)


@pytest.mark.parametrize(
    ("url", "host", "status"),
    [
        ("http://attacker.example/echo", "localhost", 403),
        ("HTTP://attacker.example:80", "localhost", 403),
        ("http://localhost@attacker.example/echo", "localhost", 403),
        ("https://attacker.example?localhost", "localhost", 403),
        ("other://attacker.example/echo", "localhost", 403),
        ("other://attacker.example", "localhost", 403),
        ("http://localhost:8000/echo", "attacker.example", 200),
        ("http://127.0.0.1/echo", "localhost", 200),
        ("http://[::1]:8000/echo", "localhost", 200),
    ],
)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_the_host_of_an_absolute_url_counts(url: str, host: str, status: int, version: str) -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(get(url, *([host] if version == "1.1" else []), version=version))
        answer = await client.reader.readuntil(b"\r\n\r\n")
        assert int(answer.split()[1]) == status
        client.writer.close()

    check(test)


@pytest.mark.parametrize(
    ("options", "answered"),
    [
        (ServeOptions(port=0, allow_hosts=("models.example.org",)), {"models.example.org:80", "Models.Example.ORG"}),
        (ServeOptions(port=0, allow_hosts=("models.Example.org.",)), {"models.example.org:80", "Models.Example.ORG"}),
        (ServeOptions(port=0, allow_hosts=("*",)), {"models.example.org:80", "Models.Example.ORG", "other.example"}),
        (ServeOptions(port=0, host="0.0.0.0"), {"models.example.org:80", "Models.Example.ORG", "other.example"}),
        (ServeOptions(port=0, host="0.0.0.0", allow_hosts=("other.example",)), {"other.example"}),
        (ServeOptions(port=0, api_keys=ApiKeys(("right",)), allow_hosts=("other.example",)), {"other.example"}),
    ],
)
def test_other_names_are_allowed_by_flag_by_key_and_by_address(options: ServeOptions, answered: set[str]) -> None:
    async def test(server: Served) -> None:
        for host in ("models.example.org:80", "Models.Example.ORG", "other.example"):
            request = get("/echo", host).replace(b"\r\n\r\n", b"\r\nauthorization: Bearer right\r\n\r\n")
            assert (await server.ask(request))[0] == (200 if host in answered else 403), host

    check(test, options)


def test_the_name_of_a_host_may_end_with_a_dot() -> None:
    hosts = Hosts(ServeOptions(host="Box.example."), "127.0.0.1")
    for taken in ("box.example", "box.example.:80", "BOX.example:80"):
        hosts.check(taken)
    for refused in ("", ".", "example", "a.box.example"):
        with pytest.raises(ForbiddenError):
            hosts.check(refused)


def test_with_a_key_every_name_is_taken() -> None:
    async def test(server: Served) -> None:
        request = get("/echo", "any.example").replace(b"\r\n\r\n", b"\r\nauthorization: Bearer right\r\n\r\n")
        assert (await server.ask(request))[0] == 200
        assert (await server.ask(get("/echo", "any.example")))[0] == 401

    check(test, ServeOptions(port=0, api_keys=ApiKeys(("right",))))


@pytest.mark.parametrize("host", ["http://a.example", "a.example:80", "a example", "", "*.example"])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^allow_hosts=.*without a scheme or a port"):
        ServeOptions(allow_hosts=("b.example", host))


SPELLINGS = ["127.0.0.1", "localhost", "127.1", "0x7f.1", "2130706433"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_hosts_are_checked_at_every_spelling_of_a_loopback_address(spelling: str) -> None:
    async def test(server: Served) -> None:
        assert (await server.ask(get("/echo", "attacker.example")))[0] == 403
        assert (await server.ask(get("/echo", f"{spelling}:{server.port}")))[0] == 200

    check(test, ServeOptions(port=0, host=spelling))


@pytest.mark.parametrize("spelling", [*SPELLINGS, "::1", "127.8.0.1"])
def test_a_server_that_only_this_machine_reaches_does_not_warn(spelling: str, caplog: pytest.LogCaptureFixture) -> None:
    with listen(spelling, 0) as listener:
        warn_if_open(ServeOptions(host=spelling), listener.getsockname()[0])
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "address", "is_open"),
    [
        (ServeOptions(host="0.0.0.0"), "0.0.0.0", True),
        (ServeOptions(host=""), "0.0.0.0", True),
        (ServeOptions(host="::"), "::", True),
        (ServeOptions(host="models.example.org"), "10.0.0.7", True),
        (ServeOptions(host="0.0.0.0", api_keys=ApiKeys(("right",))), "0.0.0.0", False),
    ],
)
def test_a_server_that_other_machines_may_use_without_a_key_warns(
    options: ServeOptions, address: str, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(options, address)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == is_open
    assert all("no API key" in line and options.host in line for line in logged)


@pytest.mark.parametrize("upgrade", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n"], ids=["plain", "upgrade"])
def test_many_requests_at_once_are_answered_up_to_a_limit(upgrade: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Served) -> None:
        one = b"GET /echo HTTP/1.1\r\nhost: localhost\r\n" + upgrade + b"\r\n"
        client = await server.connect()
        client.writer.write(one * 60)
        assert [(await client.response())[0] for _ in range(60)] == [200] * 60
        client.writer.write(one * 2000)
        found = await client.reader.read()
        assert 60 < found.count(b"HTTP/1.1 200 ") < 100
        assert b"connection: close" in found
        assert 'refused_total{reason="pipelined"} 1.0' in server.metrics.text().decode()

    check(test)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_requests_that_wait_may_have_so_many_bytes() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        for fields in (["x: " + "a" * 30_000], ["a: b"] * 200):
            client = await server.connect()
            client.writer.write(post("/echo", b"", *fields) * 40)
            found = await client.reader.read()
            assert 1 < found.count(b"HTTP/1.1 200 ") < 40
            assert b"HTTP/1.1 4" not in found

    check(test)


@pytest.mark.parametrize("num_bytes", [1000, 60_000])
def test_bodies_behind_a_request_are_read_up_to_a_limit_together(num_bytes: int) -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        # After each answer more is read.
        client.writer.write(post("/echo", b"") * 10 + post("/never", b"") + post("/echo", bytes(num_bytes)) * 50)
        while len(server.app.bodies) < 11:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        (connection,) = server.http.server_state.connections
        assert isinstance(connection, LimitedConnection)
        waiting = sum(len(cycle.body) for cycle, _ in connection.pipeline)
        assert waiting == 50_000 if num_bytes == 1000 else waiting < (64 << 10) + 256_000, "and what came at once"
        server.app.gone.set()

    check(test)


def test_a_body_behind_requests_that_are_answered_is_read_up_to_a_limit() -> None:
    """After each answer more is read, and the last request but one is never answered."""

    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(post("/echo", b"") * 60 + post("/never", b"") + post("/echo", bytes(16 << 20)))
        while len(server.app.bodies) < 61:
            await asyncio.sleep(0.01)
        (connection,) = server.http.server_state.connections
        assert isinstance(connection, LimitedConnection)
        assert len(connection.cycle.body) < 1 << 20
        server.app.gone.set()

    check(test)
