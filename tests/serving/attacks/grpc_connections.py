"""Attacks on the gRPC port that ask for nothing: connections and calls that are opened and then left alone."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc

from tests.serving.attacks.harness import Attack, Target

# Longer than a server waits for the beginning of a connection, for a request, and for the next call.
WAIT_S = 120.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # with empty SETTINGS

_LATE, _TOO_MANY = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED
# How calls whose request never comes may end.
ENDS = {
    "/fastgen.v1.Generation/Generate": [_LATE],
    "/fastgen.v1.Generation/Terminate": [grpc.StatusCode.UNAUTHENTICATED],
    "/grpc.health.v1.Health/Check": [_LATE, _TOO_MANY],
    "/grpc.health.v1.Health/Watch": [_LATE, _TOO_MANY],
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": [_LATE, _TOO_MANY],
}


async def silent_connections(target: Target, size: int) -> None:
    """Opens ``size`` connections and sends nothing. The server must close all of them."""
    await _until_closed(target, size, b"")


async def connections_without_calls(target: Target, size: int) -> None:
    """Opens ``size`` connections as HTTP/2 demands, and makes no call. The server must close all of them."""
    await _until_closed(target, size, PREFACE)


async def calls_without_requests(target: Target, size: int) -> None:
    """Makes ``size`` calls of each method whose request never comes. Each must end with a status."""

    async def nothing(method: str) -> None:
        async with grpc.aio.insecure_channel(str(target.grpc)) as channel:
            call = channel.stream_unary(method)()
            code = await call.code()
            assert code in ENDS[method], (method, code)

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(nothing(method) for method in ENDS for _ in range(size)))


async def _until_closed(target: Target, size: int, sent: bytes) -> None:
    host, _, port = str(target.grpc).rpartition(":")

    async def one() -> None:
        with suppress(ConnectionError):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(sent)
                while await reader.read(1 << 16):
                    pass
            finally:
                writer.transport.abort()

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(one() for _ in range(size)))


ATTACKS = {
    "silent_connections": Attack(silent_connections, 40, 500),
    "connections_without_calls": Attack(connections_without_calls, 40, 500),
    "calls_without_requests": Attack(calls_without_requests, 10, 200),
}
