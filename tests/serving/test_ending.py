"""The end of a server: after draining, at once, or by force."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fastgen
from fastgen.models.checkpoint import hub
from fastgen.serving.clients.deployments import this_deployment
from fastgen.serving.http.server import FLUSH_S
from fastgen.serving.options import ServeOptions
from fastgen.serving.run import Endings, _address, announcement, stop_all
from tests.serving.http_client import RawClient, get
from tests.serving.parts import Parts
from tests.serving.server_process import ServerProcess, is_running, served
from tests.serving.storm import children

WAIT_S = 120.0
BODY = {"model": "tiny-llama", "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "stream": True}


async def begin(server: ServerProcess, num_tokens: int) -> RawClient:
    """Returns a stream that has begun."""
    client = await RawClient.connect(server.address)
    client.send(json.dumps(BODY | {"max_tokens": num_tokens}).encode())
    await client.head()
    return client


async def rest(client: RawClient) -> bytes:
    """Returns everything that comes until the server closes the connection."""
    async with asyncio.timeout(WAIT_S):
        return await client.reader.read()


def text_of(stream: bytes) -> str:
    """Returns the text of the events of a stream."""
    events = [line.removeprefix(b"data: ") for line in stream.splitlines() if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_a_server_that_is_told_to_end_lets_requests_finish_and_takes_no_more() -> None:
    num_tokens = 800

    async def run(server: ServerProcess) -> bytes:
        streams = [await begin(server, num_tokens) for _ in range(4)]
        server.process.send_signal(signal.SIGTERM)
        while (await get(server.address, "/ready"))[0] == 200:
            await asyncio.sleep(0.001)
        assert (await get(server.address, "/ready")) == (503, b"draining")
        assert (await get(server.address, "/health"))[0] == 200
        late = await RawClient.connect(server.address)
        late.send(json.dumps(BODY).encode())
        status, headers = await late.head()
        assert (status, headers["retry-after"].isdecimal()) == (503, True)
        answers = [await rest(stream) for stream in streams]
        assert len(set(map(text_of, answers))) == 1
        return answers[0]

    with served("tiny-llama", "--drain-timeout", "100") as server:
        answer = asyncio.run(run(server))
        assert server.process.wait(WAIT_S) == 0
    assert b"data: [DONE]" in answer
    with fastgen.load("tiny-llama") as llm:
        expected = llm.generate("Once upon a time", max_new_tokens=num_tokens, temperature=0, ignore_eos=True)
    assert text_of(answer) == expected.text


@pytest.mark.slow
def test_streams_that_take_too_long_end_with_an_error() -> None:
    async def run(server: ServerProcess) -> list[bytes]:
        streams = [await begin(server, 2000) for _ in range(8)]
        server.process.send_signal(signal.SIGTERM)
        return [await rest(stream) for stream in streams]

    with served("tiny-llama", "--drain-timeout", "0.01") as server:
        answers = asyncio.run(run(server))
        assert server.process.wait(WAIT_S) == 0
    for answer in answers:
        assert b"event: error\n" in answer
        assert b"the server ends" in answer
        assert b"[DONE]" not in answer
        assert answer.endswith(b"0\r\n\r\n"), "and the response itself is whole"


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once() -> None:
    async def run(server: ServerProcess) -> None:
        streams = [await begin(server, 2000) for _ in range(8)]
        server.process.send_signal(signal.SIGTERM)
        while (await get(server.address, "/ready"))[0] == 200:
            await asyncio.sleep(0.001)
        server.process.send_signal(signal.SIGINT)
        began_s = time.monotonic()
        await asyncio.to_thread(server.process.wait, WAIT_S)
        assert time.monotonic() - began_s < 60, "which is less than the time to drain"
        for stream in streams:
            stream.leave()

    with served("tiny-llama", "--drain-timeout", "600") as server:
        engines = children(server.process.pid)
        asyncio.run(run(server))
    assert not any(Path(f"/proc/{engine}").exists() for engine in engines)


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_engine_behind() -> None:
    with served("tiny-llama") as server:
        (engine,) = children(server.process.pid)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(WAIT_S)
        end_s = time.monotonic() + WAIT_S
        while is_running(engine):
            assert time.monotonic() < end_s, "the engine runs on without its server"
            time.sleep(0.01)


@pytest.mark.slow
def test_a_server_whose_engine_cannot_start_again_ends_with_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(hub.locate("tiny-llama"), model)
    with served(str(model)) as server:
        (model / "config.json").unlink()
        os.kill(children(server.process.pid)[0], signal.SIGKILL)
        assert server.process.wait(WAIT_S) != 0
    printed = capfd.readouterr().err
    assert "3 times in a row" in printed
    assert "config.json" in printed


class Stuck:
    """A service and a gRPC server that only end at once, and an HTTP server that ends when it is forced to."""

    def __init__(self, name: str, stuck: str, calls: list[tuple[str, float]], waits: asyncio.Event):
        self._name, self._is_stuck, self._calls, self._waits = name, name == stuck, calls, waits

    async def stop(self, timeout_s: float) -> None:
        self._calls.append((self._name, timeout_s))
        if self._is_stuck and timeout_s:
            self._waits.set()
            await asyncio.Event().wait()


@pytest.mark.parametrize("stuck", ["engine", "gRPC", "HTTP"])
def test_the_second_signal_does_not_wait_for_what_is_being_stopped(stuck: str) -> None:
    async def run() -> list[tuple[str, float]]:
        calls: list[tuple[str, float]] = []
        waits, endings, is_aborted = asyncio.Event(), Endings(), asyncio.Event()
        connection = SimpleNamespace(abort=is_aborted.set)
        http: Any = SimpleNamespace(
            should_exit=False, server_state=SimpleNamespace(connections={0: connection}.values())
        )

        async def serve() -> None:
            while not http.should_exit:
                await asyncio.sleep(0.001)
            if stuck == "HTTP":
                waits.set()
                await is_aborted.wait()

        async def second() -> None:
            await waits.wait()
            os.kill(os.getpid(), signal.SIGINT)

        os.kill(os.getpid(), signal.SIGTERM)
        await endings.first.wait()
        parts: list[Any] = [Stuck(name, stuck, calls, waits) for name in ("engine", "gRPC")]
        async with asyncio.timeout(WAIT_S):
            serving = asyncio.create_task(serve())
            await asyncio.gather(stop_all(*parts, http, serving, endings), second())
        return calls

    calls = asyncio.run(run())
    by_force = [name for name, timeout_s in calls if timeout_s == 0.0]
    assert by_force[:1] == ([] if stuck == "HTTP" else [stuck])
    assert ("engine", FLUSH_S) in calls


def test_a_serving_process_ends_without_waiting_for_its_threads() -> None:
    code = """
