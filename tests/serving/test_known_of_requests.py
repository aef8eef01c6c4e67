"""What the engine is told of a request beside its prompt: its id, its session and its arrival."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx2
import pytest

from fastgen.serving.http.generate import generate_routes
from fastgen.serving.http.guard import Guard
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions
from tests.serving.scripted import MODEL, ScriptedService, application, scripted_codec

ONCE = {"model": MODEL, "prompt": "Once"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
KEYED = {"prompt_cache_key": "key"}


class Told(ScriptedService):
    """Remembers what came with the last request."""

    told: dict[str, Any]

    async def submit(self, *arguments: Any, **more: Any) -> Any:
        self.told = more
        return await super().submit(*arguments, **more)


@pytest.mark.parametrize(
    ("path", "body", "header", "session"),
    [
        ("/v1/completions", ONCE, "of the header", "of the header"),
        ("/v1/completions", ONCE, "", None),
        ("/v1/completions", ONCE, "s" * 600, "s" * 512),
        ("/v1/chat/completions", CHAT, "", None),
        ("/v1/chat/completions", CHAT | KEYED, "", "key"),
        ("/v1/chat/completions", CHAT | KEYED, "of the header", "of the header"),
        ("/v1/responses", {"model": MODEL, "input": "Hello", **KEYED}, "", "key"),
        ("/invocations", {"prompt": "Once"}, "of the header", "of the header"),
        ("/invocations", {"inputs": "Once"}, "of the header", "of the header"),
        ("/generate", {"prompt": "Once"}, "of the header", "of the header"),
    ],
)
def test_the_engine_is_told_of_the_session_the_id_and_the_arrival_of_a_request(
    path: str, body: dict[str, Any], header: str, session: str | None
) -> None:
    service = Told(scripted_codec(), lambda prompt_ids, sampling: ([5], "stop"))
    app: Any = application(service)
    app.include_router(generate_routes(service))  # type: ignore[arg-type]
    guard = Guard(app, ServeOptions(), ServerMetrics(lambda: True), "127.0.0.1")
    headers = {"x-request-id": "my-own"} | ({"x-session-id": header} if header else {})

    async def run() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=guard)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body, headers=headers)

    began_s = time.monotonic()
    response = asyncio.run(run())
    assert (response.status_code, response.headers["content-type"]) == (
        200,
        "application/json",
    )  # no stream unless asked
    assert (service.told["session"], service.told["request_id"]) == (session, "my-own")
    assert began_s <= service.told["arrived_s"] <= time.monotonic()
