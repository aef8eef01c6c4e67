"""Bodies of requests: how large each may be, and all together."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.http import guard as guard_module
from fastgen.serving.http.connection import LimitedConnection
from fastgen.serving.http.guard import Guard
from fastgen.serving.options import ConnectionLimits, ServeOptions
from tests.serving.local_server import Served, check, error_of, post
from tests.serving.loop_turns import LoopTurns

KEYS = ApiKeys(("right",))
MOST = 100_000
# Most bytes of the body of a request that needs no key, as docs/serving.md says.
MAX_OPEN_BODY_BYTES = 4096


def refused(server: Served) -> dict[str, str]:
    return dict(re.findall(r'^fastgen_refused_total{reason="(\w+)"} ([1-9].*)$', server.metrics.text().decode(), re.M))


@pytest.mark.parametrize("path", ["/health", "/ready", "/", "/page/app.js", "/version", "/ping", "/terminate"])
@pytest.mark.parametrize("has_length", [True, False])
def test_a_path_that_needs_no_key_takes_a_small_body_alone(path: str, has_length: bool) -> None:
    async def test(server: Served) -> None:
        assert (await server.ask(post(path, bytes(MAX_OPEN_BODY_BYTES))))[0] == 200
        if has_length:
            request = post(path, b"").replace(b"content-length: 0", b"content-length: %d" % (MAX_OPEN_BODY_BYTES + 1))
        else:
            chunk = b"%x\r\n" % (MAX_OPEN_BODY_BYTES + 1) + bytes(MAX_OPEN_BODY_BYTES + 1)
            request = post(path, b"").replace(b"content-length: 0", b"transfer-encoding: chunked") + chunk
        status, _, body = await server.ask(request)
        assert status == 413
        assert str(MAX_OPEN_BODY_BYTES) in error_of(body)
        assert server.app.bodies == [bytes(MAX_OPEN_BODY_BYTES)]
        assert refused(server) == {"body_size": "1.0"}

    check(test, ServeOptions(port=0, api_keys=KEYS))


def test_no_body_is_read_without_a_key() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(post("/echo", b"").replace(b"content-length: 0", b"content-length: 1000"))
        assert (await client.response())[0] == 401

    check(test, ServeOptions(port=0, api_keys=KEYS))


def almost(body: bytes) -> bytes:
    """Returns a request without the last byte of its body."""
    return post("/echo", body)[:-1]


def test_bodies_are_bounded_together_and_small_ones_are_always_taken() -> None:
    """At most 16 of the largest are held, without the first 64 KiB of each."""

    async def test(server: Served) -> None:
        guard, body = server.http.config.app, bytes(MOST)
        assert isinstance(guard, Guard)
        num_counted = MOST - 1 - (64 << 10)
        num_held = 16 * MOST // num_counted
        waiting = [await server.connect() for _ in range(num_held)]
        for client in waiting:
            client.writer.write(almost(body))
        while guard._bodies._num_bytes < num_held * num_counted:
            await asyncio.sleep(0.01)
        for _ in range(3):
            status, headers, refusal = await server.ask(almost(body))
            assert (status, headers["retry-after"], headers["connection"]) == (429, "1", "close")
            assert f"{16 * MOST} bytes" in error_of(refusal)
        assert refused(server) == {"bodies": "3.0"}
        for size in (10, 60_000):
            assert (await server.ask(post("/echo", bytes(size))))[2] == bytes(size)
        waiting[0].writer.close()
        waiting[1].writer.write(body[:1])
        assert (await waiting[1].response())[2] == body
        for client in waiting[2:]:
            client.writer.close()
        while guard._bodies._num_bytes:
            await asyncio.sleep(0.01)
        assert (await server.ask(post("/echo", body)))[2] == body

    check(test, max_body_bytes=MOST)


def test_few_large_bodies_are_received_in_one_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others wait for the end of a turn: in each there are pieces of eight bodies."""
    num_clients, most_of_a_piece = 40, 256 << 10
    body = bytes(1 << 20)
    received: Counter[int] = Counter()
    inner = LimitedConnection.data_received
    begun: list[int] = []  # in which turns

    async def test(server: Served) -> None:
        loop_turns = LoopTurns()

        def count(connection: LimitedConnection, data: bytes) -> None:
            if connection.cycle is None:
                begun.append(loop_turns.number)
            elif len(begun) == num_clients and begun[-1] < loop_turns.number:
                received[loop_turns.number] += len(data)
            inner(connection, data)

        monkeypatch.setattr(LimitedConnection, "data_received", count)
        clients = [await server.connect() for _ in range(num_clients)]
        for client in clients:
            client.writer.write(post("/echo", body))
        for client in clients:
            assert (await client.response())[2] == body
            client.writer.close()
        loop_turns.stop()
        assert sum(received.values()) > num_clients * len(body) / 2
        assert max(received.values()) <= 8 * most_of_a_piece

    check(test)


