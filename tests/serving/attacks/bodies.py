"""Attacks by the number and the size of bodies, with or without a key."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.serving.attacks.harness import HONEST, Attack, Target, check_status
from tests.serving.http_client import BrokenAnswerError, RawClient, ask

LARGE = 15 << 20


async def bodies_of_open_paths(target: Target, size: int) -> None:
    """Announces a body of 15 MiB to paths that need no key, on ``size`` connections for each. All must be refused
    before it is sent.
    """
    for path in ("/health", "/terminate", "/", "/ready"):
        clients = [await RawClient.connect(target.http) for _ in range(size)]
        for client in clients:
            client.send(b"", f"content-length: {LARGE}", path=path)
        for client in clients:
            status, _ = await client.head()
            client.leave()
            check_status(status, 413, about=path)


async def unfinished_bodies(target: Target, size: int) -> None:
    """Sends bodies of 15 MiB without their last byte, on ``size`` connections at once. Beside them an ordinary request
    must be answered, and if they are many, some of them must be refused.
    """
    results = await asyncio.gather(*(_almost(target) for _ in range(size)))
    clients = [client for client in results if client is not None]
    try:
        answered = await ask(target.http, HONEST | {"max_tokens": 4})
        check_status(answered.status, 200, about=answered.error)
        assert len(clients) <= 18, "all of them were kept"
    finally:
        for client in clients:
            client.leave()


async def compressed_bodies(target: Target, size: int) -> None:
    """Sends ``size`` bodies that are said to be compressed. None may be read."""
    for _ in range(size):
        for encoding in ("gzip", "deflate, gzip", "br"):
            client = await RawClient.connect(target.http)
            client.send(b"{}", f"content-encoding: {encoding}")
            status, _ = await client.head()
            client.leave()
            check_status(status, 415, about=encoding)


async def _almost(target: Target) -> RawClient | None:
    """Returns a client that has sent all of its body but the last byte, or ``None`` if the server did not take it."""
    client = await RawClient.connect(target.http)
    client.send(b"", f"content-length: {LARGE}")
    try:
        for _ in range(LARGE // 65_536 - 1):
            client.writer.write(b" " * 65_536)
            await client.writer.drain()
        client.writer.write(b" " * 65_535)
        await client.writer.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(2.0):  # a refusal comes at once
                status, _ = await client.head()
                client.leave()
                check_status(status, 429)
                return None
    except (ConnectionError, BrokenAnswerError):  # closed with data that was not read
        client.leave()
        return None
    return client


ATTACKS = {
    "bodies_of_open_paths": Attack(bodies_of_open_paths, 5, 100),
    "unfinished_bodies": Attack(unfinished_bodies, 40, 200),
    "compressed_bodies": Attack(compressed_bodies, 1, 20),
}
