"""Answers as JSON: the same in pieces as at once, and none of the pieces is large."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from fastgen.runtime.requests.outputs import GenerationOutput, Logprobs, RequestMetrics
from fastgen.serving.admission.turns import Turns, at_once
from fastgen.serving.engine.packed_logprobs import PackedLogprobs, pack
from fastgen.serving.http.json_answers import (
    LazyList,
    _pieces,
    encode_json,
    encoding,
    json_line,
    json_response,
    large_event_of,
)
from fastgen.serving.http.records import OutputRecord
from tests.serving.loop_turns import LoopTurns

LOGPROBS: list[Logprobs | None] = [None, *({n: -0.5 * n, n + 1: -math.inf} for n in range(99))]
BODIES: dict[str, Any] = {
    "nothing": None,
    "empty": {"a": [], "b": {}, "c": LazyList(list), "d": PackedLogprobs()},
    "numbers": list(range(5000)),
    "texts": ["é\u2028", "a\x85", "\u2029"] * 1000,
    "nested": {"a": [{"b": [None, 1.5, -math.inf]}] * 200, "c": [[1, 2], {3: 4.0}], "d": {"e": (), 5: [6]}},
    "lazy": {"a": [LazyList(lambda: ({"x": [n]} for n in range(100)))] * 3},
    "log-probabilities": [1, PackedLogprobs(pack(LOGPROBS), len(LOGPROBS))],
}


def plain(body: Any) -> Any:
    """Returns ``body`` with lists and dicts only."""
    if isinstance(body, dict):
        return {name: plain(value) for name, value in body.items()}
    if body is None or isinstance(body, int | float | str):
        return body
    return [plain(item) for item in body]


@pytest.mark.parametrize("name", BODIES)
def test_pieces_make_the_same_json(name: str) -> None:
    body = BODIES[name]
    expected = msgspec.json.encode(plain(body))
    assert encode_json(body) == expected
    assert at_once(encoding(body)) == json_line(body) == json_line(plain(body))
    assert json.loads(json_line(body)) == json.loads(expected)


def test_pieces_are_small_however_many_answers_share_them() -> None:
    """128 answers of 127 tokens with 128 log-probabilities each."""
    logprobs: list[Logprobs] = [dict.fromkeys(range(1000, 1128), -12.345678901234567)] * 127
    answers = [
        GenerationOutput(
            request_id=1,
            index=index,
            text="a" * 127,
            token_ids=list(range(127)),
            finish_reason="length",
            prompt_token_ids=[1] * 100_000,
            logprobs=PackedLogprobs(pack(logprobs), len(logprobs)),
            metrics=RequestMetrics(queue_s=0.0, ttft_s=0.1),
        )
        for index in range(128)
    ]
    output = replace(answers[0], others=tuple(answers[1:]))
    lengths = [len(piece) for piece in _pieces(OutputRecord.of(output))]
    assert sum(lengths) > 40_000_000
    assert max(lengths) < 150_000


def test_pieces_of_long_lists_are_counted_not_weighed() -> None:
    """Neither is a piece long, nor are there very many: each costs some microseconds."""
    responses = [{"token": "a", "bytes": [97], "top_logprobs": [{"token": "b", "bytes": [98, 99]}] * 20}] * 1000
    for body, most in (
        ([*range(500_000)], 500),
        (["a"] * 200_000, 200),
        ({"choices": [{"tokens": ["a"] * 5000}] * 20}, 300),
        ({"output": [{"content": [{"logprobs": responses}]}]}, 100),
        ([[1, 2]] * 5000 + [[*range(5000)]] + [3], 200),
    ):
        assert 1 < len([*_pieces(body)]) <= most
        assert b"".join(_pieces(body)) == msgspec.json.encode(body)


def test_others_have_their_turn_while_a_large_answer_is_encoded() -> None:
    threads = []

    def items() -> Any:
        for number in range(10_000):
            threads.append(threading.current_thread())
            yield {"number": number, "text": "a" * 1000}

    def made() -> Any:
        threads.append(threading.current_thread())
        return LazyList(items)

    async def turns_for(*, is_large: bool) -> int:
        threads.clear()
        turns = LoopTurns()
        response = await json_response(made, Turns(1, share=0.5), is_large=is_large)
        turns.stop()
        assert len(json.loads(bytes(response.body))) == 10_000
        return turns.number

    assert asyncio.run(turns_for(is_large=False)) == 0
    assert set(threads) == {threading.current_thread()}
    assert asyncio.run(turns_for(is_large=True)) > 3
    maker, *encoders = threads
    assert maker is not threading.current_thread()
    assert set(encoders) == {threading.current_thread()}


def test_a_large_event_is_one_line() -> None:
    event = asyncio.run(large_event_of(BODIES["texts"], Turns(1)))
    assert event == b"data: " + json_line(BODIES["texts"]) + b"\n\n"


def test_what_has_no_json_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="object has no JSON"):
        encode_json([object()])
