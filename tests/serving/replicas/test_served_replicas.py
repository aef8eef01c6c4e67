"""Two replicas on a real cluster of Ray, started by the command: answers, faults, and what is told of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

import fastgen
from fastgen.serving.clients.deployments import deployments
from tests.serving.server_process import ServerProcess, served
from tests.serving.started import started_by

pytestmark = pytest.mark.slow
WAIT_S = 120.0
REPLICA, INGRESS = "ServeReplica:fastgen:Replicas", "fastgen.serving.replicas.ingress_process"
ENGINE = "fastgen.serving.engine.process"
BODY = {"model": "tiny-llama", "temperature": 0.0, "max_tokens": 24}
PROMPTS = [f"Once upon a time there was a {animal}" for animal in ("cat", "dog", "bird", "fish", "bear", "frog")]


@pytest.fixture(scope="module")
def replicas() -> Iterator[ServerProcess]:
    with served("tiny-llama", "--replicas", "2") as process:
        until_ready(process, 2)
        yield process


def until_ready(server: ServerProcess, num_replicas: int) -> None:
    """Waits until so many replicas are attached."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        try:
            is_ready = httpx2.get(f"{server.address}/ready", timeout=WAIT_S).status_code == 200
            text = httpx2.get(f"{server.address}/metrics", timeout=WAIT_S).text if is_ready else ""
        except httpx2.TransportError:  # a new ingress is on its way
            text = ""
        if text.count("fastgen_replica_kv_blocks{") == num_replicas:
            return
        time.sleep(0.1)
    raise AssertionError(f"no {num_replicas} replicas after {WAIT_S} s")


def metric(server: ServerProcess, name: str) -> float:
    text = httpx2.get(f"{server.address}/metrics", timeout=WAIT_S).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))


async def complete(client: httpx2.AsyncClient, prompt: str, **more: object) -> httpx2.Response:
    return await client.post("/v1/completions", json=BODY | {"prompt": prompt} | more)


async def views(client: httpx2.AsyncClient) -> list[dict[str, Any]]:
    """Returns the present state of each replica."""
    replicas: list[dict[str, Any]] = (await client.get("/live")).json()["replicas"]
    return replicas


def text_of(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_answers_are_those_of_one_engine_and_are_counted_over_all_replicas(
    replicas: ServerProcess, llm: fastgen.LLM
) -> None:
    before = metric(replicas, "fastgen_requests_total")

    async def run() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(base_url=replicas.address, timeout=WAIT_S) as client:
            return await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS * 2))

    got = asyncio.run(run())
    sampling = fastgen.SamplingParams(temperature=0.0, max_new_tokens=24)
    expected = [output.text for output in llm.generate(PROMPTS, sampling)]
    assert [text_of(each) for each in got] == expected * 2
    assert metric(replicas, "fastgen_requests_total") - before == 12
    assert metric(replicas, "fastgen_replica_kv_blocks") == metric(replicas, "fastgen_kv_blocks")


def test_a_request_is_explained_whatever_replicas_answered_its_prompts(replicas: ServerProcess) -> None:
    body = BODY | {"prompt": PROMPTS, "max_tokens": 7, "ignore_eos": True}
    answered = httpx2.post(f"{replicas.address}/v1/completions", json=body, timeout=WAIT_S)
    command = [sys.executable, "-m", "fastgen", "why", replicas.address, answered.json()["id"], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [json.loads(line)["new_tokens"] for line in done.stdout.splitlines()] == [7] * len(PROMPTS)
    found = httpx2.get(f"{replicas.address}/recording", params={"request": answered.json()["id"]}, timeout=WAIT_S)
    assert len(found.headers["x-request-replicas"].split()) == 2
    assert len(found.headers["x-request-numbers"].split()) < len(PROMPTS)


def test_a_killed_replica_loses_no_request_that_had_not_begun_and_returns(
    replicas: ServerProcess, llm: fastgen.LLM
) -> None:
    until_ready(replicas, 2)
    killed = started_by(replicas.process.pid, REPLICA)[0]
    prompts = [f"{PROMPTS[number % 6]} {number}" for number in range(24)]

    async def run() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(base_url=replicas.address, timeout=WAIT_S) as client:
            waiting = [
                asyncio.create_task(complete(client, prompt, max_tokens=400, ignore_eos=True)) for prompt in prompts
            ]
            while len([each for each in await views(client) if each["outstanding_tokens"]]) < 2:
                assert not all(each.done() for each in waiting), "the replicas were not busy at the same time"
            stopped = [*started_by(killed, ENGINE), killed]
            assert len(stopped) == 2, "a replica has one process of the engine"
            for pid in stopped:  # what is in it stays in it, which is seen once it is silent
                os.kill(pid, signal.SIGSTOP)
            while not (silent := [each for each in await views(client) if each["state"] == "silent"]):
                await asyncio.sleep(0.1)
            assert silent[0]["outstanding_tokens"], "no request was in the replica that is killed"
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
            return await asyncio.gather(*waiting)

    got = asyncio.run(run())
    sampling = fastgen.SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)
    assert [text_of(each) for each in got] == [output.text for output in llm.generate(prompts, sampling)]
    until_ready(replicas, 2)
    assert killed not in started_by(replicas.process.pid, REPLICA)


def test_a_stream_that_had_begun_ends_with_an_error_event(replicas: ServerProcess) -> None:
    until_ready(replicas, 2)
    with httpx2.stream(
        "POST",
        f"{replicas.address}/v1/completions",
        json=BODY | {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True},
        timeout=WAIT_S,
    ) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: ")
        for pid in started_by(replicas.process.pid, REPLICA):
            os.kill(pid, signal.SIGKILL)
        rest = list(lines)
    assert "error" in json.loads(rest[-1].removeprefix("data: ")), rest[-3:]
    assert "send it again" in rest[-1]
    until_ready(replicas, 2)


def test_the_death_of_the_ingress_is_survived(replicas: ServerProcess) -> None:
    (before,) = started_by(replicas.process.pid, INGRESS)
    os.kill(before, signal.SIGKILL)
    until_ready(replicas, 2)
    assert started_by(replicas.process.pid, INGRESS) != [before]
    answered = httpx2.post(f"{replicas.address}/v1/completions", json=BODY | {"prompt": "Once"}, timeout=WAIT_S)
    assert text_of(answered)
    (listed,) = [one for one in deployments() if one.address == replicas.address]
    assert listed.pid in started_by(replicas.process.pid, INGRESS)


def test_a_client_ends_the_server_with_its_replicas_and_its_cluster(replicas: ServerProcess) -> None:
    fastgen.client(replicas.address).terminate_server()
    assert replicas.process.wait(WAIT_S) == 0
