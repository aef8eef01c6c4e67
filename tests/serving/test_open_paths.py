"""Which paths of the real application answer without an API key. A new path needs a key unless it is listed here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute

from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.ending import Ending
from fastgen.serving.http.app import create_app
from fastgen.serving.http.generate import terminate_routes
from fastgen.serving.http.guard import Guard
from fastgen.serving.options import ServeOptions
from fastgen.serving.service import Service

OPEN = {"/", "/page/{name}", "/health", "/ready", "/-/healthz", "/ping", "/version", "/terminate"}
# Other spellings of paths that need a key, and of folders that need none.
DISGUISED = [
    "/nothing",
    "//v1/completions",
    "/v1/completions/",
    "/V1/completions",
    "/v1/../health",
    "/health/../generate",
    "/health/",
    "/HEALTH",
    "/page",
    "/pages/app.js",
    "/ping/invocations",
    "/version/x",
    "",
]
KEY = "the key"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service that is never started."""
    service = Service({"model": "tiny-llama"})
    yield service
    asyncio.run(service.stop())


@pytest.fixture(scope="module")
def app(service: Service) -> FastAPI:
    """Everything that a server serves."""
    app = create_app(service, ServeOptions())
    app.include_router(terminate_routes(Ending("the token", ApiKeys([KEY]), lambda: None)))
    return app


def ask(app: FastAPI, service: Service, method: str, path: str, key: str | None = None) -> int:
    """Returns the status of an answer to an empty request."""
    guard = Guard(app, ServeOptions(api_keys=ApiKeys([KEY])), service.metrics, "127.0.0.1")
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": headers}
    asyncio.run(guard(scope | {"query_string": b"", "http_version": "1.1", "scheme": "http"}, receive, send))
    (status,) = statuses
    return status


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Returns every method and path that the application has."""

    def below(found: list[BaseRoute]) -> Iterator[tuple[str, str]]:
        for route in found:
            inner = getattr(getattr(route, "original_router", route), "routes", None)  # of a router that was included
            if inner is not None:
                yield from below(inner)
            else:
                path: str = vars(route)["path"]
                yield from ((method, path) for method in getattr(route, "methods", None) or ("GET",))

    return sorted(set(below(app.routes)))


def test_the_application_has_the_paths_that_are_listed(app: FastAPI) -> None:
    paths = {path for _, path in routes(app)}
    assert paths >= OPEN
    assert paths >= {"/v1/completions", "/v1/chat/completions", "/invocations", "/generate", "/metrics", "/live"}


def test_the_document_has_the_paths_of_the_api_and_their_answers(app: FastAPI) -> None:
    paths = app.openapi()["paths"]
    assert paths.keys() == {
        *("/health", "/ready", "/metrics", "/generate", "/check", "/info", "/recording", "/terminate"),
        *("/v1/models", "/v1/models/{name}", "/version", "/tokenize", "/detokenize"),
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/ping", "/invocations"),
    }
    errors = {"400", "401", "403", "404", "408", "413", "415", "429", "500", "503"}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/invocations"):
        assert paths[path]["post"]["requestBody"]["required"]
        assert paths[path]["post"]["responses"].keys() - {"422"} == {"200"} | errors, path
    assert paths["/recording"]["get"]["responses"].keys() - {"422"} == {"200"} | errors
    assert paths["/ping"]["get"]["responses"].keys() == {"200", "503"}


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/ready", 503), ("/-/healthz", 503), ("/ping", 503), ("/info", 503)]
)
def test_a_server_that_is_starting_is_alive_and_not_ready(
    app: FastAPI, service: Service, path: str, status: int
) -> None:
    assert ask(app, service, "GET", path, KEY) == status


def test_every_path_but_the_open_ones_needs_a_key(app: FastAPI, service: Service) -> None:
    answers_without = {}
    for method, path in routes(app):
        concrete = re.sub(r"\{[^}]*\}", "name", path)
        status = ask(app, service, method, concrete)
        if path == "/terminate":  # asks for its token itself
            assert status == 401
        answers_without[method, path] = status != 401 or path == "/terminate"
        if path not in OPEN:
            assert ask(app, service, method, concrete, "another key") == 401, path
        assert ask(app, service, method, concrete, KEY) != 401, path
    assert {path for (_, path), is_open in answers_without.items() if is_open} == OPEN
    assert {path for (_, path), is_open in answers_without.items() if not is_open}.isdisjoint(OPEN)


@pytest.mark.parametrize("path", DISGUISED)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
def test_other_spellings_of_paths_need_a_key(app: FastAPI, service: Service, method: str, path: str) -> None:
    assert ask(app, service, method, path) == 401


@pytest.mark.parametrize("path", ["/page/../generate", "/page/x/../../v1/models", "/page//metrics", "/page/"])
def test_the_open_folder_holds_the_page_only(app: FastAPI, service: Service, path: str) -> None:
    assert ask(app, service, "GET", path) == 404
    assert ask(app, service, "POST", path) in (404, 405)
