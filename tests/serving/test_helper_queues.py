"""Chats and texts that wait for helper processes: they hold up nothing else, not too many wait, and one whose client
leaves makes room.
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.admission.request_limits import MAX_MESSAGES, MAX_TOKEN_IDS
from fastgen.serving.http.generate import CheckBody, generate_routes
from fastgen.serving.http.openai.messages import MAX_PARTS
from fastgen.serving.http.streaming import Gone
from fastgen.serving.isolated.encoding.encoder import TextEncoder
from fastgen.serving.isolated.queue import ByHelpers, WorkQueue
from fastgen.serving.isolated.templates.renderer import TemplateRenderer
from fastgen.serving.isolated.texts import encode_chat, encode_text
from fastgen.serving.refusals import OverloadedError, UnavailableError
from tests.serving.scripted import MODEL, ScriptedService, application, scripted_codec

CHAT = [{"role": "user", "content": "Hello"}]
WAIT_S = 30.0


class Helpers:
    """Helper processes that answer once ``may_end`` is set, one at a time; one call more may wait."""

    def __init__(self, answer: Any):
        self.may_end, self.num_begun, self._answer = threading.Event(), 0, answer
        self.queue = WorkQueue("pieces of work wait here", max_running=1, max_waiting=1, retry_after_s=7.0)
        self.function = ByHelpers(self._do, self.queue)

    def _do(self, *arguments: Any) -> Any:
        self.num_begun += 1
        assert self.may_end.wait(WAIT_S)
        return self._answer

    async def until(self, num_begun: int, num_waiting: int) -> None:
        while (self.num_begun, self.queue._num_waiting) != (num_begun, num_waiting):
            await asyncio.sleep(0.001)


# Loading its tokenizer takes as long as most tests.
kept_codec = functools.cache(scripted_codec)


def run(test: Callable[[TextCodec, FastAPI, Helpers], Any], kind: str = "templates") -> None:
    """Runs ``test`` with a server whose templates or texts wait for helpers, and with one thread for all else."""

    async def inner() -> None:
        known = kept_codec()
        codec = TextCodec(known.tokenizer, eos_token_ids=known.eos_token_ids, default_sampling=known.default_sampling)
        helpers = Helpers("Hello" if kind == "templates" else [5, 6])
        if kind == "templates":
            codec.render_chat = helpers.function
        else:
            codec.encode_plain, codec.waits_to_encode = helpers.function, True
        service: Any = ScriptedService(codec, lambda prompt_ids, sampling: ([5], "length"))
        service.refusal = taken
        app = application(service)
        app.include_router(generate_routes(service))
        with ThreadPoolExecutor(1) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            try:
                async with asyncio.timeout(WAIT_S):
                    await test(codec, app, helpers)
            finally:
                helpers.may_end.set()
        helpers.queue.close()

    asyncio.run(inner())


async def taken(prompt_ids: list[int], sampling: SamplingParams) -> None:
    """Refuses nothing."""


async def post(app: FastAPI, path: str, body: Any, gone: Gone | None = None) -> tuple[int, dict[str, str], Any]:
    """Returns the status, headers and body of the answer."""
    encoded, sent = json.dumps(body).encode(), list[Any]()

    async def receive() -> Any:
        return {"type": "http.request", "body": encoded, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "state": {"gone": gone or Gone()},
    }
    await app(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in sent)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, json.loads(text) if text else None


@asynccontextmanager
async def busy(helpers: Helpers, ask: Callable[[], Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Begins two calls of ``ask``: a helper works on one, and the other waits. Both are answered afterwards."""
    tasks = [asyncio.create_task(ask()) for _ in range(2)]
    await helpers.until(num_begun=1, num_waiting=1)
    yield tasks
    helpers.may_end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    await helpers.queue._free.acquire()  # no place is lost
    assert helpers.queue._num_waiting == 0


def test_a_chat_that_waits_holds_no_thread_and_one_too_many_is_refused() -> None:
    async def test(codec: TextCodec, app: FastAPI, helpers: Helpers) -> None:
        async with busy(helpers, lambda: encode_chat(codec, CHAT)) as tasks:
            assert await asyncio.to_thread(lambda: "other work") == "other work"
            assert await encode_text(codec, "Hello", add_special_tokens=True), "no template is needed"
            with pytest.raises(OverloadedError, match=r"^1 pieces of work wait here, .* at most 1 wait") as refused:
                await encode_chat(codec, CHAT)
            assert refused.value.retry_after_s == 7.0
        expected = codec.encode_text("Hello", add_special_tokens=False)
        assert [task.result() for task in tasks] == [expected] * 2

    run(test)


