"""Attacks on the gRPC port that ask for nothing: connections and calls that are opened and then left alone, calls whose
large requests never end, and calls whose answers are never read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

import grpc

from fastgen.serving.admission.bodies import MAX_LARGEST_BODIES
from tests.serving.attacks.harness import Attack, BusyError, Target
from tests.serving.attacks.http2 import PREFACE, PartialCall

# Longer than a server waits for the beginning of a connection, for a request, and for the next call.
WAIT_S = 120.0

_LATE, _TOO_MANY = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED
# How calls whose request never comes may end.
ENDS = {
    "/fastgen.v1.Generation/Generate": [_LATE],
    "/fastgen.v1.Generation/Terminate": [grpc.StatusCode.UNAUTHENTICATED],
    "/grpc.health.v1.Health/Check": [_LATE, _TOO_MANY],
    "/grpc.health.v1.Health/Watch": [_LATE, _TOO_MANY],
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": [_LATE, _TOO_MANY],
}

# Methods that answer an empty request.
READABLE = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")

# Bytes of a large request, and of what a server takes of one before it receives it.
LARGE, WINDOW = 1 << 20, 1 << 16
# How calls with an empty request may end beside those whose requests do not end.
ANSWERS = {
    "/fastgen.v1.Generation/Generate": [grpc.StatusCode.INVALID_ARGUMENT],
    "/grpc.health.v1.Health/Check": [grpc.StatusCode.OK, _TOO_MANY],
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
            _check_code(await call.code(), method, ENDS)

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(nothing(method) for method in ENDS for _ in range(size)))


async def unfinished_requests(target: Target, size: int) -> None:
    """Sends requests of 1 MiB without their last byte by ``size`` calls of two methods at once. The server must take a
    bounded part of them, and beside them each method must answer another call.
    """
    calls = [await PartialCall.open(str(target.grpc), method) for method in ANSWERS for _ in range(size)]
    sending = [asyncio.create_task(call.send(LARGE, LARGE - 1)) for call in calls]
    most = len(ANSWERS) * MAX_LARGEST_BODIES * LARGE + len(calls) * WINDOW
    try:
        async with asyncio.timeout(WAIT_S), grpc.aio.insecure_channel(str(target.grpc)) as channel:
            answers = [channel.unary_unary(method)(b"").code() for method in ANSWERS]
            ends = asyncio.gather(*answers, asyncio.sleep(1.0))
            while not ends.done():
                assert sum(call.num_sent for call in calls if not call.is_over) <= most
                await asyncio.sleep(0.01)
            for method, code in zip(ANSWERS, await ends, strict=False):
                _check_code(code, method, ANSWERS)
    finally:
        for task in sending:
            task.cancel()
        for call in calls:
            call.leave()


async def unread_answers(target: Target, size: int) -> None:
    """Makes ``size`` calls of each method whose answers are not read, while pings are answered. Each must be ended."""
    calls = [await PartialCall.open(str(target.grpc), method, reads=False) for method in READABLE for _ in range(size)]
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(call.send(0, 0) for call in calls))
            await asyncio.gather(*(call.until_over() for call in calls))
    finally:
        for call in calls:
            call.leave()


def _check_code(code: grpc.StatusCode, method: str, expected: Mapping[str, Sequence[grpc.StatusCode]]) -> None:
    """Raises ``AssertionError`` if a call of ``method`` ended with none of the ``expected`` codes, ``BusyError`` if the
    server had too much to do, and ``ConnectionAbortedError`` if the call was cut off.
    """
    if code in expected[method]:
        return
    if code in (_TOO_MANY, grpc.StatusCode.UNAVAILABLE):
        raise BusyError(f"{code} of {method}")
    if code == grpc.StatusCode.CANCELLED:
        raise ConnectionAbortedError(f"{code} of {method}")
    raise AssertionError(f"{code} of {method}")


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
    "unfinished_requests": Attack(unfinished_requests, 40, 100),
    "unread_answers": Attack(unread_answers, 10, 200),
}