import atexit, threading
from fastgen.serving.process_end import end_process
atexit.register(print, "registered", flush=True)
threading.Thread(target=threading.Event().wait).start()
end_process()
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "registered\n"


def test_a_server_says_where_it_is_and_how_to_try_it() -> None:
    both = this_deployment(
        name="stories",
        model="tiny-llama",
        address="http://127.0.0.1:1",
        grpc_address="127.0.0.1:2",
        certificate=None,
        token="secret",
    )
    *where, how = announcement(both, needs_key=True).splitlines()
    assert where == ["fastgen: stories is served at http://127.0.0.1:1", "fastgen: and by gRPC at 127.0.0.1:2"]
    assert how.startswith("fastgen: try  curl http://127.0.0.1:1/v1/completions ")
    assert "-H 'authorization: Bearer KEY'" in how
    where_, how = announcement(replace(both, grpc_address=None), needs_key=False).splitlines()
    assert where_ == where[0]
    assert "authorization" not in how


@pytest.mark.parametrize(
    ("name", "is_encrypted", "address"),
    [
        (("127.0.0.1", 80), False, "http://127.0.0.1:80"),
        (("::1", 80, 0, 0), False, "http://[::1]:80"),
        (("::1", 80, 0, 0), True, "https://[::1]:80"),
    ],
)
def test_the_address_of_a_server_is_a_url(name: tuple[Any, ...], is_encrypted: bool, address: str) -> None:
    file = Path("a.pem") if is_encrypted else None
    listener: Any = SimpleNamespace(getsockname=lambda: name)
    assert _address(ServeOptions(tls_cert=file, tls_key=file), listener) == address


def test_the_command_to_try_is_whole() -> None:
    one = this_deployment(
        name="stories",
        model="tiny-llama",
        address="https://127.0.0.1:1",
        grpc_address=None,
        certificate=Path("a.pem"),
        token="secret",
    )
    assert one.certificate == str(Path("a.pem").absolute())
    for needs_key, key in ((True, " -H 'authorization: Bearer KEY'"), (False, "")):
        assert announcement(one, needs_key=needs_key).splitlines()[1] == (
            "fastgen: try  curl https://127.0.0.1:1/v1/completions -H 'content-type: application/json'"
            f"{key} -d "
            """'{"model": "stories", "prompt": "Once upon a time", "max_tokens": 32}'"""
        )
    assert '"prompt": [1, 2, 3]' in announcement(one, needs_key=False, takes_text=False)


def test_connections_that_are_left_at_the_second_signal_are_cut_and_none_is_waited_for() -> None:
    async def run() -> None:
        endings, aborted = Endings(), list[str]()
        connections = [SimpleNamespace(abort=lambda: aborted.append("cut"))]
        http: Any = SimpleNamespace(
            should_exit=False, force_exit=False, server_state=SimpleNamespace(connections=connections)
        )
        calls: list[tuple[str, float]] = []
        parts: list[Any] = [Stuck(name, "", calls, asyncio.Event()) for name in ("engine", "gRPC")]
        endings.second.set()

        async def serve() -> None:
            while not http.force_exit:
                await asyncio.sleep(0.001)

        async with asyncio.timeout(WAIT_S):
            await stop_all(*parts, http, asyncio.create_task(serve()), endings)
        assert (http.should_exit, http.force_exit, aborted) == (True, True, ["cut"])
        await stop_all(*parts, http, None, endings)  # HTTP has not begun

    asyncio.run(run())


ENDED = ["the engine drains 7.5", "the engine stops 5", "gRPC stops 5", "closes 81"]


def test_a_server_with_an_engine_of_its_own_listens_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    parts.serve(grpc_port=82)
    assert parts.calls == [
        *("has 127.0.0.1:81", "gRPC", "listens at 81", "gRPC starts"),
        *("the engine starts", "ready at http://127.0.0.1:81", *ENDED),
    ]
    assert parts.service_given["engine_timeout_s"] == 8.5
    assert parts.service_given["make_engine"] is None


@pytest.mark.parametrize("grpc_port", [None, 82])
def test_a_server_that_may_replace_another_listens_once_it_can_answer_and_leaves_before_it_ends(
    grpc_port: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch)
    parts.serve(make_engine=lambda watcher: None, grpc_port=grpc_port)
    assert parts.calls == [
        *("shares 127.0.0.1:81", *["shares 127.0.0.1:82", "closes 82"] * (grpc_port is not None)),
        *("gRPC shares its port", "the engine starts", "listens at 81", "gRPC starts"),
        *("ready at http://127.0.0.1:81", "HTTP leaves", "gRPC leaves 12.5", *ENDED),
    ]
