"""A body takes no longer to refuse than to accept, whatever is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from fastgen.serving.admission.request_limits import MAX_TOKEN_IDS
from fastgen.serving.http.errors import invalid_request
from fastgen.serving.http.generate import GenerateBody
from fastgen.serving.http.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest
from fastgen.serving.http.sagemaker import Invocation

MANY = 20_000
ONCE: dict[str, Any] = {"model": "m", "prompt": "Once"}
PARTS = [{"type": "text", "text": "a"}] * 100


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (CompletionRequest, {**ONCE, **{f"u{number}": 1 for number in range(MANY)}}, "u0"),
        (CompletionRequest, {**ONCE, "stop": [1] * MANY}, "stop"),
        (CompletionRequest, {**ONCE, "logit_bias": {f"a{number}": 1 for number in range(MANY)}}, "logit_bias"),
        (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": PARTS}] * 41}, "messages"),
        (ChatRequest, {"model": "m", "messages": [], "metadata": {f"a{n}": "b" for n in range(MANY)}}, "messages"),
        (DetokenizeRequest, {"tokens": [-1] * MANY}, "tokens[0]"),
        (GenerateBody, {"prompt": "Once", **{f"u{number}": 1 for number in range(MANY)}}, "u0"),
        (GenerateBody, {"prompt": ["a"] * MANY}, "prompt[0]"),
        (GenerateBody, {"prompt": "Once", "stop": [1] * MANY}, "stop[0]"),
        (GenerateBody, {"messages": [1] * MANY}, "messages[0]"),
        (GenerateBody, {"prompt": "Once", "logit_bias": {f"a{n}": 1 for n in range(70_000)}}, "logit_bias"),
        (Invocation, {"inputs": [1] * MANY}, "inputs[0]"),
        (Invocation, {"inputs": "a", "parameters": {"stop": [1] * MANY}}, "parameters.stop[0]"),
    ],
)
def test_few_errors_are_found(model: type[BaseModel], body: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() <= 3
    assert invalid_request(refused.value.errors(), body).param == param


def test_as_many_parts_as_may_be() -> None:
    ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": PARTS}] * 40})


@pytest.mark.parametrize("lengths", [[MAX_TOKEN_IDS], [MAX_TOKEN_IDS // 2, MAX_TOKEN_IDS // 2]])
def test_as_many_token_ids_as_may_be_and_one_more(lengths: list[int]) -> None:
    prompts = [[5] * length for length in lengths]
    CompletionRequest.model_validate({**ONCE, "prompt": prompts})
    prompts[-1].append(5)
    with pytest.raises(ValidationError, match="at most 1048576 token ids in all"):
        CompletionRequest.model_validate({**ONCE, "prompt": prompts})
