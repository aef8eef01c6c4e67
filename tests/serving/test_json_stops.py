"""The largest JSON bodies stop the server's loop no longer than a fast parser needs for one of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fastgen.serving.admission.json_limits import FREE_BYTES, check_json_sizes
from fastgen.serving.garbage import collected_by_hand
from fastgen.serving.http import json_route
from fastgen.serving.http.app import create_app
from fastgen.serving.http.generate import generate_routes
from fastgen.serving.http.guard import Guard
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions
from fastgen.serving.service import Service
from tests.fast import cases
from tests.serving.scripted import ScriptedService, application, scripted_codec

NUM_TRIES = 3
# In one callback the loop parses, or validates what was parsed. Before, it did both, by a parser that takes twice as
# long: 4 times as much.
MOST_TIMES = 2.0
# Just below the limits.
BODIES = {
    "token ids": b'{"model":"scripted","prompt":[' + b",".join(b"%d" % (i % 50_000) for i in range(1 << 20)) + b"]}",
    "too many ids": b'{"model":"scripted","prompt":[' + b"50000," * ((1 << 20) + (1 << 17) - 2) + b"1]}",
    "names": b'{"model":"scripted",' + b",".join(b'"%030d":1' % i for i in range(163_000)) + b"}",
}
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate", "/invocations")
ONCE = [*zip(PATHS, ("token ids", "names", "too many ids", "names"), strict=True)]


async def post(app: Any, path: str, body: bytes) -> int:
    """Returns the status of the answer."""
    found: list[dict[str, Any]] = []
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return unread.pop() if unread else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        found.append(message)

    fields = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"scheme": "http", "http_version": "1.1", "root_path": "", "client": None, "server": ("localhost", 80)}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in fields.items()]
    await app(scope, receive, send)
    status: int = found[0]["status"]
    return status


def longest_stop_s(app: Any, path: str, body: bytes) -> float:
    """Returns the most processor time that the loop's thread takes in one piece for a request that is refused."""

    async def run() -> float:
        longest = 0.0

        async def beat() -> None:
            nonlocal longest
            last_s = time.thread_time()
            while True:
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - last_s)
                last_s = time.thread_time()

        beating = asyncio.create_task(beat())
        await asyncio.sleep(0)
        assert await post(app, path, body) == 400
        await asyncio.sleep(0)
        beating.cancel()
        return longest

    return asyncio.run(run())


def time_of(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


@pytest.fixture(scope="module")
def app() -> Any:
    codec = scripted_codec()
    codec.max_tokens = 4096
    service: Any = ScriptedService(codec, lambda prompt_ids, sampling: ([5], "length"))
    app = application(service)
    app.include_router(generate_routes(service))
    return Guard(app, ServeOptions(), ServerMetrics(lambda: True), "127.0.0.1")


@pytest.mark.parametrize(("path", "kind"), cases(itertools.product(PATHS, BODIES), fast=ONCE))
def test_the_largest_bodies_stop_the_loop_no_longer_than_their_parser(app: Any, path: str, kind: str) -> None:
    body = BODIES[kind]
    assert len(body) > FREE_BYTES
    check_json_sizes([body])
    stops_s, parses_s = [], []
    with collected_by_hand():  # as in a server
        for _ in range(NUM_TRIES):
            stops_s.append(longest_stop_s(app, path, body))
            parses_s.append(time_of(lambda: msgspec.json.decode(body)))
    print(f"{kind} to {path}: the loop stops for {min(stops_s):.3f} s, parsing takes {min(parses_s):.3f} s")
    assert min(stops_s) < MOST_TIMES * min(parses_s)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_the_largest_arguments_of_calls_stop_the_loop_no_longer_than_their_parser(app: Any, path: str) -> None:
    text = BODIES["names"].decode().replace('"model":"scripted",', "")
    asked: dict[str, Any]
    if path == "/v1/responses":
        asked = {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": text}]}
    else:
        call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": text}}
        asked = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    body = msgspec.json.encode({"model": "scripted", "unknown": 1} | asked)
    stops_s, parses_s = [], []
    with collected_by_hand():
        for _ in range(NUM_TRIES):
            stops_s.append(longest_stop_s(app, path, body))
            parses_s.append(time_of(lambda: msgspec.json.decode(text)))
    print(f"arguments to {path}: the loop stops for {min(stops_s):.3f} s, parsing takes {min(parses_s):.3f} s")
    assert min(stops_s) < MOST_TIMES * min(parses_s)


def test_every_path_that_reads_json_parses_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(json_route, "parse_json", lambda text: parsed.append(text) or {})
    app = create_app(Service({"model": "tiny-llama"}), ServeOptions())
    paths = [path for path, item in app.openapi()["paths"].items() if "requestBody" in item.get("post", {})]
    assert {"/v1/completions", "/generate", "/check", "/tokenize", "/v1/responses"} <= set(paths)
    for path in paths:
        assert asyncio.run(post(app, path, path.encode())) in (400, 503)
    assert parsed == [path.encode() for path in paths]
