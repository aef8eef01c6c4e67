"""Replicas that are killed or stopped at random under a hundred requests: none is lost that had not begun to stream."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator

import httpx2
import pytest

import fastgen
from tests.serving.replicas.test_served_replicas import BODY, ENGINE, REPLICA, WAIT_S, text_of, until_ready
from tests.serving.server_process import ServerProcess, served
from tests.serving.started import started_by

NUM_KILLS, NUM_REQUESTS, NUM_TOKENS = 10, 100, 120


@pytest.fixture(scope="module")
def replicas() -> Iterator[ServerProcess]:
    with served("tiny-llama", "--replicas", "2") as process:
        until_ready(process, 2)
        yield process


async def stream(client: httpx2.AsyncClient, body: dict[str, object]) -> tuple[str, str | None]:
    """Returns the text that came, and the error at its end."""
    text = ""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return text, event["error"]["message"]
            text += event["choices"][0]["text"] if event["choices"] else ""
    return text, None


@pytest.mark.slow
@pytest.mark.parametrize("kill", range(NUM_KILLS))
def test_no_request_is_lost_that_had_not_begun_to_stream(replicas: ServerProcess, llm: fastgen.LLM, kill: int) -> None:
    draw = random.Random(kill)
    until_ready(replicas, 2)
    name, number = draw.choice([(REPLICA, signal.SIGKILL), (ENGINE, signal.SIGKILL), (ENGINE, signal.SIGSEGV)])
    victim = draw.choice(started_by(replicas.process.pid, name))
    prompts = [f"Once upon a time there were {number} cats" for number in range(NUM_REQUESTS)]
    body = BODY | {"max_tokens": NUM_TOKENS, "ignore_eos": True}

    async def run() -> tuple[list[httpx2.Response], list[tuple[str, str | None]]]:
        limits = httpx2.Limits(max_connections=NUM_REQUESTS)
        async with httpx2.AsyncClient(base_url=replicas.address, timeout=WAIT_S, limits=limits) as client:
            whole = [
                asyncio.create_task(client.post("/v1/completions", json=body | {"prompt": prompt}))
                for prompt in prompts[::2]
            ]
            streams = [asyncio.create_task(stream(client, body | {"prompt": prompt})) for prompt in prompts[1::2]]
            await asyncio.sleep(draw.uniform(0.05, 2.0))
            os.kill(victim, number)
            return await asyncio.gather(*whole), await asyncio.gather(*streams)

    whole, streams = asyncio.run(run())
    sampling = fastgen.SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [output.text for output in llm.generate(prompts, sampling)]
    assert [text_of(each) for each in whole] == expected[::2]
    for (text, error), wanted in zip(streams, expected[1::2], strict=True):
        assert wanted.startswith(text)
        if error is None:
            assert text == wanted
        else:
            assert text, f"a stream that had not begun was not answered: {error}"
            assert "send it again" in error


@pytest.mark.slow
@pytest.mark.parametrize("by_client", [False, True])
def test_a_replica_that_is_stopped_is_killed_at_the_end_of_the_server(
    by_client: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with served("tiny-llama", "--replicas", "1") as process:
        (replica,) = started_by(process.process.pid, REPLICA)
        stopped = [*started_by(replica, ENGINE), replica]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        if by_client:
            fastgen.client(process.address).terminate_server()
        else:
            process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(WAIT_S) == 0
        assert not [pid for pid in stopped if os.path.exists(f"/proc/{pid}")]
    errors = capfd.readouterr().err
    assert "1 processes of replicas do not end, and are killed" in errors
    assert "cannot be deleted" not in errors, "Ray Serve waits for a minute"


@pytest.mark.slow
@pytest.mark.parametrize("with_engine", [False, True])
def test_a_replica_that_hangs_is_replaced_and_its_requests_are_answered(
    replicas: ServerProcess, llm: fastgen.LLM, with_engine: bool
) -> None:
    until_ready(replicas, 2)
    hanging = started_by(replicas.process.pid, REPLICA)[0]
    for pid in (*(started_by(hanging, ENGINE) if with_engine else ()), hanging):
        os.kill(pid, signal.SIGSTOP)
    prompts = [f"The dog had {number} bones" for number in range(12)]

    async def run() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(base_url=replicas.address, timeout=WAIT_S) as client:
            return await asyncio.gather(
                *(client.post("/v1/completions", json=BODY | {"prompt": prompt}) for prompt in prompts)
            )

    got = asyncio.run(run())
    sampling = fastgen.SamplingParams(temperature=0.0, max_new_tokens=24)
    assert [text_of(each) for each in got] == [output.text for output in llm.generate(prompts, sampling)]
    deadline_s = time.monotonic() + WAIT_S
    while hanging in started_by(replicas.process.pid, REPLICA):
        assert time.monotonic() < deadline_s, "the replica that hangs was not replaced"
        time.sleep(0.5)
    until_ready(replicas, 2)
