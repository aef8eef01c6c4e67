"""Bodies of requests: how large each may be, and all together."""

from __future__ import annotations

import asyncio
import re

import pytest

from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.http.guard import Guard
from fastgen.serving.options import ConnectionLimits, ServeOptions
from tests.serving.local_server import Served, check, error_of, post

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


@pytest.mark.parametrize(
    ("encoding", "status"),
    [("gzip", 415), ("br", 415), ("identity, gzip", 415), ("x", 415), ("identity", 200), ("Identity ", 200)],
)
def test_a_compressed_body_is_not_read(encoding: str, status: int) -> None:
    async def test(server: Served) -> None:
        found, _, body = await server.ask(post("/echo", b"abc", f"content-encoding: {encoding}"))
        assert found == status
        if status == 415:
            assert repr(encoding) in error_of(body)
            assert refused(server) == {"encoding": "1.0"}
            assert server.app.bodies == []

    check(test)


def test_a_limit_below_that_of_open_paths_holds_for_them_too() -> None:
    async def test(server: Served) -> None:
        assert (await server.ask(post("/health", bytes(100))))[0] == 200
        assert (await server.ask(post("/health", bytes(101))))[0] == 413

    check(test, ServeOptions(port=0, connections=ConnectionLimits(max_body_bytes=100)))
