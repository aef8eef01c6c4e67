"""A server of tiny-llama as a target, by each of its endpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastgen.lab.experiments.serve import serve
from fastgen.lab.load.endpoint import EndpointTarget
from fastgen.lab.load.generator import LoadGenerator
from fastgen.lab.load.tokenizer import open_tokenizer
from fastgen.lab.workloads.arrivals import Poisson
from fastgen.lab.workloads.synthetic import Chats, FixedLengths
from tests.serving.server_process import served

LENGTHS = FixedLengths(num_prompt_tokens=20, num_new_tokens=12, num_requests=10)
CHATS = Chats(num_sessions=2, num_turns=3, num_prompt_tokens=32, num_new_tokens=16)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTGEN_DEPLOYMENTS", str(tmp_path_factory.mktemp("deployments")))
        with served("tiny-llama", "--num-threads", "1", "--max-num-seqs", "4") as process:
            yield process.address


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("when", [Poisson(50.0), 3])
def test_every_request_is_answered_in_full(address: str, endpoint: str, when: Poisson | int) -> None:
    run = serve(LoadGenerator(EndpointTarget(address, endpoint=endpoint)), LENGTHS, when, vocab_size=250)
    assert len(run.complete) == 10
    for record in run.records:
        assert (record.num_prompt_tokens, record.num_generated, record.finish_reason) == (20, 12, "length")
        assert record.due_s <= record.sent_s < record.token_times_s[0]
        assert list(record.token_times_s) == sorted(record.token_times_s)
        assert record.num_cached_tokens is not None


def test_tokens_of_completions_are_counted_by_usage(address: str) -> None:
    run = serve(LoadGenerator(EndpointTarget(address)), LENGTHS, 1, vocab_size=250)
    assert run.header.target["tokens_counted_by"] == "usage of each chunk"
    assert run.header.target["model"] == "tiny-llama"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/generate"])
def test_prompts_may_be_text(address: str, endpoint: str) -> None:
    codec = open_tokenizer("tiny-llama")
    target = EndpointTarget(address, endpoint=endpoint, codec=codec, sends_text=True)
    run = serve(LoadGenerator(target), LENGTHS, 3, vocab_size=250)
    assert run.header.target["prompts"] == "text"
    for record in run.records:
        assert (record.num_prompt_tokens, record.num_generated, record.finish_reason) == (20, 12, "length")


@pytest.mark.parametrize("when", [Poisson(50.0), pytest.param(3, marks=pytest.mark.slow)])
def test_every_chat_is_answered_in_full(address: str, when: Poisson | int) -> None:
    codec = open_tokenizer("tiny-llama")
    target = EndpointTarget(address, endpoint="/v1/chat/completions", codec=codec)
    run = serve(LoadGenerator(target), LENGTHS, when, vocab_size=250)
    assert len(run.complete) == 10
    assert run.header.target["tokens_counted_by"] == "usage of each chunk"
    for planned, record in zip(LENGTHS.requests(vocab_size=250, seed=0), run.records, strict=True):
        messages = [{"role": "user", "content": codec.decode(planned.prompt_ids)}]
        assert record.num_prompt_tokens == len(codec.encode_chat(messages)), "as the server renders and counts it"
        assert (record.num_generated, record.finish_reason) == (12, "length")
        assert record.due_s <= record.sent_s < record.token_times_s[0]
        assert list(record.token_times_s) == sorted(record.token_times_s)
        assert record.num_cached_tokens is not None


@pytest.mark.slow  # a server of its own
def test_conversations_find_their_turns_in_the_prefix_cache(address: str) -> None:
    by_ids = serve(LoadGenerator(EndpointTarget(address, endpoint="/generate")), CHATS, 2, vocab_size=250, seed=2)
    assert [record.num_prompt_tokens for record in by_ids.records] == [32, 80, 128] * 2
    assert [record.num_cached_tokens for record in by_ids.records] == [0, 32, 80] * 2
    codec = open_tokenizer("tiny-llama")
    by_text = serve(LoadGenerator(EndpointTarget(address, codec=codec)), CHATS, 2, vocab_size=250, seed=1)
    assert [record.num_prompt_tokens for record in by_text.records] == [32, 80, 128] * 2
    assert [record.error for record in by_text.records] == [None] * 6
    chats = EndpointTarget(address, endpoint="/v1/chat/completions", codec=codec)
    by_messages = serve(LoadGenerator(chats), CHATS, 2, vocab_size=250, seed=3)
    assert [record.error for record in by_messages.records] == [None] * 6
    for first, second, third in (by_messages.records[:3], by_messages.records[3:]):
        assert first.num_prompt_tokens < second.num_prompt_tokens < third.num_prompt_tokens
        assert third.num_cached_tokens is not None
        assert third.num_cached_tokens >= first.num_prompt_tokens // 16 * 16, "the first turn at least is found again"
