"""``/v1/responses`` with OpenAI's own client, which checks every field of what comes."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

import fastgen
from fastgen.runtime.requests.outputs import FinishReason
from fastgen.serving.engine.request import EngineRequest
from fastgen.serving.tools.formats import TOOL_FORMATS
from tests.serving import scripted
from tests.serving.scripted import MODEL as SCRIPTED
from tests.serving.scripted import ScriptedService, ask, scripted_codec
from tests.serving.server_process import ServerProcess
from tests.serving.test_openai_tools import HERMES, OSLO, always
from tests.serving.test_tool_calls import written

MODEL = "tiny-llama"
STORY = "Tell me a story about a fox."
FIELDS: dict[str, Any] = {"model": MODEL, "input": STORY, "temperature": 0, "max_output_tokens": 12}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "look_up", "description": "Look up.", "parameters": PARAMETERS, "strict": False},
    {"type": "function", "name": "add", "parameters": None, "strict": None},
]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.address}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )


def test_the_answer_is_the_librarys(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    expected = llm.chat([{"role": "user", "content": STORY}], max_new_tokens=12, temperature=0)
    found = client.responses.create(**FIELDS)
    assert (found.object, found.model, found.output_text) == ("response", MODEL, expected.text)
    (message,) = found.output
    assert (message.type, message.status) == ("message", "incomplete")
    assert (found.status, found.store, found.error) == ("incomplete", False, None)
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.completed_at is None
    assert found.id.startswith("resp_")
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(expected.prompt_token_ids), 12)
    assert found.usage.total_tokens == len(expected.prompt_token_ids) + 12


def test_an_answer_that_ends_by_itself_is_complete(client: openai.OpenAI) -> None:
    found = client.responses.create(model=MODEL, input="Hello!", temperature=0)
    assert (found.status, found.incomplete_details) == ("completed", None)
    assert found.output[0].type == "message"
    assert found.output[0].status == "completed"
    assert found.completed_at is not None


def test_instructions_and_items(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": STORY},
    ]
    expected = llm.chat(messages, max_new_tokens=12, temperature=0)
    first = client.responses.create(model=MODEL, input="Hello", temperature=0, max_output_tokens=4).output[0]
    items: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Hello "}, {"type": "input_text", "text": "there"}],
        },
        {**first.to_dict(), "content": [{"type": "output_text", "text": "Hello!", "annotations": []}]},
        {"type": "message", "role": "user", "content": STORY},
    ]
    for instructions, given in (
        ("Be brief.", items),
        (None, [{"role": "developer", "content": "Be brief."}, *items]),
        (None, [*messages]),
    ):
        found = client.responses.create(**FIELDS | {"input": given}, instructions=instructions)
        assert found.output_text == expected.text
        assert found.instructions == instructions
    again = client.responses.create(**FIELDS | {"input": [*items, *found.output, {"role": "user", "content": "More"}]})
    assert again.output_text


def events_of(client: openai.OpenAI, **fields: Any) -> list[Any]:
    events = list(client.responses.create(**FIELDS | fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_a_stream_has_its_events_in_order_and_says_what_the_whole_says(client: openai.OpenAI) -> None:
    whole = client.responses.create(**FIELDS)
    events = events_of(client)
    kinds = [event.type.removeprefix("response.") for event in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [*begin, *(["output_text.delta"] * len(deltas)), *end]
    assert deltas
    assert "".join(event.delta for event in deltas) == whole.output_text
    created, added, text, item, last = (events[index] for index in (0, 2, -4, -2, -1))
    assert (created.response.status, created.response.output) == ("in_progress", [])
    assert (added.item.status, added.item.content) == ("in_progress", [])
    assert text.text == item.item.content[0].text == last.response.output_text == whole.output_text
    assert len({event.item_id for event in deltas} | {added.item.id, item.item.id, last.response.output[0].id}) == 1
    assert last.response.usage == whole.usage
    assert last.response.id == created.response.id


def test_the_helper_for_streams_collects_the_response(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "Hello!", "temperature": 0}
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == client.responses.create(**fields).output_text


class Fox(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=99)


def test_structured_output(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": STORY, "max_output_tokens": 200}
    for seed in range(3):
        found = client.responses.parse(**fields, text_format=Fox, temperature=1, extra_body={"seed": seed})
        assert isinstance(found.output_parsed, Fox)
        assert found.status == "completed"
        assert found.text is not None
        assert found.text.format is not None
        assert found.text.format.type == "json_schema"
    with client.responses.stream(**fields, text_format=Fox, temperature=1, extra_body={"seed": 0}) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Fox)
    anything = client.responses.create(**fields | {"max_output_tokens": 9}, text={"format": {"type": "json_object"}})
    assert anything.output_text.startswith("{")


def test_logprobs(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    expected = llm.chat([{"role": "user", "content": STORY}], max_new_tokens=12, temperature=0, logprobs=2)
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (message,) = client.responses.create(**FIELDS, **fields).output
    found = message.content[0].logprobs
    assert expected.logprobs is not None
    assert [each.logprob for each in found] == [
        each[token_id] for token_id, each in zip(expected.token_ids, expected.logprobs, strict=True)
    ]
    assert all(len(each.top_logprobs) == 2 for each in found)
    events = events_of(client, **fields)
    streamed = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [each.logprob for each in streamed] == [each.logprob for each in found]
    assert events[-1].response.output[0].content[0].logprobs == found
    assert client.responses.create(**FIELDS).output[0].content[0].logprobs == []


def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = FIELDS | {"max_output_tokens": 200, "temperature": 1, "extra_body": {"seed": 2}}
    for choice in ("required", {"type": "function", "name": "look_up"}):
        found = client.responses.create(
            **fields,
            tools=TOOLS[:1],
            tool_choice=choice,
            parallel_tool_calls=False,  # type: ignore[arg-type]
        )
        (call,) = found.output
        assert (call.type, call.name, call.status, found.status) == (
            "function_call",
            "look_up",
            "completed",
            "completed",
        )
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
        assert found.tool_choice == choice or found.tool_choice.to_dict() == choice  # type: ignore[union-attr]
        assert [tool.to_dict() for tool in found.tools] == TOOLS[:1]
    items = [
        {"role": "user", "content": STORY},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "9"},
    ]
    answered = client.responses.create(**FIELDS | {"input": items}, tools=TOOLS[:1])
    assert answered.output_text


def test_only_an_allowed_tool_is_called(client: openai.OpenAI) -> None:
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    found = client.responses.create(**FIELDS | {"max_output_tokens": 60}, tools=TOOLS, tool_choice=allowed)
    assert {item.name for item in found.output} == {"add"}  # type: ignore[union-attr]


CALLS = "Let me see. " + written(TOOL_FORMATS["hermes"], [OSLO, ("add", "{}")])
ASKED: dict[str, Any] = {"model": SCRIPTED, "input": "How is it in Oslo?", "tools": TOOLS}


def test_text_and_calls_are_items() -> None:
    found = ask(always(scripted_codec(HERMES), CALLS), lambda client: client.responses.create(**ASKED))
    message, *calls = found.output
    assert message.type == "message"
    assert found.output_text == "Let me see."
    assert [(call.type, call.name, call.arguments) for call in calls] == [  # type: ignore[union-attr]
        ("function_call", *OSLO),
        ("function_call", "add", "{}"),
    ]
    assert len({item.id for item in found.output}) == 3
    assert found.status == "completed"


def test_a_stream_of_calls() -> None:
    service = always(scripted_codec(HERMES), CALLS)

    async def use(client: openai.AsyncOpenAI) -> list[Any]:
        return [event async for event in await client.responses.create(**ASKED, stream=True)]

    events = ask(service, use)
    of_first = [event for event in events if getattr(event, "output_index", None) == 1]
    kinds = [event.type.removeprefix("response.") for event in of_first]
    num_deltas = kinds.count("function_call_arguments.delta")
    assert num_deltas > 3
    assert kinds == [
        "output_item.added",
        *["function_call_arguments.delta"] * num_deltas,
        "function_call_arguments.done",
        "output_item.done",
    ]
    added, *deltas, done, item = of_first
    assert (added.item.name, added.item.arguments, added.item.status) == ("look_up", "", "in_progress")
    assert "".join(event.delta for event in deltas) == done.arguments == item.item.arguments == OSLO[1]
    assert added.item.call_id == item.item.call_id
    last = events[-1]
    assert last.type == "response.completed"
    assert [each.type for each in last.response.output] == ["message", "function_call", "function_call"]
    assert last.response.output[1] == item.item

    async def helper(client: openai.AsyncOpenAI) -> Any:
        async with client.responses.stream(**ASKED) as stream:
            return await stream.get_final_response()

    assert [each.type for each in ask(service, helper).output] == ["message", "function_call", "function_call"]


def test_one_call_where_no_more_are_wanted() -> None:
    service = always(scripted_codec(HERMES), CALLS)
    fields = {**ASKED, "parallel_tool_calls": False}

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, Any]:
        events = [event async for event in await client.responses.create(**fields, stream=True)]
        return await client.responses.create(**fields), events[-1]

    whole, last = ask(service, use)
    for found in (whole, last.response):
        assert [item.type for item in found.output] == ["message", "function_call"]
        assert found.status == "completed"
    assert whole.usage == last.response.usage


def test_a_stream_ends_once_where_more_had_come_than_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "_Piecemeal", EngineRequest)  # all news come together
    service = always(scripted_codec(HERMES), CALLS)

    async def use(client: openai.AsyncOpenAI) -> list[Any]:
        fields = {**ASKED, "parallel_tool_calls": False}
        return [event async for event in await client.responses.create(**fields, stream=True)]

    kinds = [event.type for event in ask(service, use)]
    assert (kinds.count("response.completed"), kinds[-1]) == (1, "response.completed")


@pytest.mark.parametrize(("reason", "status"), [("length", "incomplete"), ("stop", "completed")])
def test_a_call_that_breaks_off_is_incomplete(reason: FinishReason, status: str) -> None:
    text = written(TOOL_FORMATS["hermes"], [OSLO])
    service = always(scripted_codec(HERMES), text[: text.index("Oslo") + 2], reason)
    found = ask(service, lambda client: client.responses.create(**ASKED))
    (call,) = found.output
    assert (call.type, call.status, found.status) == ("function_call", "incomplete", status)


def test_the_template_gets_calls_and_their_results() -> None:
    service = always(scripted_codec("{{ tools }}<tool_call>{{ messages | tojson }}"), "Cold.")
    items: list[Any] = [
        {"role": "user", "content": "How is it?"},
        {"type": "message", "role": "assistant", "content": "Let me see."},
        {
            "type": "function_call",
            "call_id": "a",
            "name": "look_up",
            "arguments": '{"city": "Oslo"}',
            "status": "completed",
        },
        {"type": "function_call", "call_id": "b", "name": "add", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "function_call_output", "call_id": "a", "output": "-5"},
    ]
    ask(service, lambda client: client.responses.create(**ASKED | {"input": items}, instructions="Help."))
    prompt = service.codec.tokenizer.decode(service.asked[-1][0])
    messages = json.loads(prompt.partition("<tool_call>")[2])
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool"]
    assert messages[2]["content"] == "Let me see."
    assert [call["function"]["arguments"] for call in messages[2]["tool_calls"]] == [{"city": "Oslo"}, {}]
    assert [(message["name"], message["content"]) for message in messages[3:]] == [("add", "4"), ("look_up", "-5")]


def test_an_empty_answer_has_an_empty_message() -> None:
    service = ScriptedService(scripted_codec(), lambda prompt, sampling: ([1], "stop"))

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        fields: dict[str, Any] = {"model": SCRIPTED, "input": "Hello"}
        events = [event async for event in await client.responses.create(**fields, stream=True)]
        return await client.responses.create(**fields), events

    whole, events = ask(service, use)
    assert (whole.output_text, len(whole.output)) == ("", 1)
    assert [event.type for event in events if "delta" in event.type] == []
    assert events[-1].response.output[0].content[0].text == ""


def test_what_agents_send_by_default_is_taken(client: openai.OpenAI) -> None:
    expected = client.responses.create(**FIELDS).output_text
    found = client.responses.create(
        **FIELDS,
        store=True,
        background=False,
        metadata={"a": "b"},
        user="someone",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="in_memory",
        service_tier="auto",
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        max_tool_calls=3,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "none", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
        previous_response_id=None,
        conversation=None,
    )
    assert found.output_text == expected
    assert (found.store, found.metadata, found.previous_response_id) == (False, {"a": "b"}, None)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"surprise": 1}, "surprise"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": "word " * 3000}, "input"),
    ({"input": [{"role": "friend", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
    ({"input": [{"type": "reasoning", "id": "a", "summary": []}]}, "input[0]"),
    ({"input": [{"type": "computer_call", "id": "a"}]}, "input[0]"),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "[]"}]},
        "input[0].arguments",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "fish"}}}}, "text.format"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "string"}}]}, "tools[0].parameters"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    (
        {
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]},
        },
        "tool_choice",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"truncation": "auto"}, "truncation"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"prompt": {"id": "a"}}, "prompt"),
    ({"moderation": {"model": "a"}}, "moderation"),
    ({"context_management": []}, "context_management"),
    ({"bad_words": ["a"]}, "bad_words"),
]


def test_it_refuses_by_name(client: openai.OpenAI) -> None:
    for fields, param in REFUSED:
        with pytest.raises(openai.BadRequestError) as refused:
            client.post("/responses", body=FIELDS | fields, cast_to=dict[str, Any])
        assert refused.value.param == param, (fields, refused.value.message)
    for name in ("previous_response_id", "conversation"):
        with pytest.raises(openai.BadRequestError, match="send the whole conversation as input"):
            client.post("/responses", body=FIELDS | {name: "a"}, cast_to=dict[str, Any])
    with pytest.raises(openai.NotFoundError, match="nothing is stored here"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="embeddings are not served here"):
        client.embeddings.create(model=MODEL, input="a")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model="gpt-9", input="a")
    assert unknown.value.code == "model_not_found"


def test_a_stream_that_fails_says_so_in_its_last_events() -> None:
    codec = scripted_codec()
    token_ids = codec.encode_text("Once upon a time", add_special_tokens=False)
    service = ScriptedService(codec, lambda prompt, sampling: (token_ids, "error"))
    events: list[Any] = []

    async def use(client: openai.AsyncOpenAI) -> None:
        async for event in await client.responses.create(model=SCRIPTED, input="Hello", stream=True):
            events.append(event)  # noqa: PERF401 (those before the failure count)

    with pytest.raises(openai.APIError, match="the request failed while it ran"):
        ask(service, use)
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert events[0].type == "response.created"
