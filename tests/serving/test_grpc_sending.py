"""Answers by gRPC: large ones are encoded in turns, and clients that do not take theirs are ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest

from fastgen.runtime.requests.outputs import GenerationOutput
from fastgen.serving.admission.turns import Turns
from fastgen.serving.clients.grpc import GrpcTransport
from fastgen.serving.clients.requests import ClientRequest
from fastgen.serving.grpc import messages, sending
from fastgen.serving.grpc.sending import Sending
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.service import Running
from tests.serving.attacks.http2 import PartialCall
from tests.serving.refusing import served
from tests.serving.scripted import ScriptedService, scripted_codec

WAIT_S = 20.0
TOKEN_IDS = [5, 6, 7, 8]
REQUEST = ClientRequest({}, prompt="Once upon a time")


def scripted() -> Any:
    service: Any = ScriptedService(scripted_codec(), lambda *asked: (TOKEN_IDS, "length"))
    service.metrics = ServerMetrics(lambda: True)
    return service


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The answers that were encoded in turns, as bytes."""
    found: list[bytes] = []
    run = Turns.run

    async def recorded(turns: Turns, work: Any) -> Any:
        found.append(await run(turns, work))
        return found[-1]

    monkeypatch.setattr(Turns, "run", recorded)
    return found


async def both_answers(service: Any) -> list[GenerationOutput]:
    """Returns the answer without a stream, and that of a stream."""
    async with served(service) as address:
        transport = GrpcTransport(address, None)
        try:
            streamed = [part async for part in transport.stream(REQUEST)]
            whole = streamed[-1]
            assert isinstance(whole, GenerationOutput)
            return [await transport.generate(REQUEST), whole]
        finally:
            await transport.close()


@pytest.mark.parametrize("is_large", [False, True])
def test_large_answers_are_encoded_in_turns(
    in_turns: list[bytes], monkeypatch: pytest.MonkeyPatch, *, is_large: bool
) -> None:
    monkeypatch.setattr(Running, "is_large", is_large)
    for output in asyncio.run(both_answers(scripted())):
        assert output.token_ids == TOKEN_IDS
    assert len(in_turns) == (2 if is_large else 0)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_client_that_reads_no_answer_is_ended_with_its_request(method: str, caplog: pytest.LogCaptureFixture) -> None:
    service = scripted()

    async def run() -> None:
        async with asyncio.timeout(WAIT_S), served(service, write_timeout_s=0.2) as address:
            call = await PartialCall.open(address, f"/fastgen.v1.Generation/{method}", reads=False)
            await call.send_request(messages.GenerateRequest(text="a").SerializeToString())
            await call.until_over()
            while not service.num_cancelled:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert caplog.text == ""


class Client:
    """A client that takes each answer after ``after_s``, or never."""

    def __init__(self, name: str, after_s: float | None):
        self._name, self._after_s = name, after_s

    def peer(self) -> str:
        return self._name

    async def write(self, answer: bytes) -> None:
        await (asyncio.sleep(self._after_s) if self._after_s is not None else asyncio.Event().wait())


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The clients whose connections were ended."""
    found: list[str] = []

    def end_connections(port: int, peers: Iterable[str]) -> None:
        found.extend(peers)

    monkeypatch.setattr(sending, "end_connections", end_connections)
    return found


def test_a_client_that_reads_slowly_keeps_its_call_and_one_that_does_not_read_is_ended(ended: list[str]) -> None:
    async def run() -> None:
        answers = Sending(timeout_s=0.5)

        async def sent(client: Any) -> None:
            for _ in range(20):
                await answers.send(client, b"answer")

        tasks = [asyncio.create_task(sent(client)) for client in (Client("slow", 0.05), Client("never", None))]
        with suppress(TimeoutError):
            async with asyncio.timeout(0.9):
                await answers.end_slow(1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert answers._limits_s == {}

    asyncio.run(run())
    assert set(ended) == {"never"}


@pytest.mark.parametrize(("size", "expected_s"), [(0, 100), ((1 << 20) - 1, 100), (1 << 20, 200), (5 << 20, 600)])
def test_a_client_has_as_much_time_again_for_each_mib_of_an_answer(size: int, expected_s: int) -> None:
    async def run() -> float:
        answers, client = Sending(timeout_s=100), Client("never", None)
        sent = asyncio.create_task(answers.send(client, bytes(size)))  # type: ignore[arg-type]
        began_s = time.monotonic()
        await asyncio.sleep(0)
        (limit_s,) = answers._limits_s.values()
        sent.cancel()
        await asyncio.wait([sent])
        return limit_s - began_s

    assert asyncio.run(run()) == pytest.approx(expected_s, abs=1)
