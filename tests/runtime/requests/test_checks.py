"""Limits of a model on requests: each is tested at the last value that it takes and the first that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.requests.checks import RequestChecks
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams


class Formats:
    """Notes the formats that it is given to compile, and refuses regular expressions."""

    def __init__(self) -> None:
        self.compiled: list[ResponseFormat] = []

    def compile(self, response_format: ResponseFormat) -> None:
        self.compiled.append(response_format)
        if response_format.kind == "regex":
            raise InvalidArgumentError("no regular expressions")


def checks(*, has_tokenizer: bool = True, formats: Formats | None = None) -> RequestChecks:
    return RequestChecks(10, 20, frozenset({8, 9}), has_tokenizer, formats)


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        ([], "the prompt has no tokens"),
        ([0, -1, 3], "prompt token 1 is id -1; the model's ids are 0 to 9"),
        ([10, 0], "prompt token 0 is id 10; the model's ids are 0 to 9"),
        ([0, 9, 11, -1], "prompt token 2 is id 11;"),
    ],
)
def test_a_prompt_has_tokens_of_the_model(prompt_ids: list[int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        checks().check(prompt_ids, SamplingParams(max_new_tokens=1))
    checks().check([0, 9], SamplingParams(max_new_tokens=1))


@pytest.mark.parametrize(
    ("num_prompt", "max_new_tokens", "room", "advice"),
    [
        (15, 6, 5, "makes 21 tokens, max_model_len is 20; ask for at most 5 new tokens or shorten the prompt"),
        (19, 2, 1, "ask for at most 1 new tokens or shorten the prompt"),
        (20, 1, 0, "max_model_len is 20; shorten the prompt"),
        (22, 1, -2, "max_model_len is 20; shorten the prompt"),
    ],
)
def test_a_request_that_is_too_long_is_told_how_much_room_there_is(
    num_prompt: int, max_new_tokens: int, room: int, advice: str
) -> None:
    with pytest.raises(RequestTooLargeError, match=advice) as refused:
        checks().check([1] * num_prompt, SamplingParams(max_new_tokens=max_new_tokens))
    assert refused.value.room == room
    checks().check([1] * 15, SamplingParams(max_new_tokens=5))


@pytest.mark.parametrize(
    ("fields", "widest"),
    [({}, 8), ({"ignore_eos": True}, 10), ({"stop_token_ids": [7, 9]}, 7), ({"stop_token_ids": list(range(9))}, 1)],
)
def test_as_many_beams_as_tokens_that_end_none_may_continue(fields: dict[str, Any], widest: int) -> None:
    def check(beam_width: int) -> None:
        checks().check([1], SamplingParams(max_new_tokens=1, beam_width=beam_width, **fields))

    check(widest)
    check(1)
    with pytest.raises(InvalidArgumentError, match=f"beam_width={widest + 1} beams cannot all continue"):
        check(widest + 1)


def test_texts_need_a_tokenizer() -> None:
    stop = SamplingParams(max_new_tokens=1, stop=["x"])
    formatted = SamplingParams(max_new_tokens=1, response_format=ResponseFormat("json_object"))
    bare = checks(has_tokenizer=False)
    bare.check([1], SamplingParams(max_new_tokens=1))
    with pytest.raises(InvalidArgumentError, match="stop strings need a tokenizer"):
        bare.check([1], stop)
    with pytest.raises(InvalidArgumentError, match="response_format needs a tokenizer"):
        bare.check([1], formatted)
    formats = Formats()
    checks(formats=formats).check([1], stop)
    assert formats.compiled == []


def test_parameters_are_checked_once_while_they_stay_the_same_and_again_where_they_were_refused() -> None:
    formats = Formats()
    one, other = (SamplingParams(max_new_tokens=1, response_format=ResponseFormat("json_object")) for _ in range(2))
    refused = SamplingParams(max_new_tokens=1, response_format=ResponseFormat("regex", "a"))
    found = checks(formats=formats)
    for sampling, num_compiled in ((one, 1), (one, 1), (other, 2), (one, 3)):
        found.check([1], sampling)
        assert len(formats.compiled) == num_compiled
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="no regular expressions"):
            found.check([1], refused)
    with pytest.raises(InvalidArgumentError, match="logprobs must be at most the vocabulary's size, 10"):
        found.check([1], SamplingParams(max_new_tokens=1, logprobs=11))
