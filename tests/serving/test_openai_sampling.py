"""OpenAI's and vLLM's fields become sampling parameters, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.http.openai.requests import ChatRequest, CompletionRequest
from fastgen.serving.http.openai.sampling import chat_sampling, completion_sampling
from fastgen.serving.refusals import BadRequestError

FACTS = {"defaults": SamplingParams(temperature=0.7, top_k=5), "max_model_len": 100, "vocab_size": 1000}


def of_completion(num_prompt_tokens: int = 10, **fields: Any) -> SamplingParams:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "Once", **fields})
    return completion_sampling(request, num_prompt_tokens, **FACTS)  # type: ignore[arg-type]


def of_chat(num_prompt_tokens: int = 10, **fields: Any) -> SamplingParams:
    request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hello"}], **fields})
    return chat_sampling(request, num_prompt_tokens, None, **FACTS)  # type: ignore[arg-type]


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
