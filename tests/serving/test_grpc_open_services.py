"""The gRPC services that need no key: how many calls they take at once, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fastgen.serving.admission.bodies import MAX_LARGEST_BODIES
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.ending import Ending
from fastgen.serving.grpc import open_services
from fastgen.serving.grpc.server import GrpcServer
from fastgen.serving.options import ServeOptions
from tests.serving.refusing import Refusing, served

WAIT_S = 20.0
METHODS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


async def watch(channel: Any) -> Any:
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    return call, await call.read()


async def reflect(channel: Any) -> Any:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    # Where it was refused before the question was sent, reading says why.
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    return call, await call.read()


@pytest.mark.parametrize(("begin", "limit"), [(watch, "MAX_WATCHES"), (reflect, "MAX_REFLECTIONS")])
def test_calls_beyond_the_limit_are_refused_until_others_end(
    begin: Callable[[Any], Any], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_services, limit, 3)

    async def begins(channel: Any) -> bool:
        with suppress(grpc.aio.AioRpcError):
            return bool(await begin(channel))
        return False

    async def run() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            served(Refusing()) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            calls = [(await begin(channel))[0] for _ in range(3)]
            with pytest.raises(grpc.aio.AioRpcError, match="3 calls of") as refused:
                await begin(channel)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(refused.value.trailing_metadata())["retry-after-ms"] == "1000"
            # Probes have a limit of their own.
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            calls[0].cancel()
            while not await begins(channel):
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_who_watches_is_told_for_a_while_and_may_watch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_services, "MOST_WATCH_S", 0.3)

    async def run() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            served(Refusing()) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            for _ in range(2):
                call, first = await watch(channel)
                assert first.status == health_pb2.HealthCheckResponse.NOT_SERVING
                assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(run())


def test_who_watches_does_not_delay_the_end_of_the_server() -> None:
    async def run() -> None:
        service: Any = Refusing()
        server = GrpcServer(service, ServeOptions(grpc_port=0), Ending("token", ApiKeys(), lambda: None))
        await server.start()
        async with asyncio.timeout(WAIT_S), grpc.aio.insecure_channel(str(server.address)) as channel:
            call, _ = await watch(channel)
            await server.stop(10 * WAIT_S)
            assert await call.code() == grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_a_call_of_reflection_ends_though_its_client_asks_nothing_more() -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            served(Refusing(), body_timeout_s=0.3) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            call, answer = await reflect(channel)
            assert answer.list_services_response.service
            assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(run())


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_be_decoded_is_an_invalid_argument(method: str) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            served(Refusing()) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            call = channel.unary_stream(method)(b"\xff\xff")
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_a_request_of_health_is_small(method: str) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            served(Refusing()) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            ask = channel.unary_stream(f"/grpc.health.v1.Health/{method}")
            for size, status in [(4093, grpc.StatusCode.NOT_FOUND), (4094, grpc.StatusCode.INVALID_ARGUMENT)]:
                request = health_pb2.HealthCheckRequest(service="a" * size).SerializeToString()
                call = ask(request)
                if method == "Watch" and status is grpc.StatusCode.NOT_FOUND:
                    answer = health_pb2.HealthCheckResponse.FromString(await call.read())
                    assert answer.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                    call.cancel()
                else:
                    assert await call.code() == status
                    assert ("4096 bytes" in await call.details()) == (status is grpc.StatusCode.INVALID_ARGUMENT)

    asyncio.run(run())


@pytest.mark.parametrize(("size", "is_taken"), [(4093, True), (4094, False)])
def test_a_request_of_reflection_is_small(size: int, is_taken: bool) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            served(Refusing()) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            asked = reflection_pb2.ServerReflectionRequest(file_by_filename="a" * size)
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
            if is_taken:
                answer = await call.read()
                assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
                assert await call.code() == grpc.StatusCode.OK
            else:
                assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert await call.details() == "a ServerReflectionRequest may have 4096 bytes"

    asyncio.run(run())


@pytest.mark.parametrize(("number", "status"), [(3, grpc.StatusCode.OK), (4, grpc.StatusCode.RESOURCE_EXHAUSTED)])
def test_a_call_of_reflection_has_few_requests(
    number: int, status: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_services, "MAX_QUESTIONS", 3)

    async def run() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            served(Refusing()) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            asked = [reflection_pb2.ServerReflectionRequest(list_services="")] * number
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(asked))
            for _ in range(3):
                assert (await call.read()).list_services_response.service
            assert await call.code() == status
            assert ("3 requests; make another" in await call.details()) == (status is not grpc.StatusCode.OK)

    asyncio.run(run())


def test_calls_that_need_no_key_receive_few_requests_at_once_together() -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            served(Refusing()) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            idle = [stub.ServerReflectionInfo() for _ in range(MAX_LARGEST_BODIES)]
            for call in idle:  # it has its answer, and its next request is awaited
                await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                await call.read()
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            ends = [asyncio.create_task(call.code()) for call in idle]
            over, still_open = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert [await end for end in over] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
            for call in idle:
                call.cancel()
            await asyncio.wait(still_open)

    asyncio.run(run())


def test_a_call_that_may_not_end_the_server_is_refused_before_its_request() -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            served(Refusing()) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            call = channel.stream_unary("/fastgen.v1.Generation/Terminate")()
            assert await call.code() == grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(run())
