"""Unsupported requests are refused by name, with the status and the field in OpenAI's format."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from fastapi import FastAPI, HTTPException

from fastgen.errors import GenerationError
from fastgen.serving.http.errors import add_error_handlers, error_body, error_response, invalid_request, is_json
from fastgen.serving.refusals import (
    BadRequestError,
    EngineDiedError,
    ForbiddenError,
    OverloadedError,
    RequestTimeoutError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnknownModelError,
    UnsupportedMediaError,
)
from tests.serving.server_process import ServerProcess

MODEL = "tiny-llama"
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
ONCE: dict[str, Any] = {"model": MODEL, "prompt": "Once"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def refusal(client: openai.OpenAI, path: str, body: dict[str, Any]) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as refused:
        client.post(path, body=body, cast_to=dict[str, Any])
    error = refused.value
    assert error.type == "invalid_request_error"
    assert isinstance(error.body, dict)
    assert set(error.body) == {"message", "type", "param", "code"}
    assert error.response.headers["x-request-id"]
    return error


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"surprise": 1}, "surprise"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": "x" * 1001}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5000": 1}}, "logit_bias"),
    ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include": True}}, "stream_options.include"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop_token_ids": [5000]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"beam_width": 0}, "beam_width"),
    ({"beam_width": 2, "temperature": 1}, "beam_width"),
    ({"beam_width": 2, "stop": "a"}, "beam_width"),
    ({"beam_width": 2, "n": 3}, "n"),
    ({"priority": 1.5}, "priority"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"user": 5}, "user"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"skip_special_tokens": False, "spaces_between_special_tokens": True}, "spaces_between_special_tokens"),
    ({"skip_special_tokens": False, "stop": "a<|end|>"}, "stop"),
    ({"use_beam_search": True, "n": 2, "beam_width": 3}, "use_beam_search"),
    ({"use_beam_search": True, "n": 2, "temperature": 1}, "beam_width"),
    ({"length_penalty": 11}, "length_penalty"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_json": {"x-guidance": {}}}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {"type": "fish"}}}, "structured_outputs.json"),
    *(
        ({name: value}, name)
        for name, value in {
            "guided_whitespace_pattern": " ",
            "allowed_token_ids": [1],
            "bad_words": ["a"],
            "prompt_logprobs": 1,
            "logits_processors": ["a"],
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "request_id": "a",
            "cache_salt": "a",
            "kv_transfer_params": {},
            "vllm_xargs": {"a": 1},
        }.items()
    ),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [5000]}, "prompt"),
    ({"prompt": "word " * 3000}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"messages": []}, "messages"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"prompt_embeds": "a"}, "prompt_embeds"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "friend", "content": "a"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
    (
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "b"}]},
        "messages[0].reasoning_content",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "fish"}}}},
        "response_format",
    ),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": TOOL}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"store": True}, "store"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    *(
        ({name: value}, name)
        for name, value in {
            "audio": {"voice": "a"},
            "function_call": "auto",
            "functions": [],
            "moderation": {},
            "prediction": {"type": "content", "content": "a"},
            "prompt_cache_options": {},
            "reasoning_effort": "high",
            "verbosity": "low",
            "web_search_options": {},
        }.items()
    ),
    ({"prompt": "Once"}, "prompt"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ({"documents": ["a"]}, "documents[0]"),
    ({"tools": [TOOL], "guided_choice": ["a"]}, "tools"),
    *(
        ({name: value}, name)
        for name, value in {
            "chat_template": "{{ messages }}",
            "echo": True,
            "include_reasoning": False,
            "mm_processor_kwargs": {},
            "media_io_kwargs": {},
        }.items()
    ),
]


def test_completions_are_refused_by_name(client: openai.OpenAI) -> None:
    for fields, param in SHARED + COMPLETIONS:
        error = refusal(client, "/completions", ONCE | fields)
        assert (error.status_code, error.param) == (400, param), error.message
        assert len(error.message) < 2500


def test_chats_are_refused_by_name(client: openai.OpenAI) -> None:
    for fields, param in SHARED + CHATS:
        error = refusal(client, "/chat/completions", HELLO | fields)
        assert (error.status_code, error.param) == (400, param), error.message


def test_a_stream_that_cannot_begin_has_a_status(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "fish"}}}
    error = refusal(client, "/chat/completions", HELLO | {"response_format": schema, "stream": True})
    assert (error.status_code, error.param) == (400, "response_format")


def test_too_long_a_prompt_has_a_code(client: openai.OpenAI) -> None:
    for path, body in (
        ("/completions", ONCE | {"prompt": "word " * 3000}),
        ("/chat/completions", HELLO | {"messages": [{"role": "user", "content": "word " * 3000}]}),
        ("/completions", ONCE | {"max_tokens": 2048}),
    ):
        assert refusal(client, path, body).code == "context_length_exceeded"


def test_of_two_fields_that_give_a_format_both_are_named(client: openai.OpenAI) -> None:
    fields = {"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}
    message = "guided_choice: structured_outputs.regex gives the format of the answer already; give one"
    assert refusal(client, "/completions", ONCE | fields).message.endswith(message)


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    for path, body in (("/completions", ONCE), ("/chat/completions", HELLO)):
        error = refusal(client, path, body | {"model": "gpt-9"})
        assert (error.status_code, error.param, error.code) == (404, "model", "model_not_found")
        assert refusal(client, path, {key: body[key] for key in body if key != "model"}).param == "model"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"model": "tiny-llama", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        (b'{"model": "tiny-llama", "prompt": "a", "temperature": NaN}', 400),
        (b'{"model": "tiny-llama", "prompt": "a", "temperature": 1e999}', 400),
        (b'{"model": "tiny-llama", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"model": "tiny-llama", "prompt": "\\ud800"}', 400),
        (b'{"model": "tiny-llama", "prompt": "a", "n": null, "max_tokens": 1}', 200),
    ],
)
def test_bodies_that_are_no_request(server: ServerProcess, body: bytes, status: int) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        found = json.loads(answer.read())
    finally:
        connection.close()
    assert answer.status == status, found
    if status != 200:
        assert found["error"]["type"] == "invalid_request_error"
        assert found["error"]["message"]


HALF = r'"\ud800"'
TOOL_OF_RESPONSES = f'{{"type": "function", "name": "a", "description": {HALF}}}'


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", f'{{"model": "tiny-llama", "prompt": ["a", {HALF}]}}', "prompt[1]"),
        ("/v1/completions", f'{{"model": "tiny-llama", "prompt": "a", {HALF}: 1}}', None),
        (
            "/v1/chat/completions",
            f'{{"model": "tiny-llama", "messages": [{{"role": "user", "content": {HALF}}}]}}',
            "messages[0].content",
        ),
        (
            "/v1/responses",
            f'{{"model": "tiny-llama", "input": "a", "tool_choice": "none", "tools": [{TOOL_OF_RESPONSES}]}}',
            "tools[0].description",
        ),
        ("/invocations", f'{{"inputs": "a", "parameters": {{"stop": [{HALF}]}}}}', "parameters.stop[0]"),
        ("/generate", f'{{"prompt": "a", "stop": {HALF}}}', "stop"),
    ],
)
def test_half_of_a_character_is_refused_where_it_stands(
    server: ServerProcess, path: str, body: str, param: str | None
) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
    finally:
        connection.close()
    assert (answer.status, error["param"]) == (400, param)
    assert "half of a pair of surrogates" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 3, "temperature": 0.7}, "beam_width"),
        ({"max_new_tokens": 9999}, "prompt"),
        ({"n": 0}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"messages": HELLO["messages"]}, "prompt"),
    ],
)
def test_what_generate_refuses_is_about_the_field_that_it_names(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    assert refusal(client, "../generate", {"prompt": "Once", **fields}).param == param


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_said_to_be_json_is_told_how_to_be(server: ServerProcess, content_type: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)
    try:
        connection.request("POST", "/v1/completions", json.dumps(ONCE), {"content-type": content_type})
        answer = connection.getresponse()
        message = json.loads(answer.read())["error"]["message"]
    finally:
        connection.close()
    assert (answer.status, "content-type: application/json" in message) == (400, True)


def test_head_is_get_without_a_body(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)
    try:
        for path, status in (("/health", 200), ("/v1/models", 200), ("/nothing", 404), ("/v1/completions", 405)):
            connection.request("HEAD", path)
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (status, b"")
    finally:
        connection.close()


def test_paths_and_methods_that_are_not_there(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)
    try:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", "/version/", 404),  # not a redirection to the host that the client names
            ("GET", "/v1/completions", 405),
        ):
            connection.request(method, path)
            answer = connection.getresponse()
            error = json.loads(answer.read())["error"]
            assert answer.status == status
            assert path in error["message"]
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
            if status == 405:
                assert answer.headers["allow"] == "POST"
                assert error["message"] == "/v1/completions takes POST, not GET"
            if status == 404:
                assert "this server has /health, /ready, /metrics, /generate," in error["message"]
                assert "/v1/responses" in error["message"]
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "why"),
    [
        ("POST", "/v1/embeddings", "embeddings are not served here"),
        ("POST", "/generate_stream", "POST /invocations takes the same body"),
        ("GET", "/v1/responses/resp_1", "nothing is stored here"),
        ("DELETE", "/v1/responses/resp_1", "nothing is stored here"),
        ("POST", "/v1/responses/resp_1/cancel", "nothing is stored here"),
        ("POST", "/v1/responses/input_tokens", "POST /tokenize counts those"),
        ("GET", "/v1/responses/resp_1/input_items", "nothing is stored here"),
        ("POST", "/v1/conversations", "nothing is stored here"),
        ("GET", "/v1/conversations/conv_1", "nothing is stored here"),
    ],
)
def test_a_path_of_another_server_that_is_not_served_says_what_to_do(
    server: ServerProcess, method: str, path: str, why: str
) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)
    try:
        connection.request(method, path, b"{}", {"content-type": "application/json"})
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
    finally:
        connection.close()
    assert answer.status == 404
    assert why in error["message"]
    assert ";" in error["message"]  # and what to do


def test_requests_are_counted_by_their_status(server: ServerProcess) -> None:
    def counted(route: str, status: int) -> float:
        wanted = {f'route="{route}"', f'status="{status}"'}
        lines = httpx2.get(f"{server.address}/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("fastgen_http_requests_total{") and wanted <= labels(line)]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def labels(line: str) -> set[str]:
        return set(line.partition("{")[2].partition("}")[0].split(","))

    asked = [("/v1/completions", 400), ("/version", 200)]
    before = [counted(*each) for each in asked]
    assert httpx2.post(f"{server.address}/v1/completions", json={"surprise": 1}).status_code == 400
    assert httpx2.get(f"{server.address}/version").status_code == 200
    assert [counted(*each) for each in asked] == [each + 1 for each in before]


PLACES: list[tuple[str, Any, list[tuple[tuple[Any, ...], str, str]], str | None, str]] = [
    (
        "the deepest field is the one that is meant",
        {"stop": ["a", 1]},
        [(("body", "stop", "str"), "string_type", "Text"), (("body", "stop", "list[str]", 1), "string_type", "A text")],
        "stop[1]",
        "stop[1]: a text",
    ),
    (
        "what is said of one field for several types is joined, and said once",
        {"prompt": 5},
        [
            (("body", "prompt", "str"), "string_type", "Input should be a string"),
            (("body", "prompt", "list[str]"), "list_type", "Input should be a list"),
            (("body", "prompt", "list[int]"), "list_type", "Input should be a list"),
        ],
        "prompt",
        "prompt: input should be a string, or input should be a list",
    ),
    (
        "a missing field is named",
        {"a": {}},
        [(("body", "a", "b"), "missing", "")],
        "a.b",
        "a.b: this field is required",
    ),
    (
        "a step that is no field is left out",
        {"a": {"b": 1}},
        [(("body", "a", "Kind", "b"), "extra_forbidden", "")],
        "a.b",
        "a.b: this field is not known",
    ),
    ("an item that is not there is left out", {"a": [1]}, [(("body", "a", 1), "x", "X")], "a", "a: x"),
    ("a type is no item of a list", {"a": [1]}, [(("body", "a", "str"), "x", "X")], "a", "a: x"),
    ("the last item", {"a": [[1]]}, [(("body", "a", 0, 0), "x", "X")], "a[0][0]", "a[0][0]: x"),
    ("without a body before it", {"a": 1}, [(("a",), "x", "X")], "a", "a: x"),
    ("a field of the name body", {"body": 1}, [(("body", "body"), "x", "X")], "body", "body: x"),
    ("no field", 5, [(("body",), "x", "Input is No object")], None, "the body: input is No object"),
    ("a long message", {"a": 1}, [(("body", "a"), "x", "Y" * 400)], "a", "a: y" + "Y" * 299),
    ("a long name", {"a" * 300: 1}, [(("body", "a" * 300), "x", "X")], "a" * 200, "a" * 200 + ": x"),
]


@pytest.mark.parametrize(
    ("body", "found", "param", "message"), [case[1:] for case in PLACES], ids=[c[0] for c in PLACES]
)
def test_the_errors_of_a_body_are_one_refusal_about_one_field(
    body: Any, found: list[tuple[tuple[Any, ...], str, str]], param: str | None, message: str
) -> None:
    refused = invalid_request([{"loc": loc, "type": kind, "msg": said} for loc, kind, said in found], body)
    assert (refused.param, str(refused)) == (param, message)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (BadRequestError("a"), 400, "invalid_request_error", None),
        (BadRequestError("a", code="b"), 400, "invalid_request_error", "b"),
        (UnauthorizedError("a"), 401, "authentication_error", "invalid_api_key"),
        (ForbiddenError("a"), 403, "permission_error", "forbidden"),
        (UnknownModelError("a"), 404, "invalid_request_error", "model_not_found"),
        (RequestTimeoutError("a"), 408, "invalid_request_error", "request_timeout"),
        (TooLargeError("a"), 413, "invalid_request_error", "request_too_large"),
        (UnsupportedMediaError("a"), 415, "invalid_request_error", "unsupported_encoding"),
        (OverloadedError("a", retry_after_s=1.0), 429, "rate_limit_error", "rate_limit_exceeded"),
        (UnavailableError("a"), 503, "server_error", "unavailable"),
        (EngineDiedError("a"), 500, "server_error", "engine_died"),
        (GenerationError("a"), 500, "server_error", "generation_failed"),
        (ValueError("a"), 500, "server_error", None),
    ],
    ids=str,
)
def test_every_refusal_has_its_status_type_and_code(error: Exception, status: int, kind: str, code: str | None) -> None:
    found_status, body = error_body(error)
    assert found_status == status
    assert (body["error"]["message"], body["error"]["type"], body["error"]["code"]) == (str(error), kind, code)
    response = error_response(error)
    assert response.status_code == status
    assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


def test_a_client_is_told_when_its_first_token_would_have_come() -> None:
    headers = error_response(OverloadedError("a", retry_after_s=1.5, predicted_ttft_s=0.25)).headers
    assert (headers["retry-after"], headers["x-predicted-ttft-s"]) == ("2", "0.250")
    without = error_response(BadRequestError("a")).headers
    assert "retry-after" not in without
    assert "x-predicted-ttft-s" not in without


@pytest.mark.parametrize(
    ("content_type", "is_read"),
    [
        ("application/json", True),
        (" Application/JSON ; charset=utf-8", True),
        ("application/problem+json", True),
        ("application/jsonlines", False),
        ("text/json", False),
        ("", False),
        (None, False),
    ],
)
def test_only_a_type_of_json_is_read(content_type: str | None, is_read: bool) -> None:
    assert is_json(content_type) is is_read


def test_an_error_of_routing_keeps_its_status_and_its_detail() -> None:
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/failing/{status}")
    async def failing(status: int) -> None:
        raise HTTPException(status, "its detail", {"x-more": "a"})

    async def asked() -> list[tuple[int, str, str, str | None]]:
        transport = httpx2.ASGITransport(app=app)
        found = []
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as http:
            for status in (401, 403, 404, 422, 429, 499, 500, 503):
                answer = await http.get(f"/failing/{status}")
                error = answer.json()["error"]
                assert error["message"] == f"GET /failing/{status}: its detail"
                found.append((answer.status_code, error["type"], answer.headers["x-more"], error["code"]))
        return found

    assert asyncio.run(asked()) == [
        (401, "authentication_error", "a", None),
        (403, "permission_error", "a", None),
        (404, "invalid_request_error", "a", None),
        (422, "invalid_request_error", "a", None),
        (429, "rate_limit_error", "a", None),
        (499, "invalid_request_error", "a", None),
        (500, "server_error", "a", None),
        (503, "server_error", "a", None),
    ]
