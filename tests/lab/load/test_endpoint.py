"""Endpoints as targets: what is asked of them, how their tokens are counted, and how they fail."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.lab.load.endpoint import EndpointTarget
from fastgen.lab.load.formats import Completions
from fastgen.lab.load.generator import LoadGenerator
from fastgen.lab.load.open_loop import OpenLoop
from fastgen.lab.load.target import Answer
from fastgen.lab.records import Run
from fastgen.lab.workloads.request import PlannedRequest
from tests.lab.load.fake_endpoint import fake_endpoint, is_trial

CHAT = "/v1/chat/completions"
TLS = Path(__file__).parents[2] / "serving" / "tls"


def requests(count: int = 3, *, num_new: int = 6, num_prompt: int = 9) -> list[PlannedRequest]:
    ids = tuple(range(10, 10 + num_prompt))
    return [PlannedRequest(prompt_ids=ids, num_new_tokens=num_new, due_s=0.0) for _ in range(count)]


def measured(url: str, planned: list[PlannedRequest], **settings: Any) -> Run:
    return LoadGenerator(EndpointTarget(url, **settings))(planned, OpenLoop(num_warm_ups=0), {"name": "test"})


class Letters:
    """A tokenizer with a letter for each token."""

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in prompt]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord("a") + each) for each in token_ids)


def test_times_are_those_of_the_servers_schedule() -> None:
    answer = Answer()
    with fake_endpoint(gap_s=0.01, once=lambda num_sent: len(answer.token_times) >= num_sent) as fake:
        target = EndpointTarget(fake.url)

        async def run() -> None:
            await target.open(requests(1))
            await target.send(target.prepare(requests(1)[0]), answer)
            await target.close()

        asyncio.run(run())
        (written,) = fake.written
    assert len(answer.token_times) == 6
    assert answer.ended is not None
    # The server writes a chunk when the one before has been read, so each is read between two that it writes.
    for arrived, sent, following in zip(answer.token_times, written, [*written[1:], answer.ended], strict=True):
        assert sent <= arrived <= following


def test_delays_of_the_server_are_in_the_record() -> None:
    with fake_endpoint(first_s=0.05, gap_s=0.02) as fake:
        run = measured(fake.url, requests(2))
    for record in run.records:
        assert record.error is None
        assert record.ttft_s is not None
        assert record.ttft_s >= 0.05
        # Gaps differ from the server's by delays of this machine; their sum does not by a whole gap of the server.
        assert sum(record.gaps_s) > 4 * 0.02
        assert record.tpot_s == pytest.approx(sum(record.gaps_s) / 5)
        assert record.ended_s >= record.token_times_s[-1]
        assert (record.num_cached_tokens, record.num_prompt_tokens, record.finish_reason) == (3, 9, "length")


@pytest.mark.parametrize(
    ("script", "counted_by"),
    [
        ({"reports": "usage"}, "usage of each chunk"),
        ({"reports": "token ids"}, "token ids of each chunk"),
        ({"reports": "nothing"}, "one for each chunk"),
        ({"reports": "usage", "refused": frozenset({"return_token_ids"})}, "usage of each chunk"),
        (
            {"reports": "usage", "refused": frozenset({"return_token_ids", "continuous_usage_stats"})},
            "one for each chunk",
        ),
    ],
)
def test_tokens_are_counted_by_what_the_server_gives(script: dict[str, Any], counted_by: str) -> None:
    with fake_endpoint(tokens_per_chunk=2, **script) as fake:
        run = measured(fake.url, requests())
    assert run.header.target["tokens_counted_by"] == counted_by
    for record in run.records:
        assert record.error is None, "the usage of the last chunk says how many there are"
        assert record.num_generated == 6
        assert len(set(record.token_times_s)) <= 3, "two arrive at once"


def test_answers_have_the_length_that_was_asked_for_and_no_end_of_text() -> None:
    with fake_endpoint() as fake:
        measured(fake.url, requests(1))
    body = next(each for each in fake.bodies if not is_trial(each))
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (6, True, 0, True)
    assert body["prompt"] == list(range(10, 19))
    assert body["model"] == "fake", "the first that the server lists"


def test_a_server_without_ignore_eos_is_refused_before_the_run() -> None:
    with fake_endpoint(refused=frozenset({"ignore_eos"})) as fake, pytest.raises(FastgenError, match="ignore_eos"):
        measured(fake.url, requests())
    with fake_endpoint(ignores_eos=False) as fake, pytest.raises(FastgenError, match="tokens with 1: answers of a"):
        measured(fake.url, requests())


def test_a_server_that_takes_no_token_ids_gets_text() -> None:
    with fake_endpoint(takes_ids=False) as fake:
        run = measured(fake.url, requests(1), codec=Letters())
        assert run.header.target["prompts"] == "text"
        assert fake.bodies[-1]["prompt"] == "klmnopqrs"
        with pytest.raises(FastgenError, match="not taken: token ids"):
            measured(fake.url, requests(1))


def test_conversations_continue_with_the_answers() -> None:
    first, second = requests(2)
    turns = [
        PlannedRequest(prompt_ids=first.prompt_ids, num_new_tokens=6, due_s=0.0, session="s"),
        PlannedRequest(prompt_ids=(5, 5), num_new_tokens=3, session="s", continues=True),
    ]
    with fake_endpoint(reports="token ids") as fake:
        run = measured(fake.url, turns)
        assert fake.bodies[-1]["prompt"] == [*first.prompt_ids, *[7] * 6, 5, 5]
        assert run.records[1].sent_s >= run.records[0].ended_s
    with fake_endpoint() as fake:
        measured(fake.url, turns, codec=Letters())
        assert fake.bodies[-1]["prompt"] == [*second.prompt_ids, *[0] * 6, 5, 5], "its text, encoded again"
        with pytest.raises(FastgenError, match="name the model's tokenizer"):
            measured(fake.url, turns)


@pytest.mark.parametrize(
    ("script", "counted_by"),
    [
        ({"reports": "usage"}, "usage of each chunk"),
        ({"reports": "token ids"}, "token ids of each chunk"),
        ({"reports": "nothing"}, "one for each chunk"),
        ({"reports": "nothing", "num_reasoning": 4}, "one for each chunk"),
        (
            {"reports": "usage", "refused": frozenset({"return_token_ids", "continuous_usage_stats"})},
            "one for each chunk",
        ),
    ],
)
def test_tokens_of_chats_are_counted_by_what_the_server_gives(script: dict[str, Any], counted_by: str) -> None:
    with fake_endpoint(tokens_per_chunk=2, first_s=0.01, **script) as fake:
        run = measured(fake.url, requests(), endpoint=CHAT, codec=Letters())
    assert run.header.target["tokens_counted_by"] == counted_by
    assert run.header.target["prompts"] == "messages"
    for record in run.records:
        assert record.error is None, "the usage of the last chunk says how many there are"
        assert (record.num_generated, record.num_prompt_tokens, record.finish_reason) == (6, 9, "length")
        assert record.ttft_s is not None
        assert record.ttft_s >= 0.01, "a chunk with the role alone is no token"


def test_a_chat_has_the_prompt_as_the_users_message() -> None:
    with fake_endpoint() as fake:
        measured(f"{fake.url}/v1", requests(1), endpoint=CHAT, codec=Letters())
    body = next(each for each in fake.bodies if not is_trial(each))
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (6, True, 0, True)
    assert body["messages"] == [{"role": "user", "content": "klmnopqrs"}]
    assert "prompt" not in body


@pytest.mark.parametrize("num_reasoning", [0, 2])
def test_turns_of_a_chat_are_messages_with_the_answers_between(num_reasoning: int) -> None:
    turns = [
        PlannedRequest(prompt_ids=(3,) * 9, num_new_tokens=6, due_s=0.0, session="s"),
        PlannedRequest(prompt_ids=(5, 5), num_new_tokens=3, session="s", continues=True),
        PlannedRequest(prompt_ids=(4,), num_new_tokens=2, session="s", continues=True),
    ]
    with fake_endpoint(num_reasoning=num_reasoning) as fake:
        measured(fake.url, turns, endpoint=CHAT, codec=Letters())
    # The size of the conversation is part of the workload: for reasoning, which a conversation leaves out, there are
    # other tokens.
    assert fake.bodies[-1]["messages"] == [
        {"role": "user", "content": "d" * 9},
        {"role": "assistant", "content": "a" * 6},
        {"role": "user", "content": "ff"},
        {"role": "assistant", "content": "aaa"},
        {"role": "user", "content": "e"},
    ]


def test_a_server_that_dies_gives_failed_records() -> None:
    with fake_endpoint(dies_after=20, gap_s=0.001) as fake:
        planned = [PlannedRequest(prompt_ids=(1,) * 9, num_new_tokens=8, due_s=0.0, session="s") for _ in range(6)]
        run = measured(fake.url, planned)
    assert len(run.records) == 6
    assert [record.error is None for record in run.records] == [True, True, False, False, False, False]
    assert "broke" in str(run.records[2].error)
    assert run.records[2].num_generated == 4, "what came before is kept"
    assert "no server answers at http://127.0.0.1:" in str(run.records[-1].error)
    assert not run.header.interrupted


def test_no_server_and_other_servers_are_refused_with_a_sentence() -> None:
    with fake_endpoint() as fake:
        url = fake.url
    with pytest.raises(FastgenError, match="no server answers at"):
        measured(url, requests())
    for bad in ("localhost:8000", "ftp://localhost", "http://", "http://localhost:port"):
        with pytest.raises(InvalidArgumentError, match="is not a URL"):
            EndpointTarget(bad)
    with pytest.raises(InvalidArgumentError, match="/v1/embeddings is not known: /v1/completions and /v1/chat/"):
        EndpointTarget(url, endpoint="/v1/embeddings")
    with pytest.raises(InvalidArgumentError, match="takes messages of text, not token ids: name the model's tokenizer"):
        EndpointTarget(url, endpoint=CHAT)


def test_connections_are_used_again_and_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k1")
    session = [PlannedRequest(prompt_ids=(1,) * 9, num_new_tokens=2, due_s=0.0, session="s") for _ in range(10)]
    with fake_endpoint() as fake:
        measured(f"{fake.url}/v1", session)
    assert fake.num_connections == 1
    assert {each["authorization"] for each in fake.headers} == {"Bearer k1"}


def test_a_connection_that_the_server_had_closed_is_replaced() -> None:
    session = [PlannedRequest(prompt_ids=(1,) * 9, num_new_tokens=2, due_s=0.0, session="s") for _ in range(4)]
    with fake_endpoint(drops_kept=True) as fake:
        run = measured(fake.url, session)
    assert [record.error for record in run.records] == [None] * 4
    assert fake.num_connections > 4


def test_chunks_that_have_no_token_of_their_own_are_not_counted() -> None:
    # A server may send the bytes of one token in two chunks; its usage says how many tokens there are.
    answer, completions = Answer(), Completions()
    for at in (1.0, 2.0, 3.0):
        completions.read({"choices": [{"text": "a"}]}, answer, at)
    completions.read({"choices": [], "usage": {"completion_tokens": 2}}, answer, 4.0)
    assert answer.token_times == [1.0, 2.0]


def test_https_is_spoken_with_a_certificate_that_is_trusted() -> None:
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    ours = ssl.create_default_context(cafile=str(TLS / "certificate.pem"))
    with fake_endpoint(theirs) as fake:
        run = measured(fake.url, requests(), tls=ours)
        assert len(run.complete) == 3
        assert fake.url.startswith("https://")
        with pytest.raises(FastgenError, match="certificate verify failed"):
            measured(fake.url, requests())
