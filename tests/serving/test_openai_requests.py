"""A body takes no longer to refuse than to accept, whatever is wrong with it."""

from __future__ import annotations

import math
from typing import Annotated, Any

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError

from fastgen.runtime.requests.response_format import parse_response_format
from fastgen.serving.admission.request_limits import MAX_TOKEN_IDS
from fastgen.serving.http.errors import invalid_request
from fastgen.serving.http.generate import CheckBody, GenerateBody
from fastgen.serving.http.openai.formats import format_field, naming_format, required_format
from fastgen.serving.http.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from fastgen.serving.http.openai.responses.requests import ResponsesRequest
from fastgen.serving.http.openai.validation import refused
from fastgen.serving.http.sagemaker import Invocation
from fastgen.serving.refusals import BadRequestError

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
    TokenizeRequest: {"prompt": "Once"},
    DetokenizeRequest: {"tokens": [1]},
    CheckBody: {"requests": []},
}


def tools_of(strict: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "a", "strict": strict}}]


def said_with(**fields: Any) -> list[dict[str, Any]]:
    """Returns messages with one of the assistant that has these fields."""
    return [{"role": "assistant", "content": "a", **fields}]


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": ""}}


def format_named(name: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": {}}}


def names(number: int) -> dict[str, Any]:
    return {str(each): "a" for each in range(number)}


def said(arguments: str) -> list[dict[str, Any]]:
    """Returns messages with a call."""
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}]


OPENAIS = (CompletionRequest, ChatRequest, ResponsesRequest)
FUNCTION = {"type": "function", "name": "add"}
INCLUDED = "message.output_text.logprobs"


def allowed(number: int) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION] * number}