def test_bodies_that_take_long_to_parse_are_given_on_one_by_one() -> None:
    """Small ones are not held up by them."""

    class Handled(list[bytes]):
        """The bodies that the application has, and in which turn of the loop it got each."""

        def __init__(self, loop_turns: LoopTurns):
            super().__init__()
            self._loop_turns, self.turns = loop_turns, Counter[int]()

        def append(self, body: bytes) -> None:
            super().append(body)
            if len(body) > 16 << 10:
                self.turns[self._loop_turns.number] += 1

    async def test(server: Served) -> None:
        loop_turns = LoopTurns()
        server.app.bodies = handled = Handled(loop_turns)
        clients = [await server.connect() for _ in range(20)]
        for client in clients:
            client.writer.write(post("/echo", bytes(17 << 10)))
        assert (await server.ask(post("/echo", b"small")))[2] == b"small"
        for client in clients:
            assert (await client.response())[0] == 200
            client.writer.close()
        loop_turns.stop()
        assert handled.turns.total() == 20
        assert set(handled.turns.values()) == {1}

    check(test)


@pytest.mark.parametrize("is_large", [True, False])
def test_a_body_that_is_not_here_when_the_server_ends_is_refused_at_once(is_large: bool) -> None:
    """The request has not run, so it may be sent again."""

    async def test(server: Served) -> None:
        body = bytes(500_000 if is_large else 500)
        clients = [await server.connect() for _ in range(12)]
        for client in clients:
            client.writer.write(post("/echo", body)[: -len(body) // 2])
        await asyncio.sleep(0.2)
        server.http.should_exit = True
        for client in clients:
            status, headers, refusal = await client.response()
            assert (status, headers["retry-after"], headers["connection"]) == (503, "5", "close")
            assert "the server is ending" in error_of(refusal)
            assert await client.reader.read() == b""
        assert refused(server) == {"unavailable": "12.0"}
        await server.until_closed()

    check(test, body_timeout_s=600)


@pytest.mark.parametrize(
    ("encodings", "status"),
    [
        (["gzip"], 415),
        (["br"], 415),
        (["identity, gzip"], 415),
        (["identity", "gzip"], 415),
        (["gzip", "identity"], 415),
        (["", "identity", "x"], 415),
        (["x"], 415),
        (["identity"], 200),
        (["Identity "], 200),
        (["identity", "identity, "], 200),
    ],
)
def test_a_compressed_body_is_not_read(encodings: list[str], status: int) -> None:
    async def test(server: Served) -> None:
        fields = [f"content-encoding: {encoding}" for encoding in encodings]
        found, _, body = await server.ask(post("/echo", b"abc", *fields))
        assert found == status
        if status == 415:
            assert repr(", ".join(encodings)) in error_of(body)
            assert refused(server) == {"encoding": "1.0"}
            assert server.app.bodies == []

    check(test)


def test_a_limit_below_that_of_open_paths_holds_for_them_too() -> None:
    async def test(server: Served) -> None:
        assert (await server.ask(post("/health", bytes(100))))[0] == 200
        assert (await server.ask(post("/health", bytes(101))))[0] == 413

    check(test, ServeOptions(port=0, connections=ConnectionLimits(max_body_bytes=100)))


def test_few_requests_are_begun_in_one_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health checks wait for no other request."""
    monkeypatch.setattr(guard_module, "_BEGUN_AT_ONCE", 4)
    begun: Counter[int] = Counter()
    order: list[str] = []

    async def test(server: Served) -> None:
        loop_turns, inner = LoopTurns(), server.app.__class__.__call__

        async def note(app: Any, scope: Any, receive: Any, send: Any) -> None:
            order.append(scope["path"])
            if scope["path"] == "/echo":
                begun[loop_turns.number] += 1
            await inner(app, scope, receive, send)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.app.__class__, "__call__", note)
            clients = [await server.connect() for _ in range(41)]
            for client in clients[:40]:
                client.writer.write(post("/echo", b"small"))
            clients[40].writer.write(post("/health", b""))
            for client in clients:
                assert (await client.response())[0] == 200
                client.writer.close()
        loop_turns.stop()
        assert begun.total() == 40
        assert max(begun.values()) <= 4
        assert order.index("/health") < 20, "it came last"

    check(test)


def test_a_large_body_is_measured_in_several_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    async def test(server: Served) -> None:
        loop_turns = LoopTurns()

        def measure(texts: list[bytes]) -> Iterator[None]:
            assert texts == [bytes(300_000)]
            for _ in range(5):
                measured.append(loop_turns.number)
                yield

        monkeypatch.setattr(guard_module, "measured", measure)
        assert (await server.ask(post("/echo", bytes(300_000))))[2] == bytes(300_000)
        loop_turns.stop()
        assert len(set(measured)) == 5

    check(test)


def test_bodies_wait_for_larger_ones_only_where_these_are_large_too() -> None:
    async def test(server: Served) -> None:
        guard = server.http.config.app
        assert isinstance(guard, Guard)
        guard._turns_of_large._free_s = time.monotonic() + 1000.0  # as after one that took very long
        waiting = await server.connect()
        waiting.writer.write(post("/echo", bytes(300_000)))
        while not guard._turns_of_large._waiting:
            await asyncio.sleep(0.01)
        for size in (100, 17 << 10, 256 << 10):
            assert (await server.ask(post("/echo", bytes(size))))[2] == bytes(size)
        assert bytes(300_000) not in server.app.bodies
        waiting.writer.close()

    check(test)
