"""The clients, by HTTP and gRPC, blocking or in asyncio, answer as the library does in this process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

import fastgen
from fastgen import LLM, GenerationOutput, SamplingParams
from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.serving.clients.async_client import AsyncClient
from fastgen.serving.clients.client import Client
from fastgen.serving.clients.connect import Protocols, connect
from fastgen.serving.clients.deployments import Deployment, deployments
from fastgen.serving.clients.recordings import fetch_recordings
from fastgen.serving.refusals import OverloadedError, UnauthorizedError, UnavailableError
from tests.serving.live_views import is_idle, live_views
from tests.serving.server_process import served

TLS = Path(__file__).with_name("tls")  # of these tests alone: a certificate for 127.0.0.1, and its key
PROMPTS = ["Once upon a time", "There once was a fox", [5, 6, 7]]
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 9, "temperature": 0},
    "drawn": {"max_new_tokens": 9, "temperature": 0.8, "seed": -3, "n": 2, "logprobs": 2, "prompt_logprobs": 1},
    "filtered": {
        "max_new_tokens": 6,
        "temperature": 0.8,
        "seed": 3,
        "top_k": 4,
        "logprobs": 2,
        "logit_bias": {7: -100},
    },
    "stopped": {"max_new_tokens": 30, "temperature": 0, "stop": ["a", "e"], "min_new_tokens": 3},
    "beams": {"max_new_tokens": 6, "temperature": 0, "beam_width": 3, "n": 2},
    "a pattern": {"max_new_tokens": 9, "temperature": 0, "response_format": {"type": "regex", "pattern": "[a-z ]{6}"}},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with fastgen.load("tiny-llama") as loaded:
        yield loaded


@pytest.fixture(scope="module", params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> Protocols:
    return request.param


@pytest.fixture(scope="module")
def client(deployment: Deployment, protocol: Protocols) -> Iterator[Client]:
    with Client(lambda: connect(deployment, api_key=None, protocol=protocol)) as found:
        yield found


def untimed(output: GenerationOutput) -> GenerationOutput:
    """Returns the part of an output that is the same for each repetition."""
    metrics = replace(
        output.metrics, queue_s=0.0, ttft_s=0.0, gaps_s=[0.0] * len(output.metrics.gaps_s), cached_tokens=0
    )
    return replace(output, request_id=0, metrics=metrics, others=tuple(map(untimed, output.others)))


@pytest.mark.parametrize("name", FIELDS)
def test_generate_gives_the_same_bits(llm: LLM, client: Client, name: str) -> None:
    wanted = llm.generate(PROMPTS, **FIELDS[name])
    got = client.generate(PROMPTS, **FIELDS[name])
    assert [untimed(each) for each in got] == [untimed(each) for each in wanted]
    assert all(each.metrics.ttft_s is not None for each in got)


def test_parameters_may_be_given_whole_and_one_each(llm: LLM, client: Client) -> None:
    each = [SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=5, temperature=0.5, seed=1)]
    wanted, got = (which.generate(PROMPTS[:2], each) for which in (llm, client))
    assert [untimed(one) for one in got] == [untimed(one) for one in wanted]
    assert untimed(client.generate(PROMPTS[0], each[1])) == untimed(llm.generate(PROMPTS[0], each[1]))


def test_a_list_is_answered_in_its_order_however_long(llm: LLM, client: Client) -> None:
    prompts = [[index % 200 + 5, 9] for index in range(150)]
    got = client.generate(prompts, max_new_tokens=1 + 2, temperature=0)
    assert [one.prompt_token_ids for one in got] == prompts
    wanted = llm.generate(prompts, max_new_tokens=1 + 2, temperature=0)
    assert [one.token_ids for one in got] == [one.token_ids for one in wanted]
    assert client.generate([], max_new_tokens=3) == []


@pytest.mark.parametrize("name", ["drawn", "stopped", "beams"])
def test_a_stream_adds_up_to_the_same_answer(llm: LLM, client: Client, name: str) -> None:
    wanted = llm.generate(PROMPTS[0], **FIELDS[name])
    with client.stream(PROMPTS[0], **FIELDS[name]) as stream:
        chunks = list(stream)
        assert untimed(stream.output) == untimed(wanted)
    for completion in wanted.completions:
        own = [chunk for chunk in chunks if chunk.index == completion.index]
        assert "".join(chunk.text for chunk in own) == completion.text
        assert [token_id for chunk in own for token_id in chunk.token_ids] == completion.token_ids
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [completion.finish_reason]


def test_a_stream_comes_in_pieces(client: Client) -> None:
    stream = client.stream(PROMPTS[0], max_new_tokens=200, temperature=0, ignore_eos=True)
    first = next(stream)
    assert len(first.token_ids) < 200
    with pytest.raises(FastgenError, match="the stream has not ended"):
        _ = stream.output
    stream.close()


@pytest.mark.parametrize("how", ["closed", "dropped", "closed unread", "dropped unread"])
def test_a_stream_runs_at_once_and_leaves_nothing_behind_where_it_is_left(
    client: Client, deployment: Deployment, how: str
) -> None:
    def until(holds: Callable[[list[dict[str, Any]]], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while not holds(list(live_views(deployment.address).values())):
            assert time.monotonic() < deadline_s

    stream = client.stream(PROMPTS[0], max_new_tokens=1900, temperature=0, ignore_eos=True, n=4)
    if "unread" in how:
        until(lambda engines: any(engine["num_running"] > 0 for engine in engines))
    else:
        next(stream)
    if "closed" in how:
        stream.close()
    del stream
    until(lambda engines: all(map(is_idle, engines)))


def test_chat_is_that_of_the_library(llm: LLM, client: Client) -> None:
    conversation = [{"role": "user", "content": "Tell me a story about a fox named Lily."}]
    fields = {"max_new_tokens": 8, "temperature": 0}
    wanted = llm.chat(conversation, **fields)
    assert untimed(client.chat(conversation, **fields)) == untimed(wanted)
    with client.stream_chat(conversation, **fields) as stream:
        assert "".join(chunk.text for chunk in stream) == wanted.text
    assert [untimed(one) for one in client.chat([conversation] * 2, **fields)] == [untimed(wanted)] * 2


def test_in_asyncio_all_is_the_same(llm: LLM, deployment: Deployment, protocol: Protocols) -> None:
    fields = FIELDS["drawn"]

    async def run() -> None:
        async with connect(deployment, api_key=None, protocol=protocol) as client:
            wanted = llm.generate(PROMPTS, **fields)
            one, several = await asyncio.gather(
                client.generate(PROMPTS[0], **fields), client.generate(PROMPTS, **fields)
            )
            assert untimed(one) == untimed(wanted[0])
            assert [untimed(each) for each in several] == [untimed(each) for each in wanted]
            async with client.stream(PROMPTS[0], **fields) as stream:
                text = "".join([chunk.text async for chunk in stream if chunk.index == 0])
                assert text == wanted[0].text
                assert untimed(stream.output) == untimed(wanted[0])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"temperature": -1}, "temperature must be"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"max_new_tokens": 10**6}, "max_model_len is"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias holds token id 1000000"),
        ({"beam_width": 3, "temperature": 0.5}, "needs temperature=0"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids holds"),
        ({"sampling": SamplingParams(), "n": 2}, "not both"),
    ],
)
def test_refusals_are_the_librarys_in_its_words(llm: LLM, client: Client, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why) as of_library:
        llm.generate(PROMPTS[0], **fields)
    with pytest.raises(InvalidArgumentError) as of_client:
        client.generate(PROMPTS[0], **fields)
    assert str(of_client.value) == str(of_library.value)


def test_a_stream_is_refused_when_it_is_asked_for(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="max_model_len is"):
        next(client.stream(PROMPTS[0], max_new_tokens=10**6))
    with pytest.raises(InvalidArgumentError, match="stream takes one prompt"):
        client.stream(PROMPTS)


@pytest.mark.parametrize("prompt", [None, [[1, "a"]], [5, -1], [10**6], ["a", None]])
def test_prompts_that_are_none_are_refused(client: Client, prompt: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        client.generate(prompt, max_new_tokens=2)


def test_a_call_whose_requests_are_always_refused_ends() -> None:
    """The cause may be, for example, a first token that would always come too late."""

    class Refusing:
        async def check(self, requests: list[Any]) -> list[None]:
            return [None] * len(requests)

        async def generate(self, request: Any) -> Any:
            raise OverloadedError("too late", retry_after_s=0.0)

    transport: Any = Refusing()
    with pytest.raises(OverloadedError, match="too late"):
        asyncio.run(AsyncClient(transport).generate(["a", "b"]))


def test_of_several_prompts_the_one_that_is_wrong_is_named(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="prompt 1: "):
        client.generate(["a", [10**6], "b"], max_new_tokens=2)


def test_info_describes_what_is_served(client: Client) -> None:
    info = client.info()
    assert (info["model"], info["version"], info["state"]) == ("tiny-llama", fastgen.__version__, "ready")
    assert info["vocab_size"] == 1536


def test_an_address_will_do(
    deployment: Deployment, protocol: Protocols, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN_DEPLOYMENTS", str(tmp_path))  # as it is on another machine
    address = deployment.address if protocol == "http" else str(deployment.grpc_address)
    with fastgen.client(address, protocol=protocol) as client:
        assert len(client.generate(PROMPTS[0], max_new_tokens=2, ignore_eos=True).token_ids) == 2
        with pytest.raises(UnauthorizedError, match="needs its token"):
            client.terminate_server()


def test_a_server_that_is_not_there_is_named(protocol: Protocols) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unused_port = listener.getsockname()[1]
    with (
        fastgen.client(f"127.0.0.1:{unused_port}", protocol=protocol) as client,
        pytest.raises(FastgenError, match=f"no server answers at .*:{unused_port}"),
    ):
        client.generate("a")


def test_a_client_that_was_closed_says_so(deployment: Deployment) -> None:
    client = fastgen.client(deployment.address)
    client.close()
    client.close()
    with pytest.raises(FastgenError, match="this client is closed"):
        client.generate("a")


def test_closing_a_client_closes_its_connection() -> None:
    """Seen by a server that answers one request and waits for the end of the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:
        client = fastgen.client(f"http://127.0.0.1:{server.getsockname()[1]}")
        info = threads.submit(client.info)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(30)
            assert connection.recv(65536).startswith(b"GET /info ")
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            assert info.result() == {}
            client.close()
            assert connection.recv(1) == b""


