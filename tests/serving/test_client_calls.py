"""Calls of several requests: which are sent again, when they are given up, and how they end together."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.serving.clients import async_client
from fastgen.serving.clients.async_client import AsyncClient
from fastgen.serving.clients.client import Client
from fastgen.serving.clients.connect import connect, is_address
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.clients.requests import ClientRequest
from fastgen.serving.refusals import OverloadedError

WAIT_S = 30.0
ENDLESS = 1 << 30


class PlayedTransport:
    """A server that refuses each prompt as often as the test says, and answers it then with itself."""

    def __init__(self, **refusals: int):
        self._refusals = refusals
        self.asked = Counter[str]()

    async def check(self, requests: Sequence[ClientRequest]) -> list[str | None]:
        return [None] * len(requests)

    async def generate(self, request: ClientRequest) -> str:
        prompt = str(request.prompt)
        self.asked[prompt] += 1
        if self.asked[prompt] <= self._refusals.get(prompt, 0):
            raise OverloadedError("too much to do", retry_after_s=2.5)
        return prompt

    async def close(self) -> None:
        pass


def asked(transport: Any, *prompts: str) -> Any:
    """Sends the prompts in one call, and returns its answers."""
    return asyncio.run(AsyncClient(transport).generate(list(prompts) if len(prompts) > 1 else prompts[0]))


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which calls wait, which pass at once."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def sleep_and_note(delay_s: float) -> None:
        found.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep_and_note)
    return found


def test_a_request_that_is_refused_is_sent_again_after_the_time_that_the_server_names(delays: list[float]) -> None:
    transport = PlayedTransport(a=3)
    assert asked(transport, "a", "b") == ["a", "b"]
    assert (transport.asked, delays) == ({"a": 4, "b": 1}, [2.5, 2.5, 2.5])


def test_one_request_alone_is_for_its_caller_to_send_again(delays: list[float]) -> None:
    transport = PlayedTransport(a=1)
    with pytest.raises(OverloadedError, match="too much to do"):
        asked(transport, "a")
    assert (transport.asked, delays) == ({"a": 1}, [])


def test_a_call_is_given_up_only_while_none_of_its_requests_is_answered(
    delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_client, "_MAX_REFUSALS", 3)
    # In each turn all that are left are sent once, in their order; so one is answered in each second turn.
    transport = PlayedTransport(a=6, b=1, c=3, d=5)
    assert asked(transport, "a", "b", "c", "d") == ["a", "b", "c", "d"]
    transport = PlayedTransport(a=ENDLESS, b=1)
    with pytest.raises(OverloadedError):
        asked(transport, "a", "b")
    assert transport.asked == {"a": 2 + 3, "b": 2}


def test_a_call_that_fails_ends_all_of_its_requests() -> None:
    cancelled: list[str] = []

    class Failing(PlayedTransport):
        async def generate(self, request: ClientRequest) -> str:
            if request.prompt == "b":
                await asyncio.sleep(0)
                raise InvalidArgumentError("it is too long")
            try:
                return str(await asyncio.Event().wait())
            except asyncio.CancelledError:
                cancelled.append(str(request.prompt))
                raise

    async def run() -> None:
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(InvalidArgumentError, match=r"^prompt 1: it is too long$"):
                await AsyncClient(Failing()).generate(["a", "b", "c"])  # type: ignore[arg-type]
        assert cancelled == ["a", "c"]

    asyncio.run(run())


def test_ctrl_c_cancels_the_requests_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    class Endless(PlayedTransport):
        async def generate(self, request: ClientRequest) -> str:
            begun.set()
            try:
                return str(await asyncio.Event().wait())
            except asyncio.CancelledError:
                cancelled.set()
                raise

    submit = asyncio.run_coroutine_threadsafe

    def interrupted(work: Any, loop: asyncio.AbstractEventLoop) -> Future[Any]:
        """Takes the place of a wait that Ctrl-C ends."""
        future = submit(work, loop)

        def result(timeout: float | None = None) -> Any:
            assert begun.wait(WAIT_S)
            raise KeyboardInterrupt

        future.result = result  # type: ignore[method-assign]
        return future

    with Client(lambda: AsyncClient(Endless())) as client:  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.generate("a")
        assert cancelled.wait(WAIT_S)


def test_a_client_that_cannot_be_made_leaves_no_thread() -> None:
    def make() -> AsyncClient:
        raise InvalidArgumentError("no such server")

    before = set(threading.enumerate())
    with pytest.raises(InvalidArgumentError, match="no such server"):
        Client(make)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("127.0.0.1:8000", True),
        ("http://here", True),
        ("grpcs://here:1", True),
        ("tiny-llama", False),
        ("8000", False),
        (":8000", False),
        ("model:latest", False),
        ("/models/a:1/b", False),
    ],
)
def test_an_address_is_told_from_a_name(name: str, expected: bool) -> None:
    assert is_address(name) is expected


class NotingTransport(PlayedTransport):
    """Notes what is checked together and how many requests are sent at once, and refuses some as it checks them."""

    def __init__(self, wrong: str = ""):
        super().__init__()
        self._wrong = wrong
        self.checked: list[int] = []
        self.num_now = self.num_most = 0

    async def check(self, requests: Sequence[ClientRequest]) -> list[str | None]:
        self.checked.append(len(requests))
        return ["too long" if request.prompt == self._wrong else None for request in requests]

    async def generate(self, request: ClientRequest) -> str:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        for _ in range(3):
            await asyncio.sleep(0)
        self.num_now -= 1
        return await super().generate(request)


def test_a_server_has_64_requests_of_a_call_at_once_and_checks_16_together() -> None:
    transport, prompts = NotingTransport(), [str(number) for number in range(70)]
    assert asked(transport, *prompts) == prompts
    assert (transport.num_most, transport.checked) == (64, [16, 16, 16, 16, 6])


@pytest.mark.parametrize("index", [0, 15, 16, 33, 34])
def test_the_prompt_that_is_wrong_is_named_by_its_place_in_the_call(index: int) -> None:
    transport = NotingTransport(str(index))
    with pytest.raises(InvalidArgumentError, match=f"^prompt {index}: too long$"):
        asked(transport, *map(str, range(35)))
    assert transport.asked == {}, "none is sent"


def test_two_prompts_are_checked_and_one_alone_is_only_sent() -> None:
    for prompts, checked in ((["a"], []), (["a", "b"], [2])):
        transport = NotingTransport()
        asked(transport, *prompts)
        assert (transport.asked.total(), transport.checked) == (len(prompts), checked)


def test_a_request_is_sent_a_hundred_times_while_no_other_is_answered(delays: list[float]) -> None:
    transport = PlayedTransport(a=ENDLESS, b=ENDLESS)
    with pytest.raises(OverloadedError):
        asked(transport, "a", "b")
    assert transport.asked["a"] == 100
    assert set(delays) == {2.5}


def test_a_stream_is_of_one_conversation() -> None:
    conversation = [{"role": "user", "content": "Hi."}]
    several: Any = [conversation, conversation]
    with pytest.raises(InvalidArgumentError, match="stream_chat takes one conversation"):
        AsyncClient(PlayedTransport()).stream_chat(several)  # type: ignore[arg-type]


WITHOUT_GRPC = Deployment(
    name="m",
    model="m",
    address="http://127.0.0.1:1",
    grpc_address=None,
    certificate=None,
    host="here",
    pid=1,
    birth="",
    token="",
    log=None,
)


@pytest.mark.parametrize(
    ("server", "protocol", "message"),
    [
        ("http://127.0.0.1:1", "rest", "protocol='rest': expected 'http' or 'grpc'"),
        ("http://127.0.0.1:1", "grpc", "http://127.0.0.1:1 is an address of HTTP"),
        (WITHOUT_GRPC, "grpc", "this server has no gRPC; start it with a grpc_port"),
    ],
)
def test_a_client_needs_a_protocol_that_the_server_has(server: Deployment | str, protocol: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        connect(server, api_key=None, protocol=protocol)
