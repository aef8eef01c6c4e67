"""Small instances of the attacks on the gRPC port that ask for nothing."""

from __future__ import annotations

import asyncio
import time
from itertools import islice

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fastgen.serving.grpc import connections
from fastgen.serving.grpc.connections import num_connections
from tests.serving.attacks.grpc_connections import ATTACKS
from tests.serving.attacks.harness import Target
from tests.serving.attacks.http2 import PartialCall
from tests.serving.refusing import Refusing, served

WAIT_S = 20.0
SHORT_S = 0.5
# The limit that ends each attack; the others are long.
ENDED_BY = {
    "silent_connections": "header_timeout_s",
    "connections_without_calls": "keep_alive_s",
    "calls_without_requests": "body_timeout_s",
    "unfinished_requests": "keep_alive_s",
    "unread_answers": "write_timeout_s",
}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def until_open(port: int, number: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while num_connections(port) != number:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", ATTACKS)
def test_what_asks_for_nothing_is_ended(name: str) -> None:
    async def run() -> None:
        limits = dict.fromkeys(("header_timeout_s", "keep_alive_s", "body_timeout_s", "write_timeout_s"), 600.0)
        limits[ENDED_BY[name]] = SHORT_S
        async with served(Refusing(), **limits) as address:
            await ATTACKS[name].run(Target("", address), ATTACKS[name].small)
            await until_open(port_of(address), 0)

    asyncio.run(run())


def test_a_connection_without_a_sign_of_life_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PING_TIMEOUT_S", SHORT_S / 2)

    async def run() -> None:
        async with asyncio.timeout(WAIT_S), served(Refusing(), write_timeout_s=SHORT_S / 2) as address:
            silent, alive = [
                await PartialCall.open(address, "/fastgen.v1.Generation/Generate", pongs=pongs)
                for pongs in (False, True)
            ]
            await silent.until_over()
            await asyncio.sleep(SHORT_S)
            assert not alive.is_over
            alive.leave()

    asyncio.run(run())


def test_connections_beyond_the_limit_are_closed_and_the_rest_is_counted() -> None:
    service, limit = Refusing(), 5

    async def run() -> None:
        async with asyncio.timeout(WAIT_S), served(service, max_connections=limit) as address:
            port = port_of(address)
            clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4 * limit)]
            ends = [asyncio.create_task(reader.read()) for reader, _ in clients]
            for end in islice(asyncio.as_completed(ends), 3 * limit):
                assert await end == b""
            await until_open(port, limit)
            assert b"fastgen_grpc_connections 5.0" in service.metrics.text()
            for _, writer in clients:
                writer.transport.abort()
            await asyncio.wait(ends)

    asyncio.run(run())


def test_calls_that_wait_for_a_busy_server_are_answered() -> None:
    """gRPC by itself would end some of more than 1000 such calls, without a reason."""

    async def run() -> None:
        async with served(Refusing()) as address:
            own_connection = [("grpc.use_local_subchannel_pool", 1)]
            channels = [grpc.insecure_channel(address, own_connection) for _ in range(2)]
            for channel in channels:
                await asyncio.to_thread(grpc.channel_ready_future(channel).result, WAIT_S)
            generate = [channel.unary_unary("/fastgen.v1.Generation/Generate") for channel in channels]
            calls = [call.future(b"") for call in generate for _ in range(800)]
            time.sleep(1.5)  # the event loop is busy
            codes = await asyncio.to_thread(lambda: [call.code() for call in calls])
            assert set(codes) == {grpc.StatusCode.INVALID_ARGUMENT}
            for channel in channels:
                channel.close()

    asyncio.run(run())


def test_a_channel_whose_connection_was_closed_opens_another() -> None:
    async def run() -> None:
        async with served(Refusing(), keep_alive_s=SHORT_S) as address, grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            await until_open(port_of(address), 0)
            await health.Check(health_pb2.HealthCheckRequest())

    asyncio.run(run())
