"""``/v1/chat/completions`` with OpenAI's own client: the template renders the conversation, and the answer is the
library's.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

import fastgen
from tests.serving.server_process import ServerProcess

MODEL = "tiny-llama"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tell me a story about a fox."},
]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def test_the_answer_is_the_librarys(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    expected = llm.chat(MESSAGES, max_new_tokens=20, temperature=0.9, seed=7, n=2)
    found = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=20, temperature=0.9, seed=7, n=2
    )
    assert found.object == "chat.completion"
    for choice, each in zip(found.choices, expected.completions, strict=True):
        assert (choice.message.role, choice.message.content) == ("assistant", each.text)
        assert choice.message.tool_calls is None
        assert (choice.index, choice.finish_reason) == (each.index, each.finish_reason)
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert found.usage.completion_tokens == sum(len(each.token_ids) for each in expected.completions)


def test_an_answer_may_be_as_long_as_fits(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "word " * 500}]
    found = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, extra_body={"ignore_eos": True, "timeout_s": 120}
    )
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert found.usage.total_tokens == llm.config.max_model_len


def test_roles_and_parts(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    expected = llm.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}],
        max_new_tokens=8,
        temperature=0,
    )
    found = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]},
        ],
        max_tokens=8,
        temperature=0,
    )
    assert found.choices[0].message.content == expected.text
    again = client.chat.completions.create(
        model=MODEL,
        messages=[*MESSAGES, found.choices[0].message.model_dump(), {"role": "user", "content": "More"}],
        max_tokens=4,
    )
    assert again.choices[0].message.content


def test_logprobs(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    expected = llm.chat(MESSAGES, max_new_tokens=8, temperature=1.5, seed=1, logprobs=3)
    fields: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 1.5, "seed": 1, "logprobs": True,
    }  # fmt: skip
    found = client.chat.completions.create(**fields, top_logprobs=3).choices[0].logprobs
    streamed = [
        item
        for chunk in client.chat.completions.create(**fields, top_logprobs=3, stream=True)
        for item in (chunk.choices[0].logprobs.content or () if chunk.choices[0].logprobs else ())
    ]
    assert found is not None
    assert found.content is not None
    assert expected.logprobs is not None
    assert streamed == found.content
    for item, token_id, each in zip(found.content, expected.token_ids, expected.logprobs, strict=True):
        assert item.logprob == each[token_id]
        assert item.token == llm.tokenizer.decode([token_id])
        assert bytes(item.bytes or ()).decode(errors="replace") == item.token
        assert [top.logprob for top in item.top_logprobs] == sorted(each.values(), reverse=True)[:3]
    assert b"".join(bytes(item.bytes or ()) for item in found.content).decode(errors="replace") == expected.text
    alone = client.chat.completions.create(**fields).choices[0].logprobs
    assert alone is not None
    assert [item.logprob for item in alone.content or ()] == [item.logprob for item in found.content]
    assert all(item.top_logprobs == [] for item in alone.content or ())


def test_a_stream_says_what_the_whole_says(server: ServerProcess, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 1, "seed": 9}
    whole = client.chat.completions.create(**fields, n=2)

    async def run() -> tuple[dict[int, str], dict[int, str], Any]:
        texts, finishes, usage = {0: "", 1: ""}, {}, None
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
            roles: dict[int, list[str | None]] = {0: [], 1: []}
            async for chunk in await client.chat.completions.create(
                **fields, n=2, stream=True, stream_options={"include_usage": True}
            ):
                assert usage is None
                usage = chunk.usage
                for choice in chunk.choices:
                    assert choice.index not in finishes
                    roles[choice.index].append(choice.delta.role)
                    texts[choice.index] += choice.delta.content or ""
                    if choice.finish_reason:
                        finishes[choice.index] = choice.finish_reason
            for first, *rest in roles.values():
                assert (first, {*rest}) == ("assistant", {None})
        return texts, finishes, usage

    texts, finishes, usage = asyncio.run(run())
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert finishes == {choice.index: choice.finish_reason for choice in whole.choices}
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


class Fox(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=99)
    is_red: bool


def test_structured_output(client: openai.OpenAI) -> None:
    for seed in range(3):
        parsed = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Fox, temperature=1, seed=seed, max_tokens=200
        )
        assert isinstance(parsed.choices[0].message.parsed, Fox)
        assert parsed.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Fox, temperature=1, seed=0, max_tokens=200
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Fox)


def test_any_json_object(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=300, temperature=0,
        logit_bias={"4": -100},
    )  # fmt: skip
    if found.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(found.choices[0].message.content or ""), dict)
    assert (found.choices[0].message.content or "").startswith("{")


def test_what_has_no_effect_is_taken(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    expected = llm.chat(MESSAGES, max_new_tokens=4, temperature=0)
    found = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=4,
        temperature=0,
        user="someone",
        metadata={"a": "b"},
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="in_memory",
        service_tier="auto",
        store=False,
        modalities=["text"],
        response_format={"type": "text"},
    )
    assert found.choices[0].message.content == expected.text


def test_models_and_tokens(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    root = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return root.post(path, body=body, cast_to=dict[str, Any])

    ids = llm.tokenizer("Hello there")["input_ids"]
    assert post("/tokenize", {"prompt": "Hello there"})["tokens"] == ids
    assert post("/tokenize", {"prompt": "Hello there", "add_special_tokens": False})["tokens"] == ids[1:]
    chat = post("/tokenize", {"messages": MESSAGES})
    assert chat["tokens"] == llm.chat(MESSAGES, max_new_tokens=1).prompt_token_ids
    assert chat["count"] == len(chat["tokens"])
    assert post("/detokenize", {"tokens": ids}) == {"prompt": "Hello there"}
    assert root.get("/version", cast_to=dict[str, Any]) == {"version": fastgen.__version__}
