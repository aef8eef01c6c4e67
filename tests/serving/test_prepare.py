"""FastAPI's checks and its description of paths are built before a server is ready."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx2
import pydantic
import pytest

from fastgen.serving.http.app import create_app, prepare
from fastgen.serving.options import ServeOptions
from fastgen.serving.service import Service
from tests.serving.server_process import ServerProcess, served

PATHS = ("/recording", "/generate", "/v1/chat/completions", "/v1/responses", "/invocations", "/live", "/no-such-path")


async def num_built(monkeypatch: pytest.MonkeyPatch, *, is_prepared: bool) -> int:
    """Returns how many checks of values are built by the first requests of all kinds."""
    app = create_app(Service({"model": "tiny-llama"}), ServeOptions())
    if is_prepared:
        await prepare(app)
    num_built, build = 0, pydantic.TypeAdapter.__init__

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal num_built
        num_built += 1
        build(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pydantic.TypeAdapter, "__init__", counted)
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in PATHS:
                for method in ("GET", "POST"):
                    await client.request(method, path, json={})
    return num_built


def test_no_request_builds_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(num_built(monkeypatch, is_prepared=False)) > 0
    assert asyncio.run(num_built(monkeypatch, is_prepared=True)) == 0


def cpu_s(pid: int) -> float:
    """Returns the processor time of a process, without the processes below it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_server_does_not_load_torch(server: ServerProcess) -> None:
    """Torch is the engine's: importing it would take the server a second, and 200 MiB."""
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


@pytest.mark.slow
def test_a_server_is_prepared_when_it_is_ready() -> None:
    """Without that, the first answer takes 0.3 s of processor time."""
    with served("tiny-llama") as server:
        before_s = cpu_s(server.process.pid)
        assert httpx2.get(f"{server.address}/openapi.json").status_code == 200
        took_s = cpu_s(server.process.pid) - before_s
        print(f"the first answer took {took_s:.2f} s of processor time")
        assert took_s < 0.15
