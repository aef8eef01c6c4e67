"""What each event of a stream has, and which tokens have none."""

from __future__ import annotations

from typing import Any

import openai

from tests.serving.scripted import MODEL, ScriptedService, ask, scripted_codec

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
ONCE: dict[str, Any] = {"model": MODEL, "prompt": "Hello"}


def thinking() -> ScriptedService:
    """A service whose answers have a special token, which has no text, among others."""
    codec = scripted_codec("", ("<think>",))
    token_ids = codec.encode_text("One<think> two", add_special_tokens=False)
    return ScriptedService(codec, lambda prompt, sampling: (token_ids, "length"))


def test_a_token_without_text_has_no_event() -> None:
    async def use(client: openai.AsyncOpenAI) -> tuple[list[Any], list[Any]]:
        chat = await client.chat.completions.create(**CHAT, stream=True)
        completion = await client.completions.create(**ONCE, stream=True)
        return [chunk.choices[0] async for chunk in chat], [chunk.choices[0] async for chunk in completion]

    (role, *chat, end), completion = ask(thinking(), use)
    assert (role.delta.role, role.delta.content) == ("assistant", "")
    assert all(choice.delta.content for choice in chat)
    assert "".join(choice.delta.content for choice in chat) == "One two"
    assert (end.delta.content, end.finish_reason) == (None, "length")
    assert all(choice.text for choice in completion)
    assert "".join(choice.text for choice in completion) == "One two"


def test_the_log_probability_of_each_token_comes_with_its_text() -> None:
    async def use(client: openai.AsyncOpenAI) -> tuple[list[Any], list[Any]]:
        chat = await client.chat.completions.create(**CHAT, stream=True, logprobs=True)
        completion = await client.completions.create(**ONCE, stream=True, logprobs=0)
        return [chunk.choices[0] async for chunk in chat], [chunk.choices[0] async for chunk in completion]

    (role, *chat, end), completion = ask(thinking(), use)
    assert (role.delta.role, role.logprobs, end.logprobs) == ("assistant", None, None)
    told = [([each.token for each in choice.logprobs.content], choice.delta.content) for choice in chat]
    told_of_completion = [(choice.logprobs.tokens, choice.text) for choice in completion]
    assert told == told_of_completion
    assert all(text == ("" if tokens == ["<think>"] else "".join(tokens)) for tokens, text in told)
    assert (["<think>"], "") in told


def test_the_tokens_of_a_stop_string_stand_where_the_text_ends() -> None:
    codec = scripted_codec()
    token_ids = codec.encode_text("One two three", add_special_tokens=False)
    service = ScriptedService(codec, lambda prompt, sampling: (token_ids, "stop"), at_once=True)
    fields: dict[str, Any] = {**ONCE, "logprobs": 0, "stop": " two three"}

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, Any]:
        (streamed,) = [chunk async for chunk in await client.completions.create(**fields, stream=True)]
        return (await client.completions.create(**fields)).choices[0], streamed.choices[0]

    for found in ask(service, use):
        assert found.text == "One"
        assert found.logprobs.text_offset[0] == 0
        assert found.logprobs.text_offset[-1] == len("One")