def test_so_does_a_text_that_waits_to_be_encoded() -> None:
    async def test(codec: TextCodec, app: FastAPI, helpers: Helpers) -> None:
        async with busy(helpers, lambda: encode_text(codec, "Hello", add_special_tokens=True)) as tasks:
            assert await asyncio.to_thread(lambda: "other work") == "other work"
            for encode in (encode_text(codec, "Hello", add_special_tokens=True), encode_chat(codec, CHAT)):
                with pytest.raises(OverloadedError):
                    await encode
        assert [task.result() for task in tasks] == [[5, 6]] * 2

    run(test, "texts")


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("templates", "/generate", {"messages": CHAT}),
        ("templates", "/check", {"requests": [{"messages": CHAT}]}),
        ("templates", "/v1/chat/completions", {"model": MODEL, "messages": CHAT, "max_tokens": 1}),
        ("templates", "/tokenize", {"messages": CHAT}),
        ("texts", "/generate", {"prompt": "Hello"}),
    ],
)
def test_a_request_that_finds_too_many_waiting_gets_a_429(kind: str, path: str, body: Any) -> None:
    async def test(codec: TextCodec, app: FastAPI, helpers: Helpers) -> None:
        async with busy(helpers, lambda: post(app, path, body)) as tasks:
            status, headers, answer = await post(app, path, body)
            assert (status, headers["retry-after"]) == (429, "7")
            assert answer["error"]["type"] == "rate_limit_error"
            assert (await post(app, "/generate", {"prompt": [5]}))[0] == 200, "token ids need no helper"
        assert [task.result()[0] for task in tasks] == [200, 200]

    run(test, kind)


def test_a_client_of_generate_that_leaves_makes_room() -> None:
    async def test(codec: TextCodec, app: FastAPI, helpers: Helpers) -> None:
        async with busy(
            helpers, lambda: post(app, "/v1/chat/completions", {"model": MODEL, "messages": CHAT})
        ) as tasks:
            tasks.pop().cancel()
            await helpers.until(num_begun=1, num_waiting=0)
            gone = Gone()
            leaving = asyncio.create_task(post(app, "/generate", {"messages": CHAT}, gone))
            await helpers.until(num_begun=1, num_waiting=1)
            gone.set()
            assert (await leaving)[0] == 499
            assert helpers.queue._num_waiting == 0
        assert helpers.num_begun == 1

    run(test)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (CHAT * (MAX_MESSAGES + 1), f"at most {MAX_MESSAGES} items"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}] * (MAX_PARTS + 1)}],
            f"at most {MAX_PARTS} parts",
        ),
    ],
)
def test_generate_takes_as_many_messages_and_parts_as_chats_do(messages: Any, why: str) -> None:
    async def test(codec: TextCodec, app: FastAPI, helpers: Helpers) -> None:
        for path, body in (("/generate", {"messages": messages}), ("/check", {"requests": [{"messages": messages}]})):
            status, _, answer = await post(app, path, body)
            assert status == 400
            assert why in answer["error"]["message"]
            assert answer["error"]["param"].endswith("messages")
        assert helpers.num_begun == 0

    run(test)


def test_requests_that_are_checked_have_as_many_parts_and_token_ids_as_one_call_may() -> None:
    parts, ids = [{"type": "text", "text": "a"}] * (MAX_PARTS // 2), [5] * (MAX_TOKEN_IDS // 2)
    chat = {"messages": [{"role": "user", "content": parts}]}
    for first, why in (
        (chat, f"at most {MAX_PARTS} parts in all messages together"),
        ({"prompt": ids}, f"at most {MAX_TOKEN_IDS} token ids in all"),
    ):
        more = {"prompt": [5]} if "prompt" in first else {"messages": [{"role": "user", "content": parts[:1]}]}
        CheckBody.model_validate({"requests": [first] * 2})
        with pytest.raises(ValidationError, match=why):
            CheckBody.model_validate({"requests": [first] * 2 + [more]})


def test_the_queues_of_the_real_helpers() -> None:
    tokenizer: Any = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: ""))
    for function in (TemplateRenderer(tokenizer).render, TextEncoder(tokenizer).encode):
        assert function.queue._free._value == 4
        assert function.queue._max_waiting == 1024


def test_work_for_which_the_system_has_no_thread_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def inner() -> None:
        queue = WorkQueue("pieces of work wait here", max_running=2, max_waiting=1, retry_after_s=7.0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for number in range(3):
                with pytest.raises(UnavailableError, match="no thread for this now: can't start new thread"):
                    await queue.run(functools.partial(done.append, number))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(queue.run(functools.partial(done.append, number)) for number in (3, 4)))
        queue.close()

    asyncio.run(inner())
    assert sorted(done) == [3, 4]
