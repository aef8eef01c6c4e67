"""The ingress and the process of its server: what each end of the process means."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.errors import FastgenError
from fastgen.serving.replicas import ingress as ingress_module
from fastgen.serving.replicas.ingress import Ingress
from fastgen.serving.replicas.server_process import SIGN_OF_LIFE, TERMINATED, ServerProcess

WAIT_S = 60.0
DEPLOYMENT = {
    "name": "m",
    "model": "m",
    "address": "http://127.0.0.1:1",
    "grpc_address": None,
    "certificate": None,
    "host": "here",
    "pid": 1,
    "birth": "",
    "token": "t",
    "log": None,
}
# A server that is ready and then does what the request says; it ends with status 0 at SIGTERM, as a real one does, and
# gives another sign of life at SIGUSR1.
PLAYED = f"""
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
pipe, request = int(sys.argv[1]), json.load(sys.stdin)
signal.signal(signal.SIGUSR1, lambda *_: os.write(pipe, {SIGN_OF_LIFE!r}))
os.write(pipe, json.dumps(request["outcome"]).encode() + b"\\n")
os.write(pipe, {SIGN_OF_LIFE!r})
os.write(pipe, bytes.fromhex(request["signs"]))
if request["status"] is not None:
    os._exit(request["status"])
while True:
    signal.pause()
"""


def played(outcome: Any, signs: bytes = b"", status: int | None = None) -> ServerProcess:
    """Returns a process that reports ``outcome``, writes ``signs``, and ends with ``status`` if there is one."""
    request = {"outcome": outcome, "signs": signs.hex(), "status": status}
    return ServerProcess(request, [sys.executable, "-c", PLAYED])


class PlayedIngress(Ingress):
    """An ingress without Ray."""

    def __init__(self, server: ServerProcess):
        self._app, self._is_ending, self._server = "fastgen", False, server

    def __del__(self) -> None:  # type: ignore[override]
        pass


def check(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(WAIT_S):
            await test()

    asyncio.run(run())


def test_the_end_of_a_server_by_a_client_differs_from_all_others() -> None:
    error = json.dumps({"error": "The Text of an error: T. \x04"}).encode() + b"\n"

    async def test() -> None:
        for signs, status, failure in (
            (TERMINATED, 0, None),
            (TERMINATED + SIGN_OF_LIFE, 0, None),
            (SIGN_OF_LIFE, 0, "the server's process ended with status 0"),
            (error, 1, "the server's process ended with status 1"),
        ):
            server = played({"deployment": DEPLOYMENT}, signs, status)
            assert (await server.ready()).token == "t"
            assert await server.failure() == failure

    check(test)


def test_a_server_that_cannot_start_says_why() -> None:
    async def test() -> None:
        with pytest.raises(FastgenError, match="no such model"):
            await played({"error": "no such model"}, status=1).ready()
        with pytest.raises(FastgenError, match="the server's process ended with status 7 before it was ready"):
            await played({}, status=7).ready()

    check(test)


@pytest.mark.parametrize("fails", [False, True], ids=["deleted", "cannot be deleted"])
def test_the_application_is_deleted_only_where_a_client_has_ended_the_server(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    calls: list[str] = []

    def delete(name: str, _blocking: bool) -> None:
        calls.append(f"delete {name}{' and wait' * _blocking}")
        if fails:
            raise RuntimeError("the controller is gone")

    monkeypatch.setattr(ingress_module.serve, "delete", delete)
    monkeypatch.setattr(ingress_module.os, "_exit", lambda status: calls.append(f"exit {status}"))

    async def test() -> None:
        for signs, expected in ((TERMINATED, ["delete fastgen"] + ["exit 1"] * fails), (b"", ["exit 1"])):
            ingress = PlayedIngress(played({"deployment": DEPLOYMENT}, signs, 0))
            await ingress._server.ready()
            await ingress._watch()
            assert calls == expected
            calls.clear()
            if signs:
                await ingress.check_health()  # Ray Serve is to start no other one

    check(test)


def test_a_server_that_is_ended_with_its_actor_deletes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ingress_module.serve, "delete", lambda *_, **__: calls.append("delete"))
    monkeypatch.setattr(ingress_module.os, "_exit", lambda status: calls.append("exit"))

    async def test() -> None:
        ingress = PlayedIngress(played({"deployment": DEPLOYMENT}))
        await ingress._server.ready()
        watching = asyncio.create_task(ingress._watch())
        await ingress.check_health()
        await ingress.end()
        await watching
        await ingress.check_health()
        assert calls == []

    check(test)


def test_an_actor_without_its_server_is_not_healthy() -> None:
    async def test() -> None:
        server = played({"deployment": DEPLOYMENT})
        ingress = PlayedIngress(server)
        await server.ready()
        await ingress.check_health()
        os.kill(server._process.pid, signal.SIGTERM)
        await server.ended
        with pytest.raises(FastgenError, match="the server's process has ended"):
            await ingress.check_health()

    check(test)


def test_a_server_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        ingress = PlayedIngress(played({"deployment": DEPLOYMENT}))
        await ingress._server.ready()
        monkeypatch.setattr(ingress_module, "_SILENCE_S", 0.0)
        with pytest.raises(FastgenError, match="gave no sign of life"):
            await ingress.check_health()
        assert await ingress._server.failure() == "the server's process was ended by SIGKILL"

    check(test)


def test_a_sign_of_life_ends_a_silence() -> None:
    async def test() -> None:
        server = played({"deployment": DEPLOYMENT})
        await server.ready()
        server._heard_s -= 1000.0
        os.kill(server._process.pid, signal.SIGUSR1)
        while server.silent_s > 500.0:
            await asyncio.sleep(0.005)
        await PlayedIngress(server).check_health()
        await server.end()

    check(test)


@pytest.mark.parametrize("how", ["with its actor", "by itself"])
def test_an_ingress_tells_its_server_what_to_serve_and_clients_where_it_is(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[dict[str, Any]] = []
    exits: list[int] = []

    def start(request: dict[str, Any]) -> ServerProcess:
        requests.append(request)
        return played({"deployment": DEPLOYMENT})

    context, runtime = SimpleNamespace(app_name="fastgen"), SimpleNamespace(gcs_address="10.0.0.1:6379")
    monkeypatch.setattr(ingress_module, "ServerProcess", start)
    monkeypatch.setattr(ingress_module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(ingress_module.ray, "get_runtime_context", lambda: runtime)
    monkeypatch.setattr(ingress_module.os, "_exit", exits.append)

    async def test() -> None:
        ingress = PlayedIngress.__new__(PlayedIngress)
        replicas = SimpleNamespace(deployment_name="Replicas")
        beginning: Any = Ingress.__init__(ingress, replicas, {"model": "m"}, ["ab"])  # type: ignore[arg-type]
        await beginning
        assert requests == [
            {
                "given": {"model": "m"},
                "key_digests": ["ab"],
                "app": "fastgen",
                "deployment": "Replicas",
                "cluster": "10.0.0.1:6379",
            }
        ]
        assert await ingress.deployment() == DEPLOYMENT
        await ingress.check_health()
        if how == "by itself":
            os.kill(ingress._server._process.pid, signal.SIGTERM)
        else:
            ending: Any = Ingress.__del__(ingress)
            await ending
            assert ingress._server.ended.done()
        await ingress._watching
        assert exits == [1] * (how == "by itself")

    check(test)
