"""The client by HTTP: what it makes of a server's refusals, and how it reaches the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

import fastgen
from fastgen.errors import FastgenError, GenerationError, InvalidArgumentError
from fastgen.serving.clients.client import Client
from fastgen.serving.clients.grpc import GrpcTransport
from fastgen.serving.clients.http import HttpTransport
from fastgen.serving.clients.requests import ClientRequest
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
from tests.serving.test_clients import another_program

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