# Of each field a value that is just taken, and one that is just not: docs/openai-api.md and docs/sampling.md say so.
LIMITS: list[tuple[type[BaseModel], str, Any, Any]] = [
    (CompletionRequest, "prompt", ["a"] * 2048, ["a"] * 2049),
    (CompletionRequest, "prompt", [0, 2**31 - 1], [2**31]),
    (CompletionRequest, "prompt", [[0]], [[5, -1]]),
    (CompletionRequest, "prompt", [5, 2**31 - 1], [5, 2**31]),
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
    *((kind, "temperature", 2.0, 2.1) for kind in OPENAIS),
    *((kind, "temperature", 0.0, -0.1) for kind in OPENAIS),
    *((kind, "top_p", 1.0, 1.1) for kind in OPENAIS),
    *((kind, "top_p", 0.0, -0.1) for kind in OPENAIS),
    *((kind, "seed", 2**63 - 1, 2**63) for kind in OPENAIS),
    *((kind, "seed", -(2**63), -(2**63) - 1) for kind in OPENAIS),
    *((kind, "stop", ["a"] * 4, ["a"] * 5) for kind in OPENAIS),
    *((kind, "stop", "a" * 1000, "a" * 1001) for kind in OPENAIS),
    (CompletionRequest, "n", 1, 0),
    (CompletionRequest, "n", 128, 129),
    (CompletionRequest, "presence_penalty", 2.0, 2.1),
    (CompletionRequest, "presence_penalty", -2.0, -2.1),
    (CompletionRequest, "frequency_penalty", 2.0, 2.1),
    (CompletionRequest, "frequency_penalty", -2.0, -2.1),
    (CompletionRequest, "logit_bias", {"5": 100.0}, {"5": 100.1}),
    (CompletionRequest, "logit_bias", {"5": -100.0}, {"5": -100.1}),
    (CompletionRequest, "logit_bias", {"9" * 9: 1.0}, {"9" * 10: 1.0}),
    (CompletionRequest, "beam_width", 1, 0),
    (CompletionRequest, "beam_width", 256, 257),
    (CompletionRequest, "timeout_s", 1e-9, 0.0),
    (CompletionRequest, "max_tokens", 0, -1),
    (CompletionRequest, "logprobs", 0, -1),
    (CompletionRequest, "logprobs", 5, 6),
    (CompletionRequest, "best_of", 1, 0),
    (CompletionRequest, "best_of", 128, 129),
    (CompletionRequest, "suffix", "", "a"),
    (CompletionRequest, "response_format", format_named("a" * 64), format_named("a" * 65)),
    (CompletionRequest, "top_k", -1, -2),
    (CompletionRequest, "top_k", 2**31 - 1, 2**31),
    (CompletionRequest, "min_p", 0.0, -0.1),
    (CompletionRequest, "min_p", 1.0, 1.1),
    (CompletionRequest, "repetition_penalty", 1e-9, 0.0),
    (CompletionRequest, "min_tokens", 0, -1),
    (CompletionRequest, "min_tokens", 2**31 - 1, 2**31),
    (CompletionRequest, "stop_token_ids", [0, 2**31 - 1], [2**31]),
    (CompletionRequest, "stop_token_ids", [0] * 1024, [0] * 1025),
    (CompletionRequest, "truncate_prompt_tokens", -1, -2),
    (CompletionRequest, "truncate_prompt_tokens", 2**31 - 1, 2**31),
    (CompletionRequest, "length_penalty", -10.0, -10.1),
    (CompletionRequest, "length_penalty", 10.0, 10.1),
    (CompletionRequest, "priority", 2**31 - 1, 2**31),
    (CompletionRequest, "priority", -(2**31) + 1, -(2**31)),
    (CompletionRequest, "guided_regex", "a", ""),
    (CompletionRequest, "guided_grammar", "a", ""),
    (CompletionRequest, "guided_choice", ["a"] * 1024, ["a"] * 1025),
    (CompletionRequest, "guided_choice", ["a"], [""]),
    (CompletionRequest, "structured_outputs", {"grammar": "a"}, {"grammar": ""}),
    (CompletionRequest, "bad_words", [], ["a"]),
    (CompletionRequest, "logits_processors", [], ["a"]),
    (CompletionRequest, "vllm_xargs", {}, {"a": 1}),
    (CompletionRequest, "return_token_ids", False, 0),
    (ChatRequest, "max_completion_tokens", 1, 0),
    (ChatRequest, "max_completion_tokens", 2**31 - 1, 2**31),
    (ChatRequest, "max_tokens", 1, 0),
    (ChatRequest, "max_tokens", 2**31 - 1, 2**31),
    (ChatRequest, "top_logprobs", 0, -1),
    (ChatRequest, "top_logprobs", 20, 21),
    (ChatRequest, "modalities", ["text"], []),
    (ChatRequest, "modalities", ["text"], ["text", "text"]),
    (ChatRequest, "metadata", {"a": "b" * 512}, {"a": "b" * 513}),
    (ChatRequest, "reasoning_effort", "a" * 32, "a" * 33),
    (ChatRequest, "messages", said_with(tool_calls=[CALL] * 128), said_with(tool_calls=[CALL] * 129)),
    (
        ChatRequest,
        "messages",
        said_with(tool_calls=[{**CALL, "index": 0}]),
        said_with(tool_calls=[{**CALL, "index": -1}]),
    ),
    (ChatRequest, "messages", said_with(annotations=[]), said_with(annotations=[1])),
    (ChatRequest, "messages", [{**MESSAGE, "content": PARTS * 40 + PARTS[:96]}], [{**MESSAGE, "content": PARTS * 41}]),
    (ResponsesRequest, "max_output_tokens", 1, 0),
    (ResponsesRequest, "max_output_tokens", 2**31 - 1, 2**31),
    (ResponsesRequest, "max_tool_calls", 1, 0),
    (ResponsesRequest, "max_tool_calls", 2**31 - 1, 2**31),
    (ResponsesRequest, "top_logprobs", 0, -1),
    (ResponsesRequest, "top_logprobs", 20, 21),
    (ResponsesRequest, "include", [INCLUDED] * 16, [INCLUDED] * 17),
    (ResponsesRequest, "metadata", names(16), names(17)),
    (ResponsesRequest, "tools", [FUNCTION] * 128, [FUNCTION] * 129),
    (ResponsesRequest, "tool_choice", allowed(1), allowed(0)),
    (ResponsesRequest, "tool_choice", allowed(128), allowed(129)),
    (ResponsesRequest, "reasoning", {"effort": "a" * 32}, {"effort": "a" * 33}),
    (ResponsesRequest, "input", [MESSAGE] * 4096, [MESSAGE] * 4097),
    (GenerateBody, "prompt", [0, 2**31 - 1], [2**31]),
    (GenerateBody, "max_new_tokens", 1, 0),
    (GenerateBody, "max_new_tokens", 2**63 - 1, 2**63),
    (GenerateBody, "min_new_tokens", 0, -1),
    (GenerateBody, "repetition_penalty", 1e-9, 0.0),
    (GenerateBody, "frequency_penalty", 2.0, 2.1),
    (GenerateBody, "frequency_penalty", -2.0, -2.1),
    (GenerateBody, "logit_bias", {"0": 1.0}, {"-1": 1.0}),
    (GenerateBody, "logit_bias", {str(2**31 - 1): 1.0}, {str(2**31): 1.0}),
    (GenerateBody, "logit_bias", dict.fromkeys(range(65_536), 1.0), dict.fromkeys(range(65_537), 1.0)),
    (GenerateBody, "temperature", 0.0, -0.1),
    (GenerateBody, "top_p", 1.0, 1.1),
    (GenerateBody, "top_p", 1e-9, 0.0),
    (GenerateBody, "min_p", 0.0, -0.1),
    (GenerateBody, "min_p", 1.0, 1.1),
    (GenerateBody, "n", 1, 0),
    (GenerateBody, "n", 128, 129),
    (GenerateBody, "timeout_s", 1e-9, 0.0),
    (GenerateBody, "beam_width", 1, 0),
    (GenerateBody, "beam_width", 256, 257),
    (GenerateBody, "length_penalty", -10.0, -10.1),
    (GenerateBody, "length_penalty", 10.0, 10.1),
    (GenerateBody, "priority", 2**63 - 1, 2**63),
    (GenerateBody, "priority", -(2**63), -(2**63) - 1),
    (CheckBody, "requests", [{"prompt": "a"}] * 64, [{"prompt": "a"}] * 65),
    (Invocation, "inputs", ["a"] * 2048, ["a"] * 2049),
    (Invocation, "parameters", {"truncate": 1}, {"truncate": 0}),
    (Invocation, "parameters", {"truncate": 2**31 - 1}, {"truncate": 2**31}),
    (Invocation, "parameters", {"stop_token_ids": [2**63 - 1]}, {"stop_token_ids": [2**63]}),
    (Invocation, "parameters", {"best_of": 1, "top_n_tokens": 0}, {"best_of": 0}),
    (Invocation, "parameters", {"watermark": False}, {"top_n_tokens": 1}),
    (TokenizeRequest, "messages", [MESSAGE], []),
    (TokenizeRequest, "messages", [MESSAGE] * 4096, [MESSAGE] * 4097),
    (TokenizeRequest, "tools", FUNCTIONS[:128], FUNCTIONS),
    (DetokenizeRequest, "tokens", [0, 2**31 - 1], [2**31]),
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
        ({"temprature": 1}, "temprature", "temprature: this field is not known; did you mean 'temperature'?"),
        ({"inputs": "a", "parameters": {}}, "inputs", "inputs: this field is not known"),
        ({"sufix": "a"}, "sufix", "sufix: this field is not known"),  # and `suffix` would be refused
        (
            {"stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "stream_options.include_usages: this field is not known; did you mean 'include_usage'?",
        ),
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


@pytest.mark.parametrize("field", ["inputs", "parameters"])
def test_a_body_of_tgi_is_told_the_path_that_takes_it(field: str) -> None:
    body = {field: {}}
    with pytest.raises(ValidationError) as refused:
        GenerateBody.model_validate(body)
    refusal = invalid_request(refused.value.errors(), body)
    assert refusal.param == field
    assert "POST /invocations takes the bodies of TGI and LMI" in str(refusal)


@pytest.mark.parametrize("lengths", [[MAX_TOKEN_IDS], [MAX_TOKEN_IDS // 2, MAX_TOKEN_IDS // 2]])
def test_as_many_token_ids_as_may_be_and_one_more(lengths: list[int]) -> None:
    prompts = [[5] * length for length in lengths]
    CompletionRequest.model_validate({**ONCE, "prompt": prompts})
    prompts[-1].append(5)
    with pytest.raises(ValidationError, match="at most 1048576 token ids in all"):
        CompletionRequest.model_validate({**ONCE, "prompt": prompts})


OBJECT = {"type": "json_schema", "schema": {"type": "object"}}
SCHEMA: dict[str, Any] = {"type": "object"}
# The fields that give a format, the first of them, and the format.
FORMATS: list[tuple[dict[str, Any], str | None, Any]] = [
    ({}, None, None),
    ({"response_format": {"type": "text"}}, None, None),
    ({"structured_outputs": {}}, None, None),
    ({"structured_outputs": {"json_object": False, "disable_any_whitespace": True}}, None, None),
    ({"response_format": {"type": "json_object"}}, "response_format", {"type": "json_object"}),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", {"type": "json_object"}),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", {"type": "regex", "pattern": "a+"}),
    (
        {"structured_outputs": {"choice": ["a", "ß"]}},
        "structured_outputs.choice",
        {"type": "grammar", "grammar": 'start: "a" | "ß"'},
    ),
    (
        {"structured_outputs": {"grammar": 'start: "a"'}},
        "structured_outputs.grammar",
        {"type": "grammar", "grammar": 'start: "a"'},
    ),
    ({"guided_json": '{"type": "object"}'}, "guided_json", OBJECT),
    ({"guided_regex": "a+"}, "guided_regex", {"type": "regex", "pattern": "a+"}),
    ({"guided_choice": ["a"]}, "guided_choice", {"type": "grammar", "grammar": 'start: "a"'}),
    ({"guided_grammar": 'start: "a"'}, "guided_grammar", {"type": "grammar", "grammar": 'start: "a"'}),
]


@pytest.mark.parametrize(("fields", "param", "wanted"), FORMATS, ids=lambda each: str(each)[:60])
def test_one_field_gives_the_format_of_an_answer(fields: dict[str, Any], param: str | None, wanted: Any) -> None:
    request = CompletionRequest.model_validate({**ONCE, **fields})
    assert format_field(request) == param
    assert required_format(request) == (None if wanted is None else parse_response_format(wanted))


@pytest.mark.parametrize("is_compact", [True, False, None])
def test_json_is_compact_only_if_that_is_asked_for(is_compact: bool | None) -> None:
    outputs = {"json": SCHEMA, "disable_any_whitespace": is_compact}
    found = required_format(CompletionRequest.model_validate({**ONCE, "structured_outputs": outputs}))
    assert found is not None
    assert found.is_compact is bool(is_compact)


def test_a_refusal_of_the_format_is_about_the_field_that_gives_it() -> None:
    def refused(field: str | None, message: str) -> tuple[str | None, str]:
        with pytest.raises(BadRequestError) as error, naming_format(field):
            raise BadRequestError(message, param="its own")
        return error.value.param, str(error.value)

    message = "response_format is refused: response_format"
    assert refused("guided_json", message) == ("guided_json", "guided_json is refused: response_format")
    assert refused("guided_json", "n is too large") == ("its own", "n is too large")
    assert refused(None, message) == ("its own", message)


@pytest.mark.parametrize(
    ("include", "continuous", "is_always"),
    [(True, True, True), (True, False, False), (False, True, False), (None, True, False), (True, None, False)],
)
def test_every_chunk_reports_the_usage_if_both_fields_ask_for_it(
    include: bool | None, continuous: bool | None, is_always: bool
) -> None:
    options = StreamOptions(include_usage=include, continuous_usage_stats=continuous)
    assert options.reports_usage_always is is_always


@pytest.mark.parametrize(("unless", "equal"), [(1, True), (False, 0), (0, False), ("", None)])
def test_a_field_without_effect_takes_only_the_value_that_means_nothing(unless: Any, equal: Any) -> None:
    """A number that is equal to a truth value does not mean the same."""

    class Body(BaseModel):
        field: Annotated[Any, refused("it would change the answer", unless=unless)] = None

    for given in (None, unless):
        assert Body.model_validate({"field": given}).field == given
    for given in (equal, 2, "a", [unless]):
        if given is not None:
            with pytest.raises(ValidationError, match="cannot be honoured: it would change the answer"):
                Body.model_validate({"field": given})


def test_an_object_with_more_fields_than_there_are_is_refused_by_its_first_unknown_one() -> None:
    body = {"first": 1, "model": "m", "second": 2, "tokens": [1]}
    with pytest.raises(ValidationError) as refused_:
        DetokenizeRequest.model_validate(body)
    assert [error["loc"] for error in refused_.value.errors()] == [("first",)]
    body = {"first": 1, "second": 2}
    with pytest.raises(ValidationError) as refused_:
        DetokenizeRequest.model_validate(body)
    assert {error["loc"] for error in refused_.value.errors()} == {("first",), ("second",), ("tokens",)}
    DetokenizeRequest.model_validate({"model": "m", "tokens": [1]})
