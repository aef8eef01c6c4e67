"""``GET /recording`` and ``fastgen why SERVER REQUEST``: the flight recorder of a served engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner, Result

from fastgen.cli import app
from fastgen.runtime.flight.recording_file import parse_recording
from fastgen.runtime.flight.replay import first_difference
from fastgen.runtime.simulated import SimulatedServer
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.clients.http import HttpTransport
from fastgen.serving.engine import recent_requests, recordings
from fastgen.serving.engine.engine import ReplicaView
from fastgen.serving.engine.messages import RecordingReply
from fastgen.serving.engine.recent_requests import RecentRequests
from fastgen.serving.engine.recordings import Recordings
from fastgen.serving.http.recording import recording_routes
from fastgen.serving.http.records import NUMBERS_HEADER, REPLICAS_HEADER
from tests.serving.server_process import ServerProcess, served

PROMPT = "Once upon a time"


def why(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``fastgen why`` as a person does, in a process of its own."""
    command = [sys.executable, "-m", "fastgen", "why", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def why_here(*arguments: str) -> Result:
    """Runs ``fastgen why`` in this process, which has imported it."""
    return CliRunner().invoke(app, ["why", *arguments])


def test_a_request_is_explained_by_the_id_of_its_answer(server: ServerProcess, deployment: Deployment) -> None:
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    two: Any = client.completions.create(model="tiny-llama", prompt=[PROMPT, "The fox"], max_tokens=7, temperature=0)
    chat: Any = client.chat.completions.create(
        model="tiny-llama", messages=[{"role": "user", "content": PROMPT}], max_tokens=5,
        extra_headers={"x-request-id": "my-own"}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    answer = client.responses.create(
        model="tiny-llama", input=PROMPT, max_output_tokens=4, extra_body={"ignore_eos": True}
    )
    done = why(server.address, two.id, "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["new_tokens"] for line in done.stdout.splitlines()] == [7, 7]
    for shown in (why_here(deployment.name, "my-own"), why_here(server.address, chat.id)):
        assert "5 new tokens" in shown.output
    assert "4 new tokens" in why_here(server.address, answer.id).output
    unknown = why(server.address, "chatcmpl-nobody")
    assert (unknown.returncode, "no request with the id 'chatcmpl-nobody'" in unknown.stderr) == (1, True)
    recording = httpx2.get(f"{server.address}/recording")
    found = parse_recording(recording.content, "the server")
    assert found.header.model == "tiny-llama"
    assert first_difference(found) is None
    assert PROMPT not in recording.text


@pytest.mark.slow
def test_requests_that_overtake_one_whose_format_is_compiled_are_answered_and_explained(server: ServerProcess) -> None:
    """The engine numbers requests when they are submitted to it, so its numbers are not in the order of arrival."""
    slow = {"type": "regex", "pattern": "a{19000}"}
    bodies = [{"prompt": PROMPT, "max_new_tokens": 3, "response_format": slow}]
    bodies += [{"prompt": PROMPT, "max_new_tokens": 4 + number, "ignore_eos": True} for number in range(8)]

    async def answers() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(base_url=server.address, timeout=120) as client:
            sent = []
            for number, body in enumerate(bodies):
                request = client.post("/generate", json=body, headers={"x-request-id": f"overtaking-{number}"})
                sent.append(asyncio.create_task(request))
                await asyncio.sleep(0.01)
            return list(await asyncio.gather(*sent))

    assert [answer.status_code for answer in asyncio.run(answers())] == [200] * 9
    for number, num_tokens in ((0, 3), (1, 4), (8, 11)):
        facts = json.loads(why_here(server.address, f"overtaking-{number}", "--json").output)
        assert facts["new_tokens"] == num_tokens


class Replicated:
    """A service whose prompts of request "a" went to replica 1, which is gone, and to 2; the only one of "b" to 1;
    those of "c" to 2 and 3.
    """

    engine: Any

    def __init__(self) -> None:
        self.recent = RecentRequests()
        self.engine, places = self, {"a": (("1", 10), ("2", 20)), "b": (("1", 11),), "c": (("2", 21), ("3", 30))}
        self._places = {}
        for request, each in places.items():
            for replica, number in each:
                self.recent.add(request, number)
                self._places[number] = replica, number

    def replica_views(self) -> list[ReplicaView]:
        return [ReplicaView(id, "here", "ready", 0, 0, 0, 0) for id in ("2", "3")]

    def place_of(self, number: int) -> tuple[str, int]:
        return self._places[number]

    async def recording(self, replica: str | None) -> RecordingReply:
        return RecordingReply(f"of {replica}".encode(), {20: 7, 21: 8} if replica == "2" else {30: 9})


def recording(query: dict[str, str]) -> httpx2.Response:
    """Returns the answer of :class:`Replicated`."""
    service: Any = Replicated()
    app = FastAPI()
    app.include_router(recording_routes(service))

    async def ask() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://here") as client:
            return await client.get("/recording", params=query)

    return asyncio.run(ask())


def test_replicas_that_are_gone_do_not_hide_the_recordings_of_the_others() -> None:
    found = recording({"request": "a"})
    assert (found.content, found.headers[NUMBERS_HEADER], found.headers[REPLICAS_HEADER]) == (b"of 2", "7", "2")
    lost = recording({"request": "b"})
    assert (lost.status_code, "what answered 'b' is gone" in lost.text) == (404, True)


@pytest.mark.parametrize(
    ("query", "content", "numbers", "replicas"),
    [
        ({}, b"of None", None, None),
        ({"replica": "3"}, b"of 3", None, None),
        ({"request": "c"}, b"of 2", "8", "2 3"),
        ({"request": "c", "replica": "2"}, b"of 2", "8", "2 3"),
        ({"request": "c", "replica": "3"}, b"of 3", "9", "2 3"),
    ],
)
def test_the_recording_is_that_of_the_replica_that_is_named(
    query: dict[str, str], content: bytes, numbers: str | None, replicas: str | None
) -> None:
    found = recording(query)
    assert (found.status_code, found.content) == (200, content)
    assert (found.headers.get(NUMBERS_HEADER), found.headers.get(REPLICAS_HEADER)) == (numbers, replicas)


@pytest.mark.parametrize(
    ("query", "status", "why"),
    [
        ({"replica": "1"}, 404, "there is no replica '1' now"),
        ({"request": "c", "replica": "1"}, 404, "there is no replica '1' now"),
        ({"request": "x" * 256}, 404, "is among the last ones"),
        ({"request": "x" * 257}, 422, "at most 256 characters"),
        ({"replica": "x" * 257}, 422, "at most 256 characters"),
    ],
)
def test_a_recording_that_is_not_here_is_refused(query: dict[str, str], status: int, why: str) -> None:
    found = recording(query)
    assert (found.status_code, why in found.text) == (status, True)


def test_a_client_fetches_the_recording_of_each_replica_that_answered() -> None:
    class Whole(Replicated):
        recent = RecentRequests()

        def replica_views(self) -> list[ReplicaView]:
            return [ReplicaView(name, "here", "ready", 0, 0, 0, 0) for name in ("1", "2")]

        async def recording(self, replica: str | None) -> RecordingReply:
            return RecordingReply(f"of {replica}".encode(), {10: 4, 11: 5, 20: 7})

    service: Any = Whole()
    app = FastAPI()
    app.include_router(recording_routes(service))

    async def fetch(request: str) -> list[tuple[bytes, list[str]]]:
        transport = HttpTransport("http://here", None)
        await transport.close()
        transport._http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://here")
        try:
            return await transport.recordings(request)
        finally:
            await transport.close()

    async def both() -> tuple[list[tuple[bytes, list[str]]], ...]:
        return await fetch("a"), await fetch("b")

    assert asyncio.run(both()) == ([(b"of 1", ["4"]), (b"of 2", ["7"])], [(b"of 1", ["5"])])


@pytest.mark.slow  # test_open_paths asks every path for its key
def test_it_needs_the_key() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTGEN_API_KEY", "secret")
        with served("tiny-llama", "--name", "guarded") as server:
            body = {"prompt": PROMPT, "max_new_tokens": 3}
            headers = {"authorization": "Bearer secret", "x-request-id": "mine"}
            assert httpx2.post(f"{server.address}/generate", json=body, headers=headers).status_code == 200
            assert httpx2.get(f"{server.address}/recording").status_code == 401
            assert "an API key is needed" in why(server.address, "mine", FASTGEN_API_KEY="").stderr
            assert "3 new tokens" in why(server.address, "mine").stdout


def test_a_server_that_does_not_answer_is_said_in_a_line() -> None:
    done = why("http://127.0.0.1:1", "a")
    assert done.returncode == 1
    assert done.stderr.startswith("fastgen: no server answers at http://127.0.0.1:1")


def test_only_the_last_requests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_requests, "MAX_REMEMBERED", 2)
    recent = RecentRequests()
    for number, request_id in enumerate(["a", "b", "a", "c"]):
        recent.add(request_id, number)
    assert [recent.numbers(each) for each in ("a", "b", "c", "cmpl-c", "resp_a", "x-a")] == [
        [0, 2],
        [],
        [3],
        [3],
        [0, 2],
        [],
    ]
    for number in range(1000):
        recent.add("a", number)
    assert len(recent.numbers("a")) < 200


def test_ten_thousand_requests_are_remembered_and_the_last_128_prompts_of_each() -> None:
    recent = RecentRequests()
    for number in range(129):
        recent.add("first", number)
    for number in range(9_999):
        recent.add(f"{number}", number)
    assert recent.numbers("first") == [*range(1, 129)]
    recent.add("one more", 5)
    assert [recent.numbers(each) for each in ("first", "0", "one more")] == [[], [0], [5]]


@pytest.fixture
def engine_recordings() -> Recordings:
    engine = SimulatedServer(
        StepCost.linear(step_s=0.01, token_s=0.0), token_budget=64, max_num_seqs=4, num_blocks=64
    ).engine
    return Recordings(engine.recorder, "stories")


def proceed_until(recordings: Recordings, answers: list[Any]) -> None:
    """Waits until an answer has come, and whether another one does."""
    for _ in range(6000):
        recordings.proceed()
        if answers:
            break
        threading.Event().wait(0.005)
    recordings.proceed()


def test_a_recording_comes_once_with_the_ids_of_the_last_requests_before_it(
    engine_recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "MAX_REMEMBERED", 2)
    for number in (3, 4, 5):
        engine_recordings.submitted(number, 10 * number)
    answers: list[RecordingReply] = []
    engine_recordings.ask(lambda find: answers.append(find()))
    engine_recordings.submitted(6, 60)
    proceed_until(engine_recordings, answers)
    (answer,) = answers
    assert answer.request_ids == {4: 40, 5: 50}
    assert parse_recording(answer.recording, "the engine").header.model == "stories"


def test_why_a_recording_cannot_be_written_is_its_answer(
    engine_recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> bytes:
        raise MemoryError("it is too long")

    monkeypatch.setattr(recordings, "dump_recording", fail)
    answers: list[Any] = []
    engine_recordings.ask(answers.append)
    proceed_until(engine_recordings, answers)
    with pytest.raises(MemoryError, match="it is too long"):
        answers[0]()
