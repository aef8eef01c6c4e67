"""Tools with OpenAI's own client: the input of templates, calls in answers and streams, required calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion

import fastgen
from fastgen.runtime.requests.outputs import FinishReason
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.tools.formats import TOOL_FORMATS, ToolFormat
from tests.fast import cases
from tests.serving.scripted import MODEL, ScriptedService, ask, scripted_codec
from tests.serving.test_tool_calls import written

HERMES = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %} in <tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}({{ call.function.arguments.city }})"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MISTRAL = "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}[TOOL_CALLS]"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "add"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "How is it in Oslo?"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
OSLO = ("look_up", '{"city": "Oslo"}')


def always(codec: TextCodec, text: str, reason: FinishReason = "stop") -> ScriptedService:
    """Returns a service that always answers ``text``; special tokens in it become tokens."""
    token_ids = codec.encode_text(text, add_special_tokens=False)
    return ScriptedService(codec, lambda prompt, sampling: (token_ids, reason))


def answer(service: ScriptedService, tool_format: ToolFormat | None = None, **fields: Any) -> ChatCompletion:
    return ask(service, lambda client: client.chat.completions.create(**ASKED | fields), tool_format)


def calls_of(found: ChatCompletion) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in found.choices[0].message.tool_calls or ()]


@pytest.mark.parametrize(
    ("template", "special_tokens", "name"),
    [
        (HERMES, (), "hermes"),
        (HERMES, ("<tool_call>", "</tool_call>"), "hermes"),
        (MISTRAL, (), "mistral"),
        (MISTRAL, ("[TOOL_CALLS]",), "mistral"),
        (MISTRAL + "[ARGS]", ("[TOOL_CALLS]", "[ARGS]"), "mistral-named"),
        (MISTRAL + '{# "parameters":  #}', ("<|python_tag|>",), "mistral"),
    ],
)
def test_calls_are_read_as_text_or_as_tokens(template: str, special_tokens: tuple[str, ...], name: str) -> None:
    text = "Let me see. " + written(TOOL_FORMATS[name], [OSLO, ("add", "{}")])
    found = answer(always(scripted_codec(template, special_tokens), text))
    assert found.choices[0].message.content == "Let me see."
    assert calls_of(found) == [OSLO, ("add", "{}")]
    assert found.choices[0].finish_reason == "tool_calls"
    ids = {call.id for call in found.choices[0].message.tool_calls or ()}
    assert len(ids) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_a_stream_of_calls_gives_name_then_arguments() -> None:
    service = always(scripted_codec(HERMES), "Let me see. " + written(TOOL_FORMATS["hermes"], [OSLO, ("add", "{}")]))

    async def use(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.chat.completions.create(**ASKED, stream=True)
        return [chunk.choices[0] async for chunk in stream]

    choices = ask(service, use)
    assert "".join(choice.delta.content or "" for choice in choices) == "Let me see."
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    for index, (name, arguments) in enumerate([OSLO, ("add", "{}")]):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert (first.function.name, first.function.arguments, first.type) == (name, "", "function")
        assert first.id
        assert all(delta.id is None and delta.function.name is None for delta in rest)
        assert "".join(delta.function.arguments for delta in rest) == arguments
    assert len([delta for delta in deltas if delta.index == 0]) > 3  # in pieces
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]

    async def helper(client: openai.AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(**ASKED) as stream:
            return await stream.get_final_completion()

    assert calls_of(ask(service, helper)) == [OSLO, ("add", "{}")]


def test_the_template_is_told_of_tools_and_earlier_calls() -> None:
    service = always(scripted_codec(HERMES), "Cold.")
    call = {"id": "abc", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Oslo"}'}}
    messages: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": None},
        {"role": "tool", "tool_call_id": "abc", "content": "-5"},
    ]
    found = answer(service, messages=messages)
    assert found.choices[0].message.content == "Cold."
    assert found.choices[0].message.tool_calls is None
    assert found.choices[0].finish_reason == "stop"
    ((prompt_ids, sampling),) = service.asked
    assert sampling.response_format is None
    told = service.codec.tokenizer.decode(prompt_ids, skip_special_tokens=True)
    assert '"description": "Look up the weather."' in told
    assert "<tool_call>look_up(Oslo)" in told
    assert told.endswith("-5")


def test_the_template_is_told_which_tool_gave_what() -> None:
    call = {"id": "abc", "type": "function", "function": {"name": "look_up", "arguments": ""}}
    number = "{{ m.get('tool_calls', [{}])[0].get('index', '') }}"
    template = f"{{{{ tools }}}}<tool_call>{{% for m in messages %}}[{{{{ m.name }}}}{number}]{{% endfor %}}"
    service = always(scripted_codec(template), "Cold.")
    answer(
        service,
        messages=[
            {"role": "assistant", "content": "Hello", "tool_calls": []},
            {"role": "tool", "tool_call_id": "abc", "content": "too early"},
            {
                "role": "assistant",
                "tool_calls": [
                    {**call, "index": 0},
                    {**call, "id": "def", "function": {**call["function"], "name": "add"}},
                ],
            },
            {"role": "tool", "tool_call_id": "def", "content": "4"},
            {"role": "tool", "tool_call_id": "abc", "content": "-5"},
            {"role": "tool", "tool_call_id": "abc", "content": "-5", "name": "other"},
        ],
    )
    ((prompt_ids, _),) = service.asked
    assert service.codec.tokenizer.decode(prompt_ids).endswith("[][][][add][look_up][other]")


def test_the_template_gets_what_the_request_says_and_nothing_else() -> None:
    service = always(scripted_codec("{{ tools | tojson }}<tool_call>{{ messages | tojson }}"), "Cold.")
    call = {"id": "abc", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer(
        service,
        tools=[{"type": "function", "function": {"name": "add", "strict": True}}],
        messages=[
            {"role": "assistant", "content": "Hello", "annotations": [], "refusal": None, "tool_calls": []},
            {"role": "assistant", "tool_calls": [{**call, "index": 0}]},
        ],
    )
    ((prompt_ids, _),) = service.asked
    tools, messages = service.codec.tokenizer.decode(prompt_ids).split("<tool_call>")
    function = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert json.loads(tools) == [{"type": "function", "function": function}]
    assert json.loads(messages) == [
        {"role": "assistant", "content": "Hello"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 1}}}],
        },
    ]


def test_of_several_templates_the_one_for_tools_is_asked() -> None:
    service = always(scripted_codec(), written(TOOL_FORMATS["hermes"], [OSLO]))
    service.codec.tokenizer.chat_template = {"default": "plain", "tool_use": HERMES}
    assert calls_of(answer(service)) == [OSLO]
    answer(service, tools=openai.omit)
    assert service.codec.tokenizer.decode(service.asked[-1][0]) == "plain"


def test_without_tools_or_a_choice_of_them_nothing_is_read() -> None:
    text = written(TOOL_FORMATS["hermes"], [OSLO])
    service = always(scripted_codec(HERMES), text)
    for fields in ({"tools": openai.omit}, {"tools": []}, {"tool_choice": "none"}):
        found = answer(service, **fields)
        assert found.choices[0].message.content == text
        assert found.choices[0].finish_reason == "stop"
    for prompt_ids, _ in service.asked:
        assert "look_up" not in service.codec.tokenizer.decode(prompt_ids)


def test_one_call_where_no_more_are_wanted() -> None:
    service = always(scripted_codec(HERMES), written(TOOL_FORMATS["hermes"], [OSLO, ("add", "{}")]))
    assert calls_of(answer(service, parallel_tool_calls=False)) == [OSLO]

    async def use(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.chat.completions.create(**ASKED, stream=True, parallel_tool_calls=False)
        return [chunk.choices[0] async for chunk in stream]

    choices = ask(service, use)
    assert {call.index for choice in choices for call in choice.delta.tool_calls or ()} == {0}
    assert choices[-1].finish_reason == "tool_calls"
    assert service.num_cancelled >= 1


class WritingOn(ScriptedService):
    """A service whose model writes on after its script, for ever."""

    async def submit(self, *arguments: Any, **more: Any) -> Any:
        running = await super().submit(*arguments, **more)
        running._request._news[-1].end = None
        return running


def test_a_stream_of_one_call_does_not_wait_for_a_model_that_writes_on() -> None:
    codec = scripted_codec(HERMES)
    token_ids = codec.encode_text(written(TOOL_FORMATS["hermes"], [OSLO]) + " And", add_special_tokens=False)
    service = WritingOn(codec, lambda prompt, sampling: (token_ids, "stop"))
    asked: dict[str, Any] = {"model": MODEL, "input": "How?", "tools": [{"type": "function", "name": "look_up"}]}

    async def use(client: openai.AsyncOpenAI) -> tuple[list[Any], list[Any]]:
        more: dict[str, Any] = {"stream": True, "parallel_tool_calls": False}
        async with asyncio.timeout(20):
            chat = [chunk async for chunk in await client.chat.completions.create(**ASKED, **more)]
            response: Any = await client.responses.create(**asked, **more)
            return chat, [event async for event in response]

    chat, response = ask(service, use)
    assert chat[-1].choices[0].finish_reason == "tool_calls"
    assert response[-1].type == "response.completed"
    assert service.num_cancelled == 2


def test_an_answer_that_ends_like_the_beginning_of_a_call_is_text() -> None:
    service = always(scripted_codec(HERMES), "It is <tool")
    asked: dict[str, Any] = {"model": MODEL, "input": "How?", "tools": [{"type": "function", "name": "look_up"}]}

    async def use(client: openai.AsyncOpenAI) -> list[str | None]:
        whole = await client.chat.completions.create(**ASKED)
        stream = await client.chat.completions.create(**ASKED, stream=True)
        response = await client.responses.create(**asked)
        events: Any = await client.responses.create(**asked, stream=True)
        return [
            whole.choices[0].message.content,
            "".join([chunk.choices[0].delta.content or "" async for chunk in stream]),
            response.output_text,
            "".join([event.delta async for event in events if event.type == "response.output_text.delta"]),
        ]

    assert ask(service, use) == ["It is <tool"] * 4


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stream_and_a_whole_answer_of_one_call_end_with_the_same_token(at_once: bool, reason: FinishReason) -> None:
    codec = scripted_codec(HERMES)
    text = written(TOOL_FORMATS["hermes"], [OSLO])
    token_ids = codec.encode_text(text + " And more.", add_special_tokens=False)
    service = ScriptedService(codec, lambda prompt, sampling: (token_ids, reason), at_once=at_once)
    fields = {**ASKED, "parallel_tool_calls": False, "logprobs": True}

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        stream = await client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        return await client.chat.completions.create(**fields), [chunk async for chunk in stream]

    whole, (*chunks, last) = ask(service, use)
    choices = [chunk.choices[0] for chunk in chunks]
    (choice,) = whole.choices
    assert choice.finish_reason == choices[-1].finish_reason == "tool_calls"
    assert whole.usage.completion_tokens == last.usage.completion_tokens < len(token_ids)
    streamed = [each for one in choices if one.logprobs is not None for each in one.logprobs.content]
    assert choice.logprobs.content == streamed
    assert len(streamed) == whole.usage.completion_tokens
    end = text.index("}") + 1  # of the arguments, with which the call is complete
    assert len("".join(each.token for each in streamed).strip()) >= end
    assert len("".join(each.token for each in streamed[:-1]).strip()) < end


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_call_that_breaks_off_has_no_other_reason(reason: FinishReason) -> None:
    text = written(TOOL_FORMATS["hermes"], [OSLO])
    service = always(scripted_codec(HERMES), text[: text.index("Oslo") + 2], reason)
    found = answer(service)
    assert found.choices[0].finish_reason == reason
    assert calls_of(found) == [("look_up", '{"city": "Os')]


def test_a_format_can_be_named() -> None:
    llama = TOOL_FORMATS["llama3"]
    service = always(scripted_codec(HERMES), '{"name": "add", "parameters": {"a": 1}}')
    assert calls_of(answer(service, llama)) == [("add", '{"a": 1}')]
    assert calls_of(answer(service)) == []


def test_templates_without_tools_refuse_them() -> None:
    for template in ("{% for message in messages %}{{ message.content }}{% endfor %}", "{{ tools }}{{ messages }}"):
        with pytest.raises(openai.BadRequestError) as refused:
            answer(always(scripted_codec(template), "Hello"))
        assert refused.value.param == "tools"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('not today') }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for number in range(1000000) %}a{% endfor %}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_is_a_refusal(template: str) -> None:
    service = always(scripted_codec(template), "Hello")
    with pytest.raises(openai.BadRequestError) as refused:
        answer(service, tools=openai.omit)
    assert refused.value.param == "messages"
    assert service.asked == []


class LookUp(pydantic.BaseModel):
    """Look up the weather."""

    city: str = pydantic.Field(max_length=12)


class Weather(pydantic.BaseModel):
    degrees: int = pydantic.Field(ge=-99, le=99)


def real(llm: fastgen.LLM, template: str = HERMES) -> ScriptedService:
    """A service that answers as the model of ``llm`` does."""

    def generate(prompt_ids: list[int], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
        output = llm.generate(prompt_ids, sampling)
        return output.token_ids, output.finish_reason

    return ScriptedService(scripted_codec(template), generate)


@pytest.mark.parametrize(
    "name", cases(["hermes", "mistral", "llama3", "granite", "deepseek-v3"], fast=["hermes", "deepseek-v3"])
)
def test_demanded_calls_are_made(llm: fastgen.LLM, name: str) -> None:
    service = real(llm)
    for seed in range(3):
        drawn: dict[str, Any] = {"temperature": 1.5, "seed": seed, "max_tokens": 300}
        found = answer(service, TOOL_FORMATS[name], tool_choice="required", parallel_tool_calls=False, **drawn)
        ((called, arguments),) = calls_of(found)
        assert found.choices[0].finish_reason == "tool_calls"
        assert found.choices[0].message.content is None
        assert json.loads(arguments) in ([{"city": "Oslo"}, {"city": "Rome"}] if called == "look_up" else [{}])
        named = answer(
            service, TOOL_FORMATS[name], tool_choice={"type": "function", "function": {"name": "look_up"}}, **drawn
        )
        ((called, arguments),) = calls_of(named)
        assert called == "look_up"
        assert json.loads(arguments)["city"] in ("Oslo", "Rome")


def test_strict_tools_and_formats_are_kept_to(llm: fastgen.LLM) -> None:
    service = real(llm)
    tools = [openai.pydantic_function_tool(LookUp)]

    async def use(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, tools=tools, response_format=Weather, temperature=1, seed=1, max_tokens=60
        )

    (choice,) = ask(service, use).choices
    assert choice.finish_reason in ("stop", "tool_calls")
    assert isinstance(choice.message.parsed, Weather) or isinstance(
        choice.message.tool_calls[0].function.parsed_arguments, LookUp
    )
    (_, sampling) = service.asked[-1]
    assert sampling.response_format is not None
    assert sampling.response_format.kind == "grammar"


@pytest.fixture(scope="module")
def empty() -> ScriptedService:
    return always(scripted_codec(HERMES), "{}")


def required_format(
    service: ScriptedService, tool_format: ToolFormat | None = None, **fields: Any
) -> ResponseFormat | None:
    """Returns the format that the answer to a chat with tools must have."""
    answer(service, tool_format, **fields)
    return service.asked[-1][1].response_format


def test_one_strict_tool_is_enough_to_require_a_format(empty: ScriptedService) -> None:
    strict = {"type": "function", "function": {"name": "add", "strict": True}}
    assert required_format(empty, tools=TOOLS) is None
    found = required_format(empty, tools=[TOOLS[0], strict])
    assert found is not None
    assert found.kind == "grammar"


def test_a_function_that_is_named_is_called_once_whatever_else_is_allowed(empty: ScriptedService) -> None:
    named: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": "add"}}}
    assert required_format(empty, **named) == required_format(empty, **named, parallel_tool_calls=False)
    once = required_format(empty, tool_choice="required", parallel_tool_calls=False)
    assert required_format(empty, tool_choice="required") != once


@pytest.mark.parametrize(
    ("tool_format", "fields"),
    [
        (None, {"extra_body": {"guided_choice": ["a"]}}),
        (TOOL_FORMATS["llama3"], {"response_format": {"type": "json_object"}}),
    ],
)
def test_a_format_that_calls_cannot_be_told_from_is_taken_where_a_call_is_demanded(
    empty: ScriptedService, tool_format: ToolFormat | None, fields: dict[str, Any]
) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        found = required_format(empty, tool_format, tool_choice=choice, **fields)
        assert found == required_format(empty, tool_format, tool_choice=choice)
    with pytest.raises(openai.BadRequestError, match="which of them is wanted"):
        required_format(empty, tool_format, **fields)


def test_an_answer_that_is_json_cannot_be_told_from_bare_calls() -> None:
    service = always(scripted_codec(HERMES), "{}")
    with pytest.raises(openai.BadRequestError) as refused:
        answer(service, TOOL_FORMATS["llama3"], response_format={"type": "json_object"})
    assert refused.value.param == "response_format"


def test_parameters_must_be_a_schema_that_can_be_kept_to(llm: fastgen.LLM) -> None:
    for parameters, param in (
        ({"type": "string"}, "tools[0].function.parameters"),
        ({"x-guidance": {}}, "tools[0].function.parameters"),
    ):
        tool = {"type": "function", "function": {"name": "a", "parameters": parameters}}
        with pytest.raises(openai.BadRequestError) as refused:
            answer(real(llm), tools=[tool])
        assert refused.value.param == param


@pytest.mark.parametrize("tool_choice", ["required", "auto"])
def test_bounds_of_parameters_that_would_not_be_followed_are_refused(tool_choice: str) -> None:
    schema = {"properties": {"a": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}}
    function = {"name": "halve", "parameters": schema, "strict": True}
    with pytest.raises(openai.BadRequestError, match=r"exclusiveMinimum 0 .*\(in the parameters of halve\)") as refused:
        answer(
            always(scripted_codec(HERMES), "{}"),
            tools=[{"type": "function", "function": function}],
            tool_choice=tool_choice,
        )
    assert refused.value.param == "tools"
