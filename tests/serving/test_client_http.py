"""The client by HTTP: what it makes of a server's refusals, and how it reaches the server."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

import fastgen
from fastgen.errors import FastgenError, GenerationError, InvalidArgumentError
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.serving.clients.addresses import split_url, trusting
from fastgen.serving.clients.client import Client
from fastgen.serving.clients.grpc import GrpcTransport
from fastgen.serving.clients.http import HttpTransport, _body, _encoded
from fastgen.serving.clients.requests import ClientRequest
from fastgen.serving.http.records import NUMBERS_HEADER, REPLICAS_HEADER
from fastgen.serving.refusals import (
    BadRequestError,
    EngineDiedError,
    ForbiddenError,
    OverloadedError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnknownModelError,
)
from tests.serving.refusing import Refusing, served
from tests.serving.test_clients import TLS, another_program

DIED = {"message": "the engine ended; send it again", "code": "engine_died"}


@contextmanager
def connected(answer: bytes) -> Iterator[Client]:
    """Yields a client of a server that answers every request with these bytes."""
    with another_program(answer) as address, fastgen.client(address) as client:
        yield client


@pytest.mark.parametrize(("token", "sent"), [("abc", "Bearer abc"), (None, None)])
def test_a_server_is_ended_with_the_token_that_is_known(
    token: str | None, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[str, str | None]]()

    @asynccontextmanager
    async def noted(self: Any, path: str, body: Any, headers: dict[str, str]) -> AsyncIterator[None]:
        asked.append((path, headers.get("authorization")))
        yield

    monkeypatch.setattr(HttpTransport, "_sent", noted)

    async def terminate() -> None:
        transport = HttpTransport("127.0.0.1:1", None)
        await transport.terminate(token)
        await transport.close()

    asyncio.run(terminate())
    assert asked == [("/terminate", sent)]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidArgumentError),
        (401, UnauthorizedError),
        (403, ForbiddenError),
        (404, UnknownModelError),
        (413, TooLargeError),
        (418, GenerationError),
        (422, InvalidArgumentError),
        (429, OverloadedError),
        (500, GenerationError),
        (503, UnavailableError),
    ],
)
def test_each_status_is_the_error_of_the_library(status: int, kind: type[FastgenError]) -> None:
    body = json.dumps({"error": {"message": "in these words", "code": None}}).encode()
    headers = "retry-after: 2.5\r\nx-predicted-ttft-s: 0.75"
    for answer, words in ((body, "in these words"), (b"<html>", f"the server answered with status {status}")):
        head = f"HTTP/1.0 {status} No\r\n{headers}\r\n\r\n".encode()
        with connected(head + answer) as client, pytest.raises(FastgenError) as refused:
            client.generate("a")
        assert (type(refused.value), str(refused.value)) == (kind, words)
        if isinstance(refused.value, OverloadedError | UnavailableError):
            assert refused.value.retry_after_s == 2.5
        if isinstance(refused.value, OverloadedError):
            assert refused.value.predicted_ttft_s == 0.75


def test_the_death_of_an_engine_is_told_from_other_failures() -> None:
    body = json.dumps({"error": DIED}).encode()
    failed = b"HTTP/1.0 500 No\r\n\r\n" + body
    with connected(failed) as client, pytest.raises(EngineDiedError, match="send it again"):
        client.generate("a")


def test_an_error_event_ends_a_stream() -> None:
    events = b"event: error\ndata: " + json.dumps({"error": DIED}).encode() + b"\n\ndata: {}\n\n"
    answer = b"HTTP/1.0 200 OK\r\n\r\n" + events
    with connected(answer) as client, pytest.raises(EngineDiedError, match="the engine ended; send it again"):
        list(client.stream("a"))


@pytest.fixture
def proxy_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("proxy_that_is_gone")
def test_no_proxy_stands_between_a_client_and_its_server() -> None:
    with connected(b"HTTP/1.0 200 OK\r\n\r\n{}") as client:
        assert client.info() == {}


@pytest.mark.usefixtures("proxy_that_is_gone")
def test_no_proxy_stands_between_a_client_and_its_server_by_grpc() -> None:
    service: Any = Refusing()
    service.error = BadRequestError("it has come")

    async def run() -> None:
        async with asyncio.timeout(20.0), served(service) as address:
            transport = GrpcTransport(address, None)
            try:
                with pytest.raises(InvalidArgumentError, match="it has come"):
                    await transport.generate(ClientRequest({}, prompt="a"))
            finally:
                await transport.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "url", ["ftp://here:1", "here:1", "http:///path", "https://", "http://here\n", "http://here:65536", "http://[::1"]
)
def test_what_is_no_url_of_http_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a URL"):
        split_url(url)


@pytest.mark.parametrize(("url", "host"), [("http://here", "here"), ("https://[::1]:65535/x", "::1")])
def test_a_url_of_http_has_a_host(url: str, host: str) -> None:
    assert split_url(url).hostname == host


def test_a_certificate_is_trusted_beside_those_of_the_system_though_another_has_signed_it() -> None:
    plain = ssl.create_default_context()
    assert trusting(None).verify_flags == plain.verify_flags
    context = trusting(str(TLS / "certificate.pem"))
    assert context.verify_flags == plain.verify_flags | ssl.VERIFY_X509_PARTIAL_CHAIN
    assert context.cert_store_stats()["x509"] == plain.cert_store_stats()["x509"] + 1
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize(
    ("given", "base"), [("127.0.0.1:1", "http://127.0.0.1:1"), ("https://here:2/x", "https://here:2/x/")]
)
def test_an_address_without_a_scheme_is_one_of_http(given: str, base: str) -> None:
    async def run() -> None:
        transport = HttpTransport(given, "a-key")
        assert str(transport._http.base_url).rstrip("/") == base.rstrip("/")
        assert transport._http.headers["authorization"] == "Bearer a-key"
        assert transport._http.timeout.as_dict() == {"connect": 10.0, "read": None, "write": None, "pool": None}
        await transport.close()

    asyncio.run(run())


def test_text_is_sent_as_it_is() -> None:
    request = ClientRequest({"seed": None, "top_k": 2, "response_format": ResponseFormat("json_object", "")}, "é")
    body = _encoded(_body(request))
    assert body == '{"prompt": "é", "top_k": 2, "response_format": {"type": "json_object"}}'.encode()
    chat = ClientRequest({"seed": 0}, messages=[{"role": "user", "content": "a"}])
    assert _body(chat) == {"messages": [{"role": "user", "content": "a"}], "seed": 0}
    with pytest.raises(InvalidArgumentError, match="cannot be sent as JSON"):
        _encoded({"temperature": float("nan")})


@pytest.mark.parametrize(("status", "kind"), [(402, GenerationError), (502, GenerationError), (504, GenerationError)])
def test_a_status_of_another_program_is_a_failure(status: int, kind: type[FastgenError]) -> None:
    answer = f"HTTP/1.0 {status} No\r\nretry-after: 9\r\n\r\n".encode() + b'{"error": {"code": "other"}}'
    with connected(answer) as client, pytest.raises(FastgenError) as failed:
        client.generate("a")
    assert (type(failed.value), str(failed.value)) == (kind, f"the server answered with status {status}")


@pytest.mark.parametrize(
    ("code", "trailing", "kind", "retry_after_s"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, {}, InvalidArgumentError, None),
        (grpc.StatusCode.UNAUTHENTICATED, {}, UnauthorizedError, None),
        (grpc.StatusCode.NOT_FOUND, {}, UnknownModelError, None),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, {}, OverloadedError, 1.0),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, {"retry-after-ms": "250"}, OverloadedError, 0.25),
        (grpc.StatusCode.UNAVAILABLE, {}, FastgenError, None),
        (grpc.StatusCode.UNAVAILABLE, {"retry-after-ms": "4000"}, UnavailableError, 4.0),
        (grpc.StatusCode.ABORTED, {}, EngineDiedError, None),
        (grpc.StatusCode.DEADLINE_EXCEEDED, {}, GenerationError, None),
    ],
)
@pytest.mark.parametrize("details", ["in these words", ""])
def test_each_status_of_grpc_is_the_error_of_the_library(
    code: grpc.StatusCode, trailing: dict[str, str], kind: type[FastgenError], retry_after_s: float | None, details: str
) -> None:
    metadata = grpc.aio.Metadata(*trailing.items())
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=details)

    async def run() -> FastgenError:
        transport = GrpcTransport("127.0.0.1:1", None)
        with pytest.raises(FastgenError) as failed:
            transport._fail(error)
        await transport.close()
        return failed.value

    found = asyncio.run(run())
    assert type(found) is kind
    assert str(found).endswith(details or code.name)
    assert getattr(found, "retry_after_s", None) == retry_after_s


@pytest.mark.parametrize(
    ("key", "token", "sent"),
    [
        (None, "abc", (("authorization", "Bearer abc"),)),
        ("key", None, (("authorization", "Bearer key"),)),
        ("key", "abc", (("authorization", "Bearer abc"),)),
        (None, None, ()),
    ],
)
def test_a_server_is_ended_by_grpc_with_the_token_or_else_the_key(
    key: str | None, token: str | None, sent: Any
) -> None:
    asked: list[Any] = []

    async def terminate() -> None:
        async def call(message: Any, metadata: Any) -> None:
            asked.append(metadata)

        transport = GrpcTransport("127.0.0.1:1", key)
        transport._calls["Terminate"] = call
        await transport.terminate(token)
        await transport.close()

    asyncio.run(terminate())
    assert asked == [sent]


def test_the_recordings_of_all_replicas_of_a_request_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    @asynccontextmanager
    async def answered(self: Any, path: str) -> AsyncIterator[Any]:
        asked.append(path)
        number = len(asked)
        headers = {NUMBERS_HEADER: f"{number}1 {number}2"}
        if number == 1:
            headers[REPLICAS_HEADER] = "a b c"

        async def read() -> bytes:
            return f"recording {number}".encode()

        yield SimpleNamespace(aread=read, headers=headers)

    monkeypatch.setattr(HttpTransport, "_sent", answered)

    async def run() -> list[tuple[bytes, list[str]]]:
        transport = HttpTransport("127.0.0.1:1", None)
        try:
            return await transport.recordings("req/1")
        finally:
            await transport.close()

    assert asyncio.run(run()) == [
        (b"recording 1", ["11", "12"]),
        (b"recording 2", ["21", "22"]),
        (b"recording 3", ["31", "32"]),
    ]
    assert asked == [
        "/recording?request=req%2F1",
        "/recording?request=req%2F1&replica=b",
        "/recording?request=req%2F1&replica=c",
    ]
