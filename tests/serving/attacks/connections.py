"""Attacks on the reading of requests, before any of them is handled: endless fields, pipelines, idle connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.serving.attacks.harness import Attack, Target, check_status
from tests.serving.http_client import RawClient

# Longer than a server takes to close what it should close.
WAIT_S = 60.0
CHUNKED = b"POST /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


async def fields_after_a_body(target: Target, size: int) -> None:
    """Sends ``size`` bytes of fields after a body. The connection must be closed before they are read."""
    pieces = b"".join(b"x-%06d: a\r\n" % number for number in range(6000))
    await _until_closed(target, CHUNKED + b"0\r\n", pieces, size)


async def long_field_after_a_body(target: Target, size: int) -> None:
    """Sends ``size`` bytes in one field after a body. The connection must be closed before they are read."""
    await _until_closed(target, CHUNKED + b"0\r\nx: ", b"a" * 65_536, size)


async def long_chunk_extension(target: Target, size: int) -> None:
    """Sends ``size`` bytes in the extension of a chunk. The connection must be closed before they are read."""
    await _until_closed(target, CHUNKED + b"5;x=", b"a" * 65_536, size)


async def name_after_a_body(target: Target, size: int) -> None:
    """Names ``size`` requests by a field after their bodies. No answer may have such a name."""
    request = CHUNKED.replace(b"/health", b"/terminate") + b"0\r\nx-request-id: injected\r\n\r\n"
    for _ in range(size):
        client = await RawClient.connect(target.http)
        client.writer.write(request)
        status, headers = await client.head()
        client.leave()
        check_status(status, 200, 400, 401)
        assert headers["x-request-id"] != "injected"


async def pipelined_upgrades(target: Target, size: int) -> None:
    """Sends ``size`` requests at once, each with an offer of another protocol. At least the first 60 must be answered,
    and what is not answered must end with a closed connection.
    """
    request = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n"
    client = await RawClient.connect(target.http)
    client.writer.write(request * size + request.replace(b"Upgrade", b"Upgrade, close"))
    answers = b""
    async with asyncio.timeout(WAIT_S):
        while piece := await client.reader.read(1 << 16):
            answers += piece
    client.leave()
    if not answers:  # a server that is slow to read, or a client slow to send, meets a limit of time
        raise ConnectionAbortedError("the connection was closed before any answer")
    num_answered = answers.count(b"HTTP/1.1 200 ")
    assert answers.count(b"HTTP/1.1 ") == num_answered, f"an error among the answers: {answers[-500:]!r}"
    assert min(size, 60) <= num_answered <= size + 1, f"{num_answered} answers to {size + 1} requests"


async def idle_connections(target: Target, size: int) -> None:
    """Opens ``size`` connections and sends nothing, not even the beginning of a TLS handshake. All must be closed."""
    clients = [await RawClient.connect(target.http) for _ in range(size)]
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(_end(client) for client in clients))
    finally:
        for client in clients:
            client.leave()


async def other_hosts(target: Target, size: int) -> None:
    """Sends ``size`` requests of each kind that names no host, two hosts, or the host of a page on another machine.
    None may be handled.
    """
    wrong = {
        b"": 400,
        b"host: localhost\r\nhost: localhost\r\n": 400,
        b"host: attacker.example\r\n": 403,
        b"host: localhost.attacker.example:80\r\n": 403,
        b"host: attacker.example:80@localhost\r\n": 403,
    }
    for _ in range(size):
        for lines, expected in wrong.items():
            client = await RawClient.connect(target.http)
            client.writer.write(b"GET /live HTTP/1.1\r\n" + lines + b"\r\n")
            status, _ = await client.head()
            client.leave()
            check_status(status, expected, about=lines)


async def _until_closed(target: Target, head: bytes, piece: bytes, size: int) -> None:
    client = await RawClient.connect(target.http)
    try:
        client.writer.write(head)
        for _ in range(size // len(piece)):
            client.writer.write(piece)
            await client.writer.drain()
    except ConnectionError:
        return
    finally:
        client.leave()
    raise AssertionError(f"{size} bytes were read")


async def _end(client: RawClient) -> None:
    with suppress(ConnectionError):
        assert await client.reader.read() == b""


ATTACKS = {
    "fields_after_a_body": Attack(fields_after_a_body, 32 << 20, 128 << 20),
    "long_field_after_a_body": Attack(long_field_after_a_body, 32 << 20, 128 << 20),
    "long_chunk_extension": Attack(long_chunk_extension, 32 << 20, 128 << 20),
    "name_after_a_body": Attack(name_after_a_body, 1, 20),
    "pipelined_upgrades": Attack(pipelined_upgrades, 600, 3000),
    "idle_connections": Attack(idle_connections, 20, 300),
    "other_hosts": Attack(other_hosts, 1, 20),
}
