"""``/tokenize`` and ``/detokenize``: what they refuse, and how much they do at once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import openai
import pytest

from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.http.errors import CLIENT_LEFT
from fastgen.serving.http.streaming import Gone
from tests.serving.loop_turns import LoopTurns
from tests.serving.scripted import MODEL, ScriptedService, application, ask, scripted_codec

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


def large_texts(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """Returns the answer to ``body``, and how many turns the event loop had meanwhile."""
    monkeypatch.setattr("fastgen.serving.admission.turns._SHORT_S", 0.0)
    service = ScriptedService(scripted_codec(), lambda prompt, sampling: ([5], "stop"))

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, int]:
        turns = LoopTurns()
        answer = await client._client.post(f"http://scripted/{path}", json=body)
        turns.stop()
        return answer.json(), turns.number

    return ask(service, use)


@pytest.mark.parametrize("num_ids", [1, 31, 32, 33, 5000])
def test_ids_are_decoded_in_pieces_on_the_event_loop(num_ids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, threads = scripted_codec(), set()
    pieces = TextCodec.pieces

    def noted(self: TextCodec, token_ids: Sequence[int]) -> Iterator[str]:
        for piece in pieces(self, token_ids):
            threads.add(threading.current_thread())
            yield piece

    monkeypatch.setattr(TextCodec, "pieces", noted)
    ids = (codec.encode("the cat") * num_ids)[:num_ids]
    answer, num_turns = large_texts("detokenize", {"tokens": ids}, monkeypatch)
    assert answer == {"prompt": codec.decode(ids)}
    assert num_turns > num_ids // 32
    prompts = [ids[begin : begin + 1000] for begin in range(0, num_ids, 1000)]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 1, "echo": True}
    answer, num_turns = large_texts("v1/completions", body, monkeypatch)
    assert [each["text"] for each in answer["choices"]] == [codec.decode([*each, 5]) for each in prompts]
    assert num_turns > num_ids // 32
    assert threads == {threading.current_thread()}


def test_nothing_is_decoded_for_a_client_that_has_gone() -> None:
    service, num_pieces = ScriptedService(scripted_codec(), lambda prompt, sampling: ([5], "stop")), 0

    def pieces(token_ids: Sequence[int]) -> Iterator[str]:
        nonlocal num_pieces
        for _ in token_ids:
            num_pieces += 1
            yield "a"

    service.codec.pieces = pieces  # type: ignore[method-assign]

    async def run() -> None:
        gone = Gone()
        sent: list[Any] = []
        body = json.dumps({"tokens": [5] * 50_000}).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/detokenize",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
            "state": {"gone": gone},
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        answering = asyncio.create_task(application(service)(scope, receive, send))
        while not num_pieces:
            await asyncio.sleep(0)
        gone.set()
        await answering
        assert sent[0]["status"] == CLIENT_LEFT

    asyncio.run(run())
    assert num_pieces < 50_000
