"""A body is read as JSON only if it is said to be JSON, by each version of FastAPI, and refusals of it keep theirs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest
from fastapi import APIRouter, FastAPI

from fastgen.serving.admission.turns import Turns
from fastgen.serving.http.errors import NOT_JSON, add_error_handlers
from fastgen.serving.http.guard import Guard
from fastgen.serving.http.json_route import PARSED, TURNS, JsonRequest, JsonRoute
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import OverloadedError
from tests.serving.loop_turns import LoopTurns


def posted(router: APIRouter, content_type: str | None) -> httpx2.Response:
    app = FastAPI(strict_content_type=False)  # older versions are never strict
    add_error_handlers(app)
    app.include_router(router)

    async def run() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app)
        headers = {} if content_type is None else {"content-type": content_type}
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/", content=b'{"a": 1}', headers=headers)

    return asyncio.run(run())


def a_router(route_class: type[JsonRoute]) -> APIRouter:
    router = APIRouter(route_class=route_class)

    @router.post("/")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    return router


def test_a_large_body_is_parsed_in_several_turns_and_validated_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.serving.admission.turns._SHORT_S", 0.0)
    text = json.dumps({"prompt": [*range(200_000)]}).encode()

    async def parse() -> tuple[Any, int, int]:
        turns, loop_turns = Turns(1), LoopTurns()
        request = JsonRequest(scope_with(turns), received(text))
        reading = asyncio.create_task(request.json())
        while PARSED not in request.scope["state"]:
            await asyncio.sleep(0)
        parsed_in = loop_turns.number
        value = await reading
        loop_turns.stop()
        return value, parsed_in, loop_turns.number

    value, parsed_in, ended_in = asyncio.run(parse())
    assert value == json.loads(text)
    assert parsed_in > len(text) >> 17
    assert ended_in > parsed_in


def scope_with(turns: Turns) -> dict[str, Any]:
    return {"type": "http", "headers": [(b"content-type", b"application/json")], "state": {TURNS: turns}}


def received(text: bytes) -> Any:
    async def receive() -> Any:
        return {"type": "http.request", "body": text, "more_body": False}

    return receive


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_without_the_type_of_json_is_not_read(content_type: str | None) -> None:
    answer = posted(a_router(JsonRoute), content_type)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": NOT_JSON,
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_a_body_of_the_type_is_read() -> None:
    answer = posted(a_router(JsonRoute), "application/json; charset=utf-8")
    assert (answer.status_code, answer.json()) == (200, {"a": 1})


def test_a_refusal_while_the_body_is_read_keeps_its_status() -> None:
    class Busy(JsonRequest):
        async def json(self) -> Any:
            raise OverloadedError("come again", retry_after_s=2.0)

    class BusyRoute(JsonRoute):
        request_class = Busy

    answer = posted(a_router(BusyRoute), "application/json")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert answer.json()["error"]["message"] == "come again"


@pytest.mark.parametrize("body", [b'{"a": 1}', b"[1, 2, 3]", b'{"a"'])
def test_a_parsed_body_is_free_once_it_is_answered(body: bytes) -> None:
    """A connection keeps its last scope for as long as it lives."""
    app = FastAPI()
    add_error_handlers(app)
    app.include_router(a_router(JsonRoute))
    scopes: list[Any] = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await Guard(app, ServeOptions(), ServerMetrics(lambda: True), "127.0.0.1")(scope, receive, send)

    async def run() -> None:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=noted), base_url="http://localhost") as client:
            answer = await client.post("/", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == (200 if body == b'{"a": 1}' else 400)

    asyncio.run(run())
    (scope,) = scopes
    assert "request_id" in scope["state"]
    assert PARSED not in scope["state"]
