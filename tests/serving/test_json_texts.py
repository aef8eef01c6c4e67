"""JSON that stands in texts of a body has the limits of a body's JSON, and is parsed once."""

from __future__ import annotations

import asyncio
import functools
import json
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from fastgen.runtime.requests.response_format import MAX_CHARACTERS
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.admission.json_limits import FREE_BYTES
from fastgen.serving.admission.turns import Turns
from fastgen.serving.http.openai import formats, json_texts
from fastgen.serving.http.openai.messages import for_template
from fastgen.serving.http.openai.requests import ChatRequest
from fastgen.serving.http.openai.responses.requests import ResponsesRequest
from tests.serving.scripted import MODEL, ScriptedService, application, scripted_codec

PATHS = ("/v1/chat/completions", "/tokenize", "/v1/responses", "/invocations")
SHORT = '{"city": "Oslo", "none": null}'
# Each is above the limits by itself.
TOO_MUCH = {
    "lists": '{"a": [' + "[]," * 170_000 + "1]}",
    "values": '{"a": [' + "1," * 1_200_000 + "1]}",
    "digits": '{"a": [' + " " * FREE_BYTES + "1" * 65 + "]}",
}


def conversation(path: str, arguments: list[str]) -> dict[str, Any]:
    """Returns a body for ``path`` with calls that have these arguments."""
    if path == "/v1/responses":
        items = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": text} for text in arguments]
        return {"model": MODEL, "input": [{"role": "user", "content": "Hello"}, *items]}
    functions = [{"name": "f", "arguments": text} for text in arguments]
    calls = [{"type": "function", "id": "a", "function": function} for function in functions]
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "tool_calls": calls}]
    return {"model": MODEL, "messages": messages}


@functools.cache
def codec() -> TextCodec:
    return scripted_codec("{% for m in messages %}{{ m.content }}{% endfor %}")


def answered(path: str, body: dict[str, Any], using: TextCodec | None = None) -> httpx2.Response:
    service = ScriptedService(using or codec(), lambda *_: ([5], "stop"))

    async def run() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=application(service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", TOO_MUCH)
def test_arguments_that_hold_too_much_are_not_parsed(monkeypatch: pytest.MonkeyPatch, path: str, kind: str) -> None:
    monkeypatch.setattr(json_texts, "parse_json", lambda text: pytest.fail("it was parsed"))
    answer = answered(path, conversation(path, [TOO_MUCH[kind]]))
    assert answer.status_code == 413
    assert answer.json()["error"]["message"].startswith("the JSON in arguments of calls has ")


@pytest.mark.parametrize(("first", "end"), [("{}", ""), ('"', ""), ("{}", '"'), ("{}", '"\\')])
def test_the_arguments_of_all_calls_count_together(first: str, end: str) -> None:
    texts = [first, *['{"a": [' + "[]," * 1600 + "1]}" + end] * 110]
    assert max(map(len, texts)) < FREE_BYTES < sum(map(len, texts))
    assert answered(PATHS[0], conversation(PATHS[0], texts)).status_code == 413


@pytest.mark.parametrize("path", PATHS)
def test_long_arguments_without_many_values_are_taken(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(json_texts, "parse_json", lambda text: pytest.fail("it was parsed in one piece"))
    text = json.dumps({"text": 'x, [{"1.5e3": []}] ' * 50_000})
    assert len(text) > FREE_BYTES
    answer = answered(path, conversation(path, [text, SHORT, ""]))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", PATHS)
def test_arguments_are_parsed_once(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    parsed: list[bytes] = []

    def parse(text: bytes) -> Any:
        parsed.append(text)
        return json.loads(text)

    monkeypatch.setattr(json_texts, "parse_json", parse)
    answer = answered(path, conversation(path, [SHORT]))
    assert (answer.status_code, parsed) == (200, [SHORT.encode()])


@pytest.mark.parametrize("text", ["[]", "{", '"a"', '{"a": "\\ud800"}', "[" * 100_000])
def test_arguments_that_are_no_object_are_refused_by_their_place(text: str) -> None:
    error = answered(PATHS[0], conversation(PATHS[0], [SHORT, text])).json()["error"]
    assert error["param"] == "messages[1].tool_calls[1].function.arguments"
    assert "must be a JSON object as text" in error["message"]
    error = answered("/v1/responses", conversation("/v1/responses", [SHORT, text])).json()["error"]
    assert error["param"] == "input[2].arguments"


def test_templates_get_the_arguments_as_objects() -> None:
    chats = [
        ChatRequest.model_validate(conversation("/v1/chat/completions", [SHORT, ""])),
        ResponsesRequest.model_validate(conversation("/v1/responses", [SHORT, ""])).chat(),
    ]
    for chat in chats:
        _, message = for_template(chat.messages, has_developer_role=False)
        functions = [call["function"] for call in message["tool_calls"]]
        assert functions == [{"name": "f", "arguments": json.loads(SHORT)}, {"name": "f", "arguments": {}}]


def test_long_arguments_that_are_not_json_are_parsed_in_pieces_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_texts, "parse_json", lambda text: pytest.fail("it was parsed in one piece"))
    for path, param in ((PATHS[0], "messages[1].tool_calls[1].function.arguments"), (PATHS[2], "input[2].arguments")):
        for text in ('{"text": "' + "x" * FREE_BYTES + '"', "[" + " " * FREE_BYTES + "]"):
            error = answered(path, conversation(path, [SHORT, text, ""])).json()["error"]
            assert error["param"] == param
            assert "must be a JSON object as text" in error["message"]


class CountedTurns(Turns):
    """Counts the turns that are waited for."""

    num_turns = 0

    async def wait(self) -> None:
        self.num_turns += 1
        await super().wait()


def test_small_arguments_of_many_calls_are_parsed_together() -> None:
    turns = CountedTurns(1)
    calls = [{"arguments": json.dumps({"number": number})} for number in range(2000)]
    asyncio.run(turns.run(json_texts._parsing(calls)))
    assert [json_texts._object(call["arguments"]) for call in calls] == [{"number": each} for each in range(2000)]
    assert turns.num_turns < 200


def test_templates_get_long_arguments_as_objects_too() -> None:
    template = "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments.number + 1 }}{% endfor %}"
    texts = [json.dumps({"number": 7, "text": "x" * number}) for number in (1, FREE_BYTES)]
    bodies = [conversation("/tokenize", [text]) for text in texts]
    short, long = (answered("/tokenize", body, scripted_codec(template)).json()["tokens"] for body in bodies)
    assert short == long
    assert short


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("guided_json", lambda text: {"guided_json": text}),
        ("structured_outputs.json", lambda text: {"structured_outputs": {"json": text}}),
    ],
)
def test_a_long_text_of_a_schema_is_not_parsed(monkeypatch: pytest.MonkeyPatch, field: str, body: Any) -> None:
    asked = {"model": MODEL, "prompt": "a"}
    schema = json.dumps({"enum": ["x" * (MAX_CHARACTERS - 100)]})
    assert answered("/v1/completions", asked | body(schema)).status_code == 200
    monkeypatch.setattr(formats, "json", SimpleNamespace(loads=lambda text: pytest.fail("it was parsed")))
    error = answered("/v1/completions", asked | body(schema + " " * 100)).json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(
        f"{field}: the text has {len(schema) + 100} characters; at most {MAX_CHARACTERS}"
    )
