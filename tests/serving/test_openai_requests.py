"""A body takes no longer to refuse than to accept, whatever is wrong with it."""

from __future__ import annotations

import math
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError

from fastgen.serving.admission.request_limits import MAX_TOKEN_IDS
from fastgen.serving.http.errors import invalid_request
from fastgen.serving.http.generate import GenerateBody
from fastgen.serving.http.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest
from fastgen.serving.http.openai.responses.requests import ResponsesRequest
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
        (ResponsesRequest, {"model": "m", "input": [1] * 4000}, "input[0]"),
        *(
            (ResponsesRequest, {"model": "m", "input": [{"role": role, "content": [1] * 4000}]}, "input[0].content[0]")
            for role in ("user", "assistant")
        ),
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


MESSAGE = {"role": "user", "content": "Hello"}
FUNCTIONS = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(129)]
BASES: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: ONCE,
    ChatRequest: {"model": "m", "messages": [MESSAGE]},
    ResponsesRequest: {"model": "m", "input": "Hello"},
    GenerateBody: {"prompt": "Once"},
    Invocation: {"inputs": "Once"},
}


def tools_of(strict: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "a", "strict": strict}}]


def names(number: int) -> dict[str, Any]:
    return {str(each): "a" for each in range(number)}


def said(arguments: str) -> list[dict[str, Any]]:
    """Returns messages with a call."""
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}]


# Of each field a value that is just taken, and one that is just not: docs/openai-api.md and docs/sampling.md say so.
LIMITS: list[tuple[type[BaseModel], str, Any, Any]] = [
    (CompletionRequest, "prompt", ["a"] * 2048, ["a"] * 2049),
    (CompletionRequest, "prompt", [0, 2**31 - 1], [2**31]),
    (CompletionRequest, "prompt", [[0]], [[5, -1]]),
    (CompletionRequest, "max_tokens", 2**31 - 1, 2**31),
    (CompletionRequest, "stop", ["a"] * 4, ["a"] * 5),
    (CompletionRequest, "stop", "a", ""),
    (CompletionRequest, "logit_bias", dict.fromkeys(names(1024), 1.0), dict.fromkeys(names(1025), 1.0)),
    (CompletionRequest, "user", "a" * 512, "a" * 513),
    (CompletionRequest, "timeout_s", 1e300, math.inf),
    (CompletionRequest, "structured_outputs", {"choice": ["a"] * 1024}, {"choice": ["a"] * 1025}),
    (CompletionRequest, "structured_outputs", {"regex": "a"}, {"regex": ""}),
    (CompletionRequest, "guided_choice", ["a"], []),
    (ChatRequest, "messages", [MESSAGE] * 4096, [MESSAGE] * 4097),
    (ChatRequest, "messages", [{**MESSAGE, "content": PARTS[:64]}] * 64, [{**MESSAGE, "content": PARTS[:17]}] * 241),
    (ChatRequest, "messages", said('{"a": 1}'), said('{"a": 1')),
    (ChatRequest, "tools", FUNCTIONS[:128], FUNCTIONS),
    (ChatRequest, "tools", tools_of(True), tools_of("true")),
    (ChatRequest, "metadata", names(16), names(17)),
    (ChatRequest, "metadata", {"a" * 64: "b"}, {"a" * 65: "b"}),
    (ChatRequest, "chat_template_kwargs", names(64), names(65)),
    (ChatRequest, "documents", [{}] * 1024, [{}] * 1025),
    (ResponsesRequest, "input", [MESSAGE], []),
    (GenerateBody, "top_k", 2**63 - 1, 2**63),
    (GenerateBody, "top_k", 0, -1),
    (GenerateBody, "presence_penalty", 2.0, 2.1),
    (GenerateBody, "presence_penalty", -2.0, -2.1),
    (GenerateBody, "logit_bias", {"5": 100.0}, {"5": 100.1}),
    (GenerateBody, "logit_bias", {"5": -100.0}, {"5": -100.1}),
    (GenerateBody, "stop_token_ids", [0, 2**31 - 1], [2**31]),
    (GenerateBody, "stop_token_ids", [0], [-1]),
    (GenerateBody, "stop", "a", ""),
    (GenerateBody, "temperature", 1.0, "1"),
    (GenerateBody, "temperature", 1e300, math.inf),
    (Invocation, "parameters", {"top_k": 2**63 - 1}, {"top_k": 2**63}),
    (Invocation, "parameters", {"temperature": 1.0}, {"temperature": "1"}),
    (Invocation, "parameters", {"temperature": 1e300}, {"temperature": math.inf}),
    (Invocation, "stream", True, "true"),
]


@pytest.mark.parametrize(("model", "field", "most", "too_much"), LIMITS)
def test_a_field_takes_what_is_documented_and_no_more(
    model: type[BaseModel], field: str, most: Any, too_much: Any
) -> None:
    model.model_validate({**BASES[model], field: most})
    body = {**BASES[model], field: too_much}
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    param = invalid_request(refused.value.errors(), body).param
    assert param is not None
    assert param.startswith(field)


@pytest.mark.parametrize(
    "prompt",
    [
        *("", "a", ["a"], ["a", "b"], [0], [5, 6], [-1], [2**31], [1.5], [[5]], [[0], [5]], [[-1]]),
        *([], [[]], [["a"]], ["a", [1]], [1, "a"], None, 3, {}),
    ],
    ids=str,
)
def test_the_documented_prompts_are_those_that_are_taken(prompt: Any) -> None:
    schema = CompletionRequest.model_json_schema()["properties"]["prompt"]
    try:
        CompletionRequest.model_validate({"model": "m", "prompt": prompt})
        is_taken = True
    except ValidationError:
        is_taken = False
    assert jsonschema.Draft202012Validator(schema).is_valid(prompt) is is_taken


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": 3.0}, "temperature", "temperature: input should be less than or equal to 2"),
        ({"stop": 3}, "stop", "stop: input should be a valid string, or input should be a valid list"),
        ({"x" * 300: 1}, "x" * 200, "x" * 200 + ": this field is not known"),
        ({"model": None}, "model", "model: input should be a valid string"),
        ({"logit_bias": names(1025)}, "logit_bias", "logit_bias: at most 1024 members, not 1025"),
    ],
)
def test_a_refusal_says_which_field_is_wrong_and_what_it_should_be(
    fields: dict[str, Any], param: str, message: str
) -> None:
    body = {**ONCE, **fields}
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate(body)
    refusal = invalid_request(refused.value.errors(), body)
    assert (refusal.param, str(refusal)) == (param, message)


@pytest.mark.parametrize("lengths", [[MAX_TOKEN_IDS], [MAX_TOKEN_IDS // 2, MAX_TOKEN_IDS // 2]])
def test_as_many_token_ids_as_may_be_and_one_more(lengths: list[int]) -> None:
    prompts = [[5] * length for length in lengths]
    CompletionRequest.model_validate({**ONCE, "prompt": prompts})
    prompts[-1].append(5)
    with pytest.raises(ValidationError, match="at most 1048576 token ids in all"):
        CompletionRequest.model_validate({**ONCE, "prompt": prompts})