@contextmanager
def another_program(answer: bytes) -> Iterator[str]:
    """Yields the address of a program that answers every request with ``answer`` and closes the connection."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(ConnectionError):
                    connection.recv(1 << 16)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):  # closed with bytes to read, it would be reset
                        pass

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        threads.submit(serve)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
        b"HTTP/1.0 200 OK\r\n\r\n[]",
        b'HTTP/1.0 200 OK\r\n\r\ndata: {"index": 1}\n\n',
        b"HTTP/1.0 200 OK\r\ncontent-encoding: gzip\r\n\r\n<html>",
    ],
    ids=["page", "list", "event", "encoding"],
)
def test_another_program_at_the_address_is_named(answer: bytes) -> None:
    with another_program(answer) as address, fastgen.client(address) as client:
        asked: list[Callable[[], object]] = [
            lambda: client.generate("a"),
            lambda: client.generate(["a", "b"]),
            lambda: fetch_recordings(address, "a", api_key=None),
        ]
        for ask in asked:
            with pytest.raises(FastgenError, match=f"^{address}/.* does not answer as a server of fastgen does"):
                ask()
        with pytest.raises(FastgenError, match=r"does not answer|ended the stream before"):
            list(client.stream("a"))


def test_a_proxys_retry_after_may_be_a_date() -> None:
    answer = b"HTTP/1.0 503 No\r\nretry-after: Wed, 21 Oct 2099 07:28:00 GMT\r\n\r\n"
    with another_program(answer) as address, fastgen.client(address) as client:
        with pytest.raises(UnavailableError, match="status 503") as refused:
            client.generate("a")
        assert refused.value.retry_after_s == 1.0


@pytest.mark.parametrize("address", ["http://[::1", "127.0.0.1:99999", "http://a:b", "http://", "http://a\x00"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a URL"):
        fastgen.client(address)


@pytest.mark.parametrize("key", ["a\nb", "ключ", " "])
def test_a_key_that_no_header_can_hold_is_refused(protocol: Protocols, key: str) -> None:
    with pytest.raises(InvalidArgumentError, match="api_key: an API key must consist of visible ASCII"):
        fastgen.client("127.0.0.1:1", protocol=protocol, api_key=key)


def test_what_json_does_not_have_is_refused_before_it_is_sent() -> None:
    with fastgen.client("http://127.0.0.1:1") as client:
        for prompt in ("\ud800", [{"role": "user", "content": "a", "more": {1, 2}}]):
            with pytest.raises(InvalidArgumentError, match="cannot be sent as JSON"):
                client.generate(prompt) if isinstance(prompt, str) else client.chat(prompt)


def test_keys_and_tls(protocol: Protocols, guarded: Deployment) -> None:
    def connected(key: str | None) -> Client:
        return Client(lambda: connect(guarded, api_key=key, protocol=protocol))

    assert guarded.address.startswith("https://")
    for wrong in (None, "open", "open-sesame-"):
        with connected(wrong) as client:
            for ask in (client.info, lambda: client.generate("a"), lambda: next(client.stream("a"))):
                with pytest.raises(UnauthorizedError):
                    ask()
    with connected("open-sesame") as client:
        assert client.info()["model"] == "guarded"
        assert len(client.generate("a", max_new_tokens=2, ignore_eos=True).token_ids) == 2


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A server with an API key and TLS; it is ended with the key alone."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# of tests\nopen-sesame\n")
    tls = ("--tls-cert", str(TLS / "certificate.pem"), "--tls-key", str(TLS / "key.pem"))
    with served("tiny-opt", "--api-key-file", str(keys), "--grpc-port", "0", "--name", "guarded", *tls) as server:
        (found,) = [one for one in deployments() if one.pid == server.process.pid]
        yield found


def test_all_of_a_list_are_checked_before_any_runs(client: Client, deployment: Deployment) -> None:
    def taken() -> str:
        text = httpx2.get(f"{deployment.address}/metrics", trust_env=False).text
        return next(line for line in text.splitlines() if line.startswith("fastgen_requests_total "))

    before = taken()
    prompts = [[5, 6]] * 20 + [[10**6]] + [[5, 6]] * 3
    with pytest.raises(InvalidArgumentError, match=r"^prompt 20: .*1000000"):
        client.generate(prompts, max_new_tokens=2)
    samplings = [SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=10**6)]
    with pytest.raises(InvalidArgumentError, match=r"^prompt 1: .*max_new_tokens=1000000"):
        client.generate([[5, 6]] * 2, samplings)
    with pytest.raises(InvalidArgumentError, match=r"^prompt 1: "):
        client.chat([[{"role": "user", "content": "hello"}], [{"content": "hello"}]], max_new_tokens=2)
    assert taken() == before
