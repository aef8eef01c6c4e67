"""The memory of a request is freed once it is answered or refused, without a garbage collection."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import grpc
import httpx2
import pytest
from fastapi import APIRouter, FastAPI
from grpc_health.v1 import health_pb2
from pydantic import BaseModel

from fastgen.serving.grpc.messages import CheckRequest, GenerateRequest
from fastgen.serving.http.errors import add_error_handlers
from fastgen.serving.http.guard import Guard
from fastgen.serving.http.json_route import JsonRequest, JsonRoute
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import BadRequestError, OverloadedError
from tests.serving.refusing import Refusing, served

SIZE, NUM_CALLS = 1 << 20, 8
REFUSED, ANSWERED, LEFT = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED
HEALTH, GENERATION = "/grpc.health.v1.Health/", "/fastgen.v1.Generation/"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
JSON = "application/json"
LARGE = GenerateRequest(text="a" * SIZE)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Collects no garbage meanwhile, and traces memory."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


async def num_kept(ask: Callable[[], Awaitable[None]]) -> int:
    """Returns how many requests of ``SIZE`` are still held soon after some calls of ``ask``. The first one may keep
    something.
    """
    await ask()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(NUM_CALLS):
        await ask()
    for _ in range(200):
        if (kept := (tracemalloc.get_traced_memory()[0] - before) // SIZE) <= 0:
            break
        await asyncio.sleep(0.01)
    return kept


@pytest.mark.parametrize(
    ("method", "sent", "code"),
    [
        (HEALTH + "Check", health_pb2.HealthCheckRequest(service="a" * SIZE).SerializeToString(), REFUSED),
        (HEALTH + "Watch", b"\xff" * SIZE, REFUSED),
        (REFLECT, b"\xff" * SIZE, REFUSED),
        (GENERATION + "Generate", b"\xff" * SIZE, REFUSED),
        (GENERATION + "GenerateStream", LARGE.SerializeToString(), REFUSED),
        (GENERATION + "Check", CheckRequest(prompts=[LARGE]).SerializeToString(), ANSWERED),
        (GENERATION + "Generate", GenerateRequest(text="wait" * (SIZE // 4)).SerializeToString(), LEFT),
    ],
    ids=["open and large", "open and no message", "reflection", "no message", "refused", "answered", "left"],
)
@pytest.mark.usefixtures("uncollected")
def test_a_request_by_grpc_is_free_once_it_has_ended(method: str, sent: bytes, code: grpc.StatusCode) -> None:
    service: Any = Refusing()

    async def refusal(*asked: Any) -> str:
        return "no"

    async def submit(*asked: Any, **more: Any) -> None:
        if code == LEFT:
            await asyncio.Event().wait()
        raise BadRequestError("no")

    service.refusal, service.submit = refusal, submit

    async def run() -> int:
        async with served(service) as address:
            with grpc.insecure_channel(address) as channel:

                def ask() -> grpc.StatusCode:
                    call = channel.unary_stream(method)(sent, timeout=0.2 if code == LEFT else 20.0)
                    with suppress(grpc.RpcError):
                        list(call)
                    return cast(grpc.StatusCode, call.code())

                async def once() -> None:
                    assert await asyncio.to_thread(ask) == code

                return await num_kept(once)

    assert asyncio.run(run()) <= 0


class Echoed(BaseModel):
    a: str | int


class Deferring(JsonRequest):
    async def json(self) -> Any:
        if self.headers.get("x-busy"):
            raise OverloadedError("come again", retry_after_s=2.0)
        return await super().json()


class DeferringRoute(JsonRoute):
    request_class = Deferring


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b'{"a": "' + b"a" * SIZE, {}, 400),
        (b"}" * SIZE, {}, 400),
        (b'{"a": "' + b"\xff" * SIZE + b'"}', {}, 400),
        (b'{"b": "' + b"a" * SIZE + b'"}', {}, 400),
        (b'{"a": "no' + b"a" * SIZE + b'"}', {}, 400),
        (b'{"a": "' + b"a" * SIZE + b'"}', {"x-busy": "1"}, 429),
        (b'{"a": "' + b"a" * SIZE + b'"}', {}, 200),
    ],
    ids=["ends too early", "no JSON", "no UTF-8", "unknown field", "refused", "refused while it is read", "answered"],
)
@pytest.mark.usefixtures("uncollected")
def test_a_body_by_http_is_free_once_it_is_answered(body: bytes, headers: dict[str, str], status: int) -> None:
    app, router = FastAPI(), APIRouter(route_class=DeferringRoute)
    add_error_handlers(app)

    @router.post("/echo")
    async def echo(body: Echoed) -> str:
        if str(body.a).startswith("no"):
            raise BadRequestError("no")
        return "yes"

    app.include_router(router)
    guard = Guard(app, ServeOptions(), ServerMetrics(lambda: True), "127.0.0.1")

    async def run() -> int:
        transport = httpx2.ASGITransport(app=guard)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def once() -> None:
                content = body[:-1] + body[-1:]  # a copy, so that it is held by the request alone
                answer = await client.post("/echo", content=content, headers={"content-type": JSON, **headers})
                assert answer.status_code == status

            return await num_kept(once)

    assert asyncio.run(run()) <= 0
