"""Refusals of a server over gRPC and in the client: statuses, health, and retry delays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fastgen import SamplingParams
from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.serving.admission.request_limits import MAX_SESSION_LENGTH, MAX_TOKEN_IDS, SESSION_HEADER
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.clients.grpc import GrpcTransport
from fastgen.serving.clients.requests import ClientRequest
from fastgen.serving.ending import Ending
from fastgen.serving.grpc.messages import CheckRequest, CheckResponse, GenerateRequest
from fastgen.serving.grpc.server import GrpcServer
from fastgen.serving.http.server import listen
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import (
    BadRequestError,
    EngineDiedError,
    OverloadedError,
    RefusedError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
)
from tests.serving.refusing import Refusing, served

REFUSALS: list[tuple[RefusedError, grpc.StatusCode, type[FastgenError], int | None]] = [
    (BadRequestError("no"), grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError, None),
    (TooLargeError("no"), grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError, None),
    (OverloadedError("no", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, OverloadedError, 2500),
    (UnavailableError("no", retry_after_s=5.0), grpc.StatusCode.UNAVAILABLE, UnavailableError, 5000),
    (EngineDiedError("no"), grpc.StatusCode.ABORTED, EngineDiedError, None),
]


def encoding() -> SimpleNamespace:
    """Returns a codec to which every prompt is one token."""

    def encode(*given: object, **more: object) -> list[int]:
        return [1]

    names = ("encode", "encode_plain", "encode_text", "render_chat", "rendered")
    return SimpleNamespace(default_sampling=SamplingParams(), **dict.fromkeys(names, encode))


@pytest.mark.parametrize(("error", "status", "heard", "retry_ms"), REFUSALS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("is_stream", [False, True])
def test_refusals_are_statuses_and_heard_as_what_they_are(
    error: RefusedError, status: grpc.StatusCode, heard: type[FastgenError], retry_ms: int | None, is_stream: bool
) -> None:
    service: Any = Refusing()
    service.error = error

    async def run() -> None:
        async with served(service) as address:
            transport = GrpcTransport(address, None)
            request = ClientRequest({}, prompt="a")
            try:
                answer: Any = anext(transport.stream(request)) if is_stream else transport.generate(request)
                with pytest.raises(heard, match="no") as told:
                    await answer
                if retry_ms is not None:
                    assert told.value.retry_after_s == retry_ms / 1000
                async with grpc.aio.insecure_channel(address) as channel:
                    call = channel.unary_unary("/fastgen.v1.Generation/Generate")(b"\x0a\x01a")
                    assert await call.code() == status
                    assert await call.details() == "no"
                    assert dict(await call.trailing_metadata()).get("retry-after-ms") == (retry_ms and str(retry_ms))
                    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
            finally:
                await transport.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("a" * 20_000, "a" * 2048 + "…"),
        ("a" * 2048, "a" * 2048),
        ("é" * 5_000, "é" * 1024 + "…"),
        ("no \ud800", r"no \ud800"),
        ("é%\n", "é%\n"),
    ],
    ids=["long", "the longest that is whole", "long as a header", "surrogate", "short"],
)
def test_any_error_text_ends_the_call_with_its_status(text: str, heard: str) -> None:
    service: Any = Refusing()
    service.error = BadRequestError(text)

    async def run() -> None:
        async with served(service) as address, grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary("/fastgen.v1.Generation/Generate")(b"\x0a\x01a", timeout=10)
            assert (await call.code(), await call.details()) == (grpc.StatusCode.INVALID_ARGUMENT, heard)

    asyncio.run(run())


def test_a_long_name_of_a_service_is_not_repeated_to_who_asks_for_its_health() -> None:
    async def run() -> None:
        async with served(Refusing()) as address, grpc.aio.insecure_channel(address) as channel:
            call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="é" * 1500))
            assert await call.code() == grpc.StatusCode.NOT_FOUND
            assert await call.details() == f"service '{'é' * 100}' is not served here"

    asyncio.run(run())


def test_a_request_that_is_too_large_is_heard_as_that_and_not_as_one_that_may_be_sent_again() -> None:
    service: Any = Refusing()

    async def run() -> None:
        async with served(service, max_body_bytes=1000) as address:
            transport = GrpcTransport(address, None)
            try:
                with pytest.raises(TooLargeError):
                    await transport.generate(ClientRequest({}, prompt="a" * 1001))
            finally:
                await transport.close()

    asyncio.run(run())


def test_what_is_checked_at_once_is_limited() -> None:
    async def run() -> None:
        async with served(Refusing()) as address:
            transport = GrpcTransport(address, None)
            try:
                with pytest.raises(InvalidArgumentError, match="65 requests to be checked; at most 64"):
                    await transport.check([ClientRequest({}, prompt="a")] * 65)
            finally:
                await transport.close()

    asyncio.run(run())


def test_as_many_requests_as_the_limit_are_checked_one_by_one() -> None:
    service: Any = Refusing()
    answers: list[Any] = [*[None] * 62, "too long", BadRequestError("no such token")]

    async def refusal(prompt_ids: list[int], sampling: Any) -> str | None:
        answer: str | RefusedError | None = answers.pop(0)
        if isinstance(answer, RefusedError):
            raise answer
        return answer

    service.refusal = refusal

    async def run() -> None:
        async with served(service) as address:
            transport = GrpcTransport(address, None)
            try:
                found = await transport.check([ClientRequest({}, prompt="a")] * 64)
                assert found == [None] * 62 + ["too long", "no such token"]
            finally:
                await transport.close()

    asyncio.run(run())


def test_a_prompt_that_cannot_even_be_sent_is_the_one_that_is_named() -> None:
    async def run() -> list[str | None]:
        transport = GrpcTransport("127.0.0.1:1", None)  # where no server is
        try:
            return await transport.check([ClientRequest({}, prompt=prompt) for prompt in ("a", "b", [5, 1 << 70], "c")])
        finally:
            await transport.close()

    *before, why = asyncio.run(run())
    assert before == [None, None]
    assert str(why).startswith("the prompt cannot be sent by gRPC: ")


@pytest.mark.parametrize(
    ("given", "session"),
    [(None, None), ("", None), ("chat-7", "chat-7"), ("a" * (MAX_SESSION_LENGTH + 1), "a" * MAX_SESSION_LENGTH)],
    ids=["none", "empty", "some", "long"],
)
def test_a_session_is_named_in_the_metadata(given: str | None, session: str | None) -> None:
    service: Any = Refusing()
    found: list[str | None] = []

    async def submit(*arguments: Any, session: str | None, **more: Any) -> Any:
        found.append(session)
        raise BadRequestError("no")

    service.submit = submit

    async def run() -> None:
        async with served(service) as address, grpc.aio.insecure_channel(address) as channel:
            metadata = () if given is None else ((SESSION_HEADER, given),)
            for method in ("Generate", "GenerateStream"):
                call = channel.unary_stream(f"/fastgen.v1.Generation/{method}")(b"\x0a\x01a", metadata=metadata)
                assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())
    assert found == [session, session]


def test_who_has_no_key_is_counted() -> None:
    service: Any = Refusing()
    service.metrics = ServerMetrics(lambda: True)

    async def run() -> None:
        async with served(service, ApiKeys(("right",))) as address:
            transport = GrpcTransport(address, "wrong")
            try:
                with pytest.raises(UnauthorizedError):
                    await transport.generate(ClientRequest({}, prompt="a"))
            finally:
                await transport.close()

    asyncio.run(run())
    assert b'fastgen_refused_total{reason="api_key"} 1.0' in service.metrics.text()


def test_who_watches_hears_of_a_change() -> None:
    service: Any = Refusing()

    async def run() -> None:
        async with served(service) as address, grpc.aio.insecure_channel(address) as channel:
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            told = [(await watching.read()).status]
            service.state = "ready"
            told.append((await watching.read()).status)
            assert told == [health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING]
            watching.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("keys", [ApiKeys(), ApiKeys(["known"])], ids=["no keys", "keys"])
def test_the_token_or_a_key_ends_a_server(keys: ApiKeys) -> None:
    ends: list[None] = []
    ending = Ending("token", keys, lambda: ends.append(None))
    for wrong in (None, "", "toke", "tokens", "unknown", "\udcff"):
        with pytest.raises(RefusedError):
            ending.ask(wrong)
    assert ends == []
    ending.ask("token")
    assert len(ends) == 1
    if keys:
        ending.ask("known")
        assert len(ends) == 2


def test_a_port_that_is_taken_is_refused() -> None:
    async def run() -> None:
        service: Any = Refusing()
        ending = Ending("token", ApiKeys(), lambda: None)
        first = GrpcServer(service, ServeOptions(grpc_port=0), ending)
        await first.start()
        try:
            port = int(str(first.address).rpartition(":")[2])
            with pytest.raises(InvalidArgumentError, match=f"cannot listen on 127.0.0.1:{port} for gRPC"):
                await GrpcServer(service, ServeOptions(grpc_port=port), ending).start()
        finally:
            await first.stop(0.0)

    asyncio.run(run())


@pytest.mark.parametrize("host", ["127.1", "0x7f.1", "0", "", "localhost"])
def test_grpc_listens_at_the_address_that_http_listens_at(host: str) -> None:
    service: Any = Refusing()
    service.error = BadRequestError("it has come")

    async def run() -> None:
        with listen(host, 0) as listener:
            bound = listener.getsockname()[0]
        options, ending = ServeOptions(host=host, grpc_port=0), Ending("token", ApiKeys(), lambda: None)
        server = GrpcServer(service, options, ending, address=bound)
        await server.start()
        transport = GrpcTransport(str(server.address), None)
        try:
            announced = host if host == "localhost" else bound  # a certificate may be for the name alone
            assert str(server.address).startswith(f"{announced}:")
            with pytest.raises(InvalidArgumentError, match="it has come"):
                await transport.generate(ClientRequest({}, prompt="a"))
        finally:
            await transport.close()
            await server.stop(0.0)

    asyncio.run(run())


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_what_cannot_be_decoded_is_an_invalid_argument(method: str) -> None:
    service: Any = Refusing()

    async def run() -> None:
        async with served(service) as address, grpc.aio.insecure_channel(address) as channel:
            kind = channel.unary_stream if method.endswith("Stream") else channel.unary_unary
            call = kind(f"/fastgen.v1.Generation/{method}")(b"\xff\xff")
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "fastgen.v1.GenerateRequest" in await call.details()

    asyncio.run(run())


def test_requests_in_work_are_bounded_together_and_small_ones_are_always_taken() -> None:
    """At most 16 of the largest are held, without the first 64 KiB of each."""
    size, counted = 200_000, 200_000 - (64 << 10)
    num_held = 16 * size // counted

    async def run() -> None:
        service: Any = Refusing()
        service.error = BadRequestError("no")
        is_over, num_begun = asyncio.Event(), 0

        async def submit(*arguments: Any, **more: Any) -> Any:
            nonlocal num_begun
            num_begun += 1
            await is_over.wait()
            raise service.error

        service.submit = submit
        async with (
            asyncio.timeout(20.0),
            served(service, max_body_bytes=size) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            generate = channel.unary_unary("/fastgen.v1.Generation/Generate")
            large = GenerateRequest(text="a" * (size - 4)).SerializeToString()
            assert len(large) == size
            held = [generate(large) for _ in range(num_held)]
            while num_begun < num_held:
                await asyncio.sleep(0.01)
            refused = generate(large)
            assert await refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "no more large ones are taken" in await refused.details()
            assert b'fastgen_refused_total{reason="bodies"} 1.0' in service.metrics.text()
            small = generate(GenerateRequest(text="a" * 60_000).SerializeToString())
            while num_begun < num_held + 1:
                await asyncio.sleep(0.01)
            is_over.set()
            for call in [*held, small, generate(large)]:
                assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())


def test_prompts_to_be_checked_have_as_many_token_ids_as_one_call_may() -> None:
    service: Any = Refusing()

    async def refusal(prompt_ids: list[int], sampling: Any) -> str:
        return "checked"

    service.refusal = refusal

    async def run() -> None:
        async with served(service) as address:
            transport = GrpcTransport(address, None)
            half = ClientRequest({}, prompt=[5] * (MAX_TOKEN_IDS // 2))
            try:
                assert await transport.check([half, half]) == ["checked"] * 2
                with pytest.raises(InvalidArgumentError, match=f"{MAX_TOKEN_IDS} ids, not {MAX_TOKEN_IDS + 1}"):
                    await transport.check([half, half, ClientRequest({}, prompt=[5])])
            finally:
                await transport.close()

    asyncio.run(run())


def test_prompts_and_conversations_to_be_checked_count_together() -> None:
    service: Any = Refusing()

    async def refusal(prompt_ids: list[int], sampling: Any) -> None:
        return None

    service.refusal = refusal
    service.codec = encoding()

    async def check(address: str, num_prompts: int, num_chats: int) -> list[str]:
        asked = CheckRequest()
        for _ in range(num_prompts):
            asked.prompts.add(text="a")
        for _ in range(num_chats):
            asked.chats.add().messages.add(role="user", content="a")
        async with grpc.aio.insecure_channel(address) as channel:
            method = channel.unary_unary("/fastgen.v1.Generation/Check", response_deserializer=CheckResponse.FromString)
            return list((await method(asked.SerializeToString())).errors)

    async def run() -> None:
        async with served(service) as address:
            assert await check(address, 40, 24) == [""] * 64
            with pytest.raises(grpc.aio.AioRpcError, match="65 requests to be checked; at most 64"):
                await check(address, 40, 25)

    asyncio.run(run())


def test_only_methods_with_a_stream_of_answers_ask_the_engine_for_one() -> None:
    service: Any = Refusing()
    found: list[bool] = []

    async def submit(*arguments: Any, is_stream: bool, **more: Any) -> Any:
        found.append(is_stream)
        raise BadRequestError("no")

    service.submit = submit
    service.codec = encoding()

    async def run() -> None:
        async with served(service) as address, grpc.aio.insecure_channel(address) as channel:
            for method in ("Generate", "GenerateStream", "Chat", "ChatStream"):
                request = b"\x0a\x03\x0a\x01u" if method.startswith("Chat") else b"\x0a\x01a"  # a message by "u"
                call = channel.unary_stream(f"/fastgen.v1.Generation/{method}")(request)
                assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())
    assert found == [False, True, False, True]


def test_a_server_at_an_address_of_version_6_is_named_as_a_client_takes_it() -> None:
    service: Any = Refusing()
    service.error = BadRequestError("it has come")

    async def run() -> None:
        server = GrpcServer(service, ServeOptions(host="::1", grpc_port=0), Ending("token", ApiKeys(), lambda: None))
        try:
            await server.start()
        except InvalidArgumentError:
            pytest.skip("this machine has no IPv6")
        address = str(server.address)
        assert address.startswith("[::1]:")
        transport = GrpcTransport(address, None)
        try:
            with pytest.raises(InvalidArgumentError, match="it has come"):
                await transport.generate(ClientRequest({}, prompt="a"))
        finally:
            await transport.close()
            await server.stop(0.0)

    asyncio.run(run())
