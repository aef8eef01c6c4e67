"""The fields of vLLM's clients, with OpenAI's client and ``extra_body``: they have vLLM's meaning."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

import fastgen
from fastgen.runtime.requests.sampling_params import SamplingParams
from tests.serving.scripted import MODEL as SCRIPTED
from tests.serving.scripted import ScriptedService, openai_client, scripted_codec
from tests.serving.server_process import ServerProcess

MODEL = "tiny-llama"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]
FOX = {
    "type": "object",
    "properties": {"name": {"enum": ["Lily", "Tom"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **fields: Any) -> str:
    known = {"max_tokens": 60, "temperature": 1, "seed": 3, **fields}
    openais = {name: known.pop(name) for name in [*known] if name in ("max_tokens", "temperature", "seed", "messages")}
    found = client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **openais}, extra_body=known)
    assert found.choices[0].message.content is not None
    return found.choices[0].message.content


def completion(client: openai.OpenAI, prompt: Any = "Once upon a time", **fields: Any) -> str:
    return (
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=30, temperature=0, extra_body=fields)
        .choices[0]
        .text
    )


@pytest.mark.parametrize("given", [{"json": FOX}, {"json": json.dumps(FOX)}])
def test_structured_outputs_of_a_schema(client: openai.OpenAI, given: dict[str, Any]) -> None:
    room: dict[str, Any] = {"max_tokens": 200}
    assert set(json.loads(chat(client, structured_outputs=given, **room))) == {"name", "age"}
    assert set(json.loads(chat(client, guided_json=given["json"], **room))) == {"name", "age"}
    assert set(json.loads(completion(client, structured_outputs=given | {"disable_any_whitespace": True}))) == {
        "name",
        "age",
    }


def test_structured_outputs_of_other_kinds(client: openai.OpenAI) -> None:
    choices = ['"a fox"\n', "a | b\\"]
    for kind, value, allowed in (
        ("choice", choices, choices),
        ("regex", "red|blue", ["red", "blue"]),
        ("grammar", 'start: "red" | "blue"', ["red", "blue"]),
        ("grammar", 'root ::= "red" | "blue"', ["red", "blue"]),
    ):
        for fields in ({"structured_outputs": {kind: value}}, {f"guided_{kind}": value}):
            assert chat(client, **fields, guided_decoding_backend="auto") in allowed
            assert completion(client, **fields) in allowed
    found = chat(client, structured_outputs={"json_object": True, "disable_fallback": True}, max_tokens=9)
    assert found.startswith("{")


def test_json_without_whitespace(client: openai.OpenAI) -> None:
    compact = {"disable_any_whitespace": True}
    for fields in (
        {"structured_outputs": {"json": FOX, **compact}},
        {
            "structured_outputs": compact,
            "response_format": {"type": "json_schema", "json_schema": {"name": "fox", "schema": FOX}},
        },
    ):
        for seed in range(4):
            text = chat(client, **fields, temperature=1.5, seed=seed)
            assert text == json.dumps(json.loads(text), separators=(",", ":"))


def test_arguments_of_tools_without_whitespace(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=100, temperature=1.5, seed=1,
        tools=[{"type": "function", "function": {"name": "fox", "parameters": FOX}}], tool_choice="required",
        extra_body={"structured_outputs": {"disable_any_whitespace": True}},
    )  # fmt: skip
    calls = found.choices[0].message.tool_calls
    assert calls
    for call in calls:
        arguments = call.function.arguments  # type: ignore[union-attr]
        assert arguments == json.dumps(json.loads(arguments), separators=(",", ":"))


def test_sampling_fields(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    plain = completion(client)
    assert completion(client, top_k=-1) == plain
    assert completion(client, use_beam_search=True) == plain
    expected = llm.generate("Once upon a time", max_new_tokens=30, beam_width=3, length_penalty=2.0, n=3, temperature=0)
    found = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=30, n=3,
        extra_body={"use_beam_search": True, "length_penalty": 2.0},
    )  # fmt: skip
    assert [choice.text for choice in found.choices] == [each.text for each in expected.completions]


def test_the_end_of_a_prompt_counts(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    ids = llm.tokenizer("There was a cat. Once upon a time")["input_ids"]
    assert completion(client, ids, truncate_prompt_tokens=5) == completion(client, ids[-5:])
    assert completion(client, [5] * 5000, truncate_prompt_tokens=-1) == completion(client, [5] * (2048 - 30))
    echoed = client.completions.create(
        model=MODEL, prompt=ids, max_tokens=0, echo=True, logprobs=0, extra_body={"truncate_prompt_tokens": 5}
    ).choices[0]
    assert echoed.text == llm.tokenizer.decode(ids[-5:])
    assert echoed.logprobs is not None
    assert len(echoed.logprobs.tokens or ()) == 5
    text = "Once upon a time"
    bare = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert completion(client, text, add_special_tokens=False) == completion(client, bare)


@pytest.mark.parametrize(
    ("fields", "num_prompt", "num_answer"),
    [
        ({"truncate_prompt_tokens": -1}, 63, 1),
        ({"truncate_prompt_tokens": -1, "max_tokens": 30}, 34, 30),
        ({"truncate_prompt_tokens": -1, "max_completion_tokens": 30}, 34, 30),
        ({"truncate_prompt_tokens": 1, "max_tokens": 30}, 1, 30),
    ],
)
def test_as_much_of_a_prompt_is_kept_as_the_answer_leaves_room_for(
    fields: dict[str, Any], num_prompt: int, num_answer: int
) -> None:
    service = ScriptedService(scripted_codec(), lambda prompt, sampling: ([5], "stop"), max_model_len=64)

    async def run() -> None:
        async with openai_client(service) as client:
            long = [{"role": "user", "content": "word " * 200}]
            await client.chat.completions.create(model=SCRIPTED, messages=long, extra_body=fields)  # type: ignore[arg-type]
            if "max_completion_tokens" not in fields:
                await client.completions.create(model=SCRIPTED, prompt=[5] * 200, extra_body=fields)
            too_many = {"truncate_prompt_tokens": -1, "max_tokens": 64}
            with pytest.raises(openai.BadRequestError, match="the prompt has 1 tokens") as refused:
                await client.completions.create(model=SCRIPTED, prompt=[5] * 200, extra_body=too_many)
            assert refused.value.param == "max_tokens"

    asyncio.run(run())
    for prompt_ids, sampling in service.asked:
        assert (len(prompt_ids), sampling.max_new_tokens) == (num_prompt, num_answer)


def tokens_of(client: openai.OpenAI, **fields: Any) -> list[int]:
    root = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    tokens: list[int] = root.post("/tokenize", body=fields, cast_to=dict[str, Any])["tokens"]
    return tokens


def test_the_prompt_of_a_chat_may_end_elsewhere(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Once upon a"}]
    template = llm.tokenizer.apply_chat_template
    for fields in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        expected = template(begun, tokenize=False, **fields)
        ids = llm.tokenizer(expected, add_special_tokens=False)["input_ids"]
        assert tokens_of(client, messages=begun, **fields) == ids
        assert chat(client, messages=begun, temperature=0, max_tokens=30, **fields) == completion(client, ids)
    usual = template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = llm.tokenizer(usual, add_special_tokens=True)["input_ids"]
    assert tokens_of(client, messages=MESSAGES, add_special_tokens=True) == ids
    for field in ({"continue_final_message": True}, {"chat_template_kwargs": {"a": 1}}):
        with pytest.raises(openai.BadRequestError, match="goes with messages only"):
            tokens_of(client, prompt="Once", **field)


def prompt_of(template: str, **fields: Any) -> str:
    """Returns the prompt that a chat with ``fields`` has."""
    service = ScriptedService(scripted_codec(template), lambda prompt, sampling: ([5], "stop"))

    async def run() -> None:
        async with openai_client(service) as client:
            await client.chat.completions.create(model=SCRIPTED, messages=MESSAGES, extra_body=fields)

    asyncio.run(run())
    text: str = service.codec.tokenizer.decode(service.asked[-1][0])
    return text


def test_the_template_gets_what_the_request_sets() -> None:
    template = "{{ enable_thinking | tojson }} {{ (documents or []) | tojson }} {{ reasoning_effort | tojson }}"
    nothing = "{{ enable_thinking is defined }} {{ reasoning_effort is defined }}"
    assert prompt_of(nothing) == "False False"
    assert prompt_of(nothing, chat_template_kwargs={"enable_thinking": False}) == "True False"
    assert prompt_of(
        template, chat_template_kwargs={"enable_thinking": False}, documents=[{"text": "a"}], reasoning_effort="low"
    ) == ('false [{"text": "a"}] "low"')
    thinks = "{{ enable_thinking | tojson }}"
    assert prompt_of(thinks, reasoning_effort="none") == "false"
    assert prompt_of(thinks, reasoning_effort="high") == "true"
    assert prompt_of("Hello", reasoning_effort="none") == "Hello"
    with pytest.raises(openai.BadRequestError) as refused:
        prompt_of("Hello", reasoning_effort="high")
    assert refused.value.param == "reasoning_effort"


END = "<|end|>"


def written(text: str, **fields: Any) -> tuple[str, SamplingParams]:
    """Returns the text of an answer, and how it was sampled. Special tokens in ``text`` become tokens."""
    codec = scripted_codec()
    token_ids = codec.encode_text(text, add_special_tokens=False)
    service = ScriptedService(codec, lambda prompt, sampling: (token_ids, "stop"))

    async def run() -> str:
        async with openai_client(service) as client:
            whole = await client.completions.create(model=SCRIPTED, prompt="a", max_tokens=50, extra_body=fields)
            stream = await client.completions.create(
                model=SCRIPTED, prompt="a", max_tokens=50, stream=True, extra_body=fields
            )
            pieces = [chunk.choices[0].text async for chunk in stream]
            assert "".join(pieces) == whole.choices[0].text
            return whole.choices[0].text

    return asyncio.run(run()), service.asked[-1][1]


def test_special_tokens_may_have_a_text() -> None:
    text = "One<|user|> two<|endoftext|>"
    assert written(text)[0] == "One two"
    assert written(text, spaces_between_special_tokens=True)[0] == "One two"
    assert written(text, skip_special_tokens=False, spaces_between_special_tokens=False)[0] == "One<|user|> two"
    assert written(text, skip_special_tokens=False, include_stop_str_in_output=True)[0] == text
    assert written(text, include_stop_str_in_output=True)[0] == "One two"


def test_the_end_may_be_part_of_the_text() -> None:
    assert written("One, two", stop=", ")[0] == "One"
    assert written("One, two", stop=",", include_stop_str_in_output=True)[0] == "One,"


def test_a_special_token_is_a_stop_token_where_it_has_a_text() -> None:
    text, sampling = written(f"One{END}", stop=["two", END], skip_special_tokens=False)
    assert (text, sampling.stop) == ("One", ("two",))
    assert len(sampling.stop_token_ids) == 1
    text, _ = written(f"One{END}", stop=[END], skip_special_tokens=False, include_stop_str_in_output=True)
    assert text == f"One{END}"


def test_what_has_no_effect_or_is_nothing_is_taken(client: openai.OpenAI) -> None:
    assert completion(
        client,
        bad_words=[],
        logits_processors=[],
        return_token_ids=False,
        return_tokens_as_token_ids=False,
        allowed_token_ids=None,
        vllm_xargs={},
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        min_tokens=0,
        include_stop_str_in_output=False,
    ) == completion(client)
    assert chat(client, echo=False, include_reasoning=True, add_generation_prompt=True) == chat(client)
