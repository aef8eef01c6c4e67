"""OpenAI's and vLLM's fields become sampling parameters, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.http.openai.requests import ChatRequest, CompletionRequest
from fastgen.serving.http.openai.sampling import chat_sampling, completion_sampling, completion_tokens, named_refusal
from fastgen.serving.refusals import BadRequestError

MAX_MODEL_LEN = 100
FACTS = {"defaults": SamplingParams(temperature=0.7, top_k=5), "vocab_size": 1000}


def of_completion(num_prompt_tokens: int = 10, **fields: Any) -> SamplingParams:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "Once", **fields})
    wanted = completion_tokens(request, num_prompt_tokens, MAX_MODEL_LEN)
    return completion_sampling(request, wanted, **FACTS)  # type: ignore[arg-type]


def of_chat(num_prompt_tokens: int = 10, **fields: Any) -> SamplingParams:
    request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hello"}], **fields})
    return chat_sampling(request, num_prompt_tokens, None, max_model_len=MAX_MODEL_LEN, **FACTS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "beam_width", "temperature"),
    [
        ({}, 1, 0.7),
        ({"beam_width": 1}, 1, 0.7),
        ({"beam_width": 2}, 2, 0.0),
        ({"use_beam_search": True}, 1, 0.0),
        ({"use_beam_search": True, "temperature": 0.4}, 1, 0.4),
        ({"use_beam_search": True, "beam_width": 1}, 1, 0.0),
        ({"use_beam_search": True, "n": 2}, 2, 0.0),
        ({"use_beam_search": True, "n": 2, "beam_width": 2}, 2, 0.0),
    ],
)
def test_a_beam_search_is_greedy_and_one_beam_is_none(
    fields: dict[str, Any], beam_width: int, temperature: float
) -> None:
    for sampling in (of_completion(**fields), of_chat(**fields)):
        assert (sampling.beam_width, sampling.temperature) == (beam_width, temperature)


@pytest.mark.parametrize(("given", "top_k"), [(None, 5), (-1, 0), (0, 0), (1, 1), (7, 7)])
def test_a_top_k_of_0_or_less_keeps_all_tokens(given: int | None, top_k: int) -> None:
    assert of_completion(top_k=given).top_k == top_k


@pytest.mark.parametrize(("num_prompt_tokens", "fits"), [(10, 16), (84, 16), (85, 15), (99, 1)])
def test_a_completion_has_16_tokens_or_what_fits(num_prompt_tokens: int, fits: int) -> None:
    assert of_completion(num_prompt_tokens).max_new_tokens == fits


def test_an_answer_may_fill_the_model_and_no_more() -> None:
    assert of_completion(max_tokens=90).max_new_tokens == 90
    assert of_chat().max_new_tokens == 90
    assert of_chat(max_tokens=90, max_completion_tokens=90).max_new_tokens == 90
    for of, name in ((of_completion, "max_tokens"), (of_chat, "max_tokens"), (of_chat, "max_completion_tokens")):
        with pytest.raises(BadRequestError, match=f"^{name} is 91 .* at most 90 fit$") as refused:
            of(**{name: 91})
        assert (refused.value.param, refused.value.code) == (name, "context_length_exceeded")


# OpenAI's and vLLM's fields of both kinds of request, and what they are for the engine.
MEANT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_p": 0}, {"top_p": 1e-6}),
    ({"top_p": 0.25}, {"top_p": 0.25}),
    ({"top_p": None}, {"top_p": 1.0}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"min_tokens": 3, "max_tokens": 4}, {"min_new_tokens": 3, "max_new_tokens": 4}),
    ({"logit_bias": {"7": -2.5, "999": 1}}, {"logit_bias": {7: -2.5, 999: 1.0}}),
    ({"n": 3, "seed": 0}, {"n": 3, "seed": 0}),
    ({"stop": "a"}, {"stop": ["a"]}),
    ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
    ({"min_p": 0.5, "repetition_penalty": 1.5}, {"min_p": 0.5, "repetition_penalty": 1.5}),
    ({"stop_token_ids": [0, 999], "ignore_eos": True}, {"stop_token_ids": [0, 999], "ignore_eos": True}),
    ({"beam_width": 2, "length_penalty": 2.5}, {"beam_width": 2, "length_penalty": 2.5}),
    ({"priority": -3, "timeout_s": 1.5}, {"priority": -3, "timeout_s": 1.5}),
    ({"stream": True, "stream_options": {"include_usage": True}}, {}),
]


@pytest.mark.parametrize(("fields", "meant"), MEANT, ids=lambda each: ",".join(each))
def test_every_field_has_its_meaning(fields: dict[str, Any], meant: dict[str, Any]) -> None:
    for of in (of_completion, of_chat):
        sampling = of(**fields)
        found = {name: getattr(sampling, name) for name in meant}
        found = {name: [*value] if isinstance(value, tuple) else value for name, value in found.items()}
        assert found == meant


@pytest.mark.parametrize(
    ("fields", "logprobs", "prompt_logprobs"),
    [
        ({}, None, None),
        ({"logprobs": 0}, 0, None),
        ({"logprobs": 5}, 5, None),
        ({"echo": True}, None, None),
        ({"logprobs": 0, "echo": True}, 0, 0),
        ({"logprobs": 3, "echo": True}, 3, 3),
    ],
)
def test_a_completion_has_log_probabilities_of_its_prompt_if_it_echoes_it(
    fields: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None
) -> None:
    sampling = of_completion(**fields)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (logprobs, prompt_logprobs)


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_a_chat_has_as_many_log_probabilities_as_it_asks_for(fields: dict[str, Any], logprobs: int | None) -> None:
    assert of_chat(**fields).logprobs == logprobs


def test_for_an_answer_of_no_tokens_the_engine_generates_one() -> None:
    assert of_completion(max_tokens=0).max_new_tokens == 1


@pytest.mark.parametrize(("fields", "is_taken"), [({}, True), ({"n": 1}, True), ({"n": 2}, False)])
def test_best_of_1_is_taken_for_one_answer(fields: dict[str, Any], is_taken: bool) -> None:
    if is_taken:
        assert of_completion(best_of=1, **fields).n == 1
        return
    with pytest.raises(BadRequestError, match=r"^best_of cannot be honoured") as refused:
        of_completion(best_of=1, **fields)
    assert refused.value.param == "best_of"


def test_a_refusal_of_the_engine_is_about_openais_field() -> None:
    for ours, theirs in (
        ("max_new_tokens", "max_tokens"),
        ("min_new_tokens", "min_tokens"),
        ("prompt_logprobs", "logprobs"),
        ("stop_token_ids", "stop_token_ids"),
    ):
        error = named_refusal(f"{ours} is too large", code="a")
        assert (str(error), error.param, error.code) == (f"{theirs} is too large", theirs, "a")
    assert named_refusal("the prompt is too long").param is None
