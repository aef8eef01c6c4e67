"""``/tokenize`` and ``/detokenize``: what they refuse, and how."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from tests.serving.scripted import MODEL, ScriptedService, ask, scripted_codec

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "tools": [TOOL]}, 400, "tools"),
        ("tokenize", {"prompt": "word " * 10_000}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("detokenize", {"tokens": [5], "model": "gpt-9"}, 404, "model"),
        ("detokenize", {"tokens": [5, 10**6]}, 400, "tokens"),
    ],
)
def test_what_is_no_text_of_the_model_is_refused(path: str, body: dict[str, Any], status: int, param: str) -> None:
    service = ScriptedService(scripted_codec(), lambda prompt, sampling: ([5], "stop"))
    service.codec.max_tokens = 100

    async def use(client: openai.AsyncOpenAI) -> httpx2.Response:
        return await client._client.post(f"http://scripted/{path}", json=body)

    answer = ask(service, use)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_tools_are_rendered_as_in_a_chat() -> None:
    service = ScriptedService(scripted_codec("{{ tools | tojson }}<tool_call>"), lambda prompt, sampling: ([5], "stop"))
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "add", "strict": True}}]}

    async def use(client: openai.AsyncOpenAI) -> httpx2.Response:
        chat = {**body, "model": MODEL, "tool_choice": "auto", "max_tokens": 1}
        (await client._client.post("http://scripted/v1/chat/completions", json=chat)).raise_for_status()
        return await client._client.post("http://scripted/tokenize", json=body)

    tokens = ask(service, use).json()["tokens"]
    ((prompt_ids, _),) = service.asked
    assert tokens == prompt_ids
