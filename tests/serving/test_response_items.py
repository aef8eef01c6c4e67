"""The parts of a response: its fields, its items, and the places of the events that report them."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from fastgen.serving.http.openai.requests import ChatRequest
from fastgen.serving.http.openai.responses.requests import ResponsesRequest, in_its_names
from fastgen.serving.refusals import BadRequestError
from fastgen.serving.tools.formats import TOOL_FORMATS
from tests.serving.scripted import MODEL, ScriptedService, ask, scripted_codec
from tests.serving.test_openai_tools import HERMES, OSLO, always
from tests.serving.test_tool_calls import written

TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": None, "parameters": None, "strict": None}
    for name in ("look_up", "add")
]
LOGPROBS = ["message.output_text.logprobs"]
ASKED: dict[str, Any] = {"model": MODEL, "input": "How is it in Oslo?", "tools": TOOLS, "include": LOGPROBS}
CALL = written(TOOL_FORMATS["hermes"], [OSLO])


def test_a_response_has_the_fields_of_its_request_and_their_defaults() -> None:
    service = always(scripted_codec(HERMES), "Cold.")

    def post(**fields: Any) -> dict[str, Any]:
        async def use(client: openai.AsyncOpenAI) -> httpx2.Response:
            body = {"model": MODEL, "input": "Hello", **fields}
            return await client._client.post("http://scripted/v1/responses", json=body)

        found: dict[str, Any] = ask(service, use).json()
        return found

    plain, nothing = post(), ("error", "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls")
    defaults: dict[str, Any] = {
        **dict.fromkeys((*nothing, "previous_response_id", "user")),
        "background": False,
        "metadata": {},
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 0.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
    }
    assert {name: plain[name] for name in defaults} == defaults
    ((prompt_ids, _),), usage = service.asked, plain["usage"]
    num_answer = usage.pop("output_tokens")
    assert num_answer > 0
    assert usage == {
        "input_tokens": len(prompt_ids),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt_ids) + num_answer,
    }
    given: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "none"},
        "temperature": 0.5,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        "tool_choice": "none",
        "tools": TOOLS,
        "top_logprobs": 2,
        "top_p": 0.5,
        "user": "u",
    }
    full = post(**given)
    assert {name: full[name] for name in given} == given | {"reasoning": {"effort": "none", "summary": None}}


@pytest.mark.parametrize(
    ("fields", "logprobs", "top_logprobs"),
    [
        ({}, None, None),
        ({"top_logprobs": 0}, None, None),
        ({"top_logprobs": 2}, True, 2),
        ({"include": LOGPROBS}, True, None),
        ({"include": ["reasoning.encrypted_content"]}, None, None),
        ({"include": LOGPROBS, "top_logprobs": 2}, True, 2),
    ],
)
def test_log_probabilities_are_wanted_by_either_field(
    fields: dict[str, Any], logprobs: bool | None, top_logprobs: int | None
) -> None:
    chat = ResponsesRequest.model_validate({"model": MODEL, "input": "Hello", **fields}).chat()
    assert (chat.logprobs, chat.top_logprobs) == (logprobs, top_logprobs)


def test_an_input_may_begin_with_a_call() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
    items = [call, {"type": "function_call_output", "call_id": "a", "output": "4"}]
    messages = ResponsesRequest.model_validate({"model": MODEL, "input": items}).chat().messages
    assert [message.role for message in messages] == ["assistant", "tool"]


def test_the_events_of_a_stream_name_the_places_of_their_items() -> None:
    service = always(scripted_codec(HERMES), f"Let me see. {CALL} And that is all.")

    async def use(client: openai.AsyncOpenAI) -> list[dict[str, Any]]:
        return [event.to_dict() async for event in await client.responses.create(**ASKED, stream=True)]

    *events, last = ask(service, use)
    output = last["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    placed = [event for event in events if "output_index" in event]
    for event in placed:
        assert output[event["output_index"]]["id"] == event.get("item_id", event.get("item", {}).get("id"))
        assert event.get("content_index", 0) == 0
    assert [event["output_index"] for event in placed] == sorted(event["output_index"] for event in placed)


def test_every_token_of_an_answer_has_its_log_probability_in_its_message() -> None:
    codec = scripted_codec()
    text_ids, (eos_id, *_) = codec.encode_text("Hello there", add_special_tokens=False), codec.eos_token_ids
    service = ScriptedService(codec, lambda prompt, sampling: ([*text_ids, eos_id], "stop"))
    fields: dict[str, Any] = {"model": MODEL, "input": "Hello", "include": LOGPROBS}

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, Any]:
        events = [event async for event in await client.responses.create(**fields, stream=True)]
        return await client.responses.create(**fields), events[-1].response

    for response in ask(service, use):
        told = response.output[0].content[0].logprobs
        assert [bytes(each.bytes) for each in told] == [codec.token_bytes(id_) for id_ in (*text_ids, eos_id)]
        assert all(each.top_logprobs == [] for each in told)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("second", [" And that is <tool", " Ça va, 🙂 là"])
def test_messages_have_the_log_probabilities_of_the_tokens_that_begin_in_them(second: str, at_once: bool) -> None:
    codec = scripted_codec(HERMES)
    text = f"Let me see. {CALL}{second}"
    ids, (eos_id, *_) = codec.encode_text(text, add_special_tokens=False), codec.eos_token_ids
    service = ScriptedService(codec, lambda prompt, sampling: ([*ids, eos_id], "stop"), at_once=at_once)
    begins = [len(codec.decode(ids[:count]).rstrip("\ufffd")) for count in range(len(ids))]

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        events = [event async for event in await client.responses.create(**ASKED, stream=True)]
        return await client.responses.create(**ASKED), events

    whole, events = ask(service, use)
    for response in (whole, events[-1].response):
        first, call, last = response.output
        assert (call.type, call.arguments) == ("function_call", OSLO[1])
        for message, ending in ((first, []), (last, [eos_id])):
            (part,) = message.content
            begin = text.index(part.text)
            inside = [id_ for id_, at in zip(ids, begins, strict=True) if begin <= at < begin + len(part.text)]
            expected = [codec.token_bytes(id_) for id_ in (*inside, *ending)]
            assert [bytes(each.bytes) for each in part.logprobs] == expected
    streamed = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    told = [each for message in (whole.output[0], whole.output[2]) for each in message.content[0].logprobs]
    assert [each.token for each in streamed] == [each.token for each in told[:-1]], (
        "the token that ends the text is in no delta"
    )


def chat_of(**fields: Any) -> ChatRequest:
    return ResponsesRequest.model_validate({"model": MODEL, "input": "Hello", **fields}).chat()


def test_the_allowed_tools_are_those_that_may_be_called() -> None:
    def allowed(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "name": name} for name in names]
        return chat_of(tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": mode, "tools": tools}).model_dump()

    for mode, names in (("auto", ["add"]), ("required", ["look_up"]), ("required", ["look_up", "add"])):
        chat = allowed(mode, *names)
        assert ([tool["function"]["name"] for tool in chat["tools"]], chat["tool_choice"]) == (names, mode)
    with pytest.raises(BadRequestError, match=r"^tool_choice: there is no tool named 'b'$") as refused:
        allowed("auto", "c", "add", "b")
    assert refused.value.param == "tool_choice"
    named = chat_of(tools=TOOLS, tool_choice={"type": "function", "name": "add"})
    assert len(named.tools or ()) == 2
    assert named.model_dump()["tool_choice"] == {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("fields", "is_parallel"),
    [
        ({"parallel_tool_calls": False}, None),
        ({"parallel_tool_calls": False, "tools": []}, None),
        ({"parallel_tool_calls": False, "tools": TOOLS}, False),
        ({"parallel_tool_calls": True, "tools": TOOLS}, True),
        ({"tools": TOOLS}, None),
    ],
)
def test_without_tools_nothing_is_said_of_their_calls(fields: dict[str, Any], is_parallel: bool | None) -> None:
    assert chat_of(**fields).parallel_tool_calls is is_parallel


def test_a_call_belongs_to_the_message_of_the_assistant_before_it() -> None:
    def call(call_id: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": ""}

    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I add."}]}
    output = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "4"}]}
    items = [said, call("a"), call("b"), output, call("c"), {"role": "developer", "content": "Be brief."}]
    messages = chat_of(instructions="Begin.", input=items).messages
    assert [message.role for message in messages] == ["system", "assistant", "tool", "assistant", "developer"]
    calls = [[each["id"] for each in message.model_dump().get("tool_calls") or ()] for message in messages]
    assert calls == [[], ["a", "b"], [], ["c"], []]


def test_a_refusal_of_the_chat_is_in_the_names_of_the_response() -> None:
    for of_chat, param, message in (
        ("messages", "input", "input: a messages"),
        ("max_completion_tokens", "max_output_tokens", "max_output_tokens: a messages"),
        ("max_tokens", "max_output_tokens", "max_output_tokens: a messages"),
        ("reasoning_effort", "reasoning.effort", "reasoning.effort: a messages"),
        ("response_format", "text.format", "text.format: a messages"),
        ("tools[12].function.name", "tools[12].name", "tools[12].name: a messages"),
        ("temperature", "temperature", "temperature: a messages"),
    ):
        with pytest.raises(BadRequestError) as refused, in_its_names():
            raise BadRequestError(f"{of_chat}: a messages", param=of_chat, code="its_code")
        assert (refused.value.param, str(refused.value), refused.value.code) == (param, message, "its_code")
    with pytest.raises(BadRequestError) as refused, in_its_names():
        raise BadRequestError("messages are wrong")
    assert (refused.value.param, str(refused.value)) == (None, "input are wrong")
