"""Answers with unusual ends: errors before and in the middle of a stream, timeouts, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx2
import openai
import pytest
from tokenizers import pre_tokenizers

from fastgen.runtime.requests.outputs import FinishReason
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.http.generate import generate_routes
from fastgen.serving.http.openai.run import Batch
from fastgen.serving.http.streaming import Gone
from fastgen.serving.refusals import BadRequestError, EngineDiedError, OverloadedError, RefusedError
from fastgen.serving.service import Running
from tests.serving.scripted import MODEL, ScriptedService, application, ask, scripted_codec

HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
ONCE: dict[str, Any] = {"model": MODEL, "prompt": "Once"}


def ending(reason: FinishReason) -> ScriptedService:
    codec = scripted_codec()
    token_ids = codec.encode_text("One two three four.", add_special_tokens=False)
    return ScriptedService(codec, lambda prompt, sampling: (token_ids, reason))


def refusing(error: RefusedError, after: int = 0) -> ScriptedService:
    """Returns a service that accepts this many requests, and then no more."""
    service = ending("stop")
    answer = service._answer

    def refuse(prompt: list[int], sampling: Any) -> Any:
        if len(service.asked) > after:
            raise error
        return answer(prompt, sampling)

    service._answer = refuse
    return service


def post(service: ScriptedService, path: str, body: dict[str, Any]) -> httpx2.Response:
    """Returns the answer as it is on the wire."""

    async def use(client: openai.AsyncOpenAI) -> httpx2.Response:
        return await client._client.post(f"http://scripted/v1/{path}", json=body)

    return ask(service, use)


both = pytest.mark.parametrize(("path", "body"), [("completions", ONCE), ("chat/completions", HELLO)])


@both
def test_a_request_that_fails_while_it_runs_is_a_500(path: str, body: dict[str, Any]) -> None:
    found = post(ending("error"), path, body)
    assert (found.status_code, found.json()["error"]["code"]) == (500, "generation_failed")


@both
def test_a_stream_that_fails_ends_with_an_error_event(path: str, body: dict[str, Any]) -> None:
    found = post(ending("error"), path, body | {"stream": True})
    *events, last = found.text.split("\n\n")[:-1]
    assert found.status_code == 200
    assert found.headers["content-type"].startswith("text/event-stream")
    assert len(events) > 2
    assert all(event.startswith("data: {") for event in events)
    assert last.startswith('event: error\ndata: {"error":{')
    assert "[DONE]" not in found.text

    async def use(client: openai.AsyncOpenAI) -> None:
        async for _ in await client.chat.completions.create(**HELLO, stream=True):
            pass

    with pytest.raises(openai.APIError, match="failed while it ran"):
        ask(ending("error"), use)


@pytest.mark.parametrize(("accept", "mark"), [("*/*", ""), ("text/event-stream", "event: error\ndata: ")])
def test_an_invocation_that_fails_says_so(accept: str, mark: str) -> None:
    async def use(client: openai.AsyncOpenAI, stream: bool) -> httpx2.Response:
        body = {"inputs": "Once", "stream": stream}
        return await client._client.post("http://scripted/invocations", json=body, headers={"accept": accept})

    whole, streamed = (ask(ending("error"), partial(use, stream=stream)) for stream in (False, True))
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "generation_failed")
    last = streamed.text.rstrip().rpartition(mark or "\n")[2]
    assert mark in streamed.text
    assert json.loads(last)["error"]["code"] == "generation_failed"
    assert "generated_text" not in streamed.text


@both
def test_a_stream_that_does_not_fail_says_that_it_is_done(path: str, body: dict[str, Any]) -> None:
    text = post(ending("stop"), path, body | {"stream": True}).text
    assert text.endswith("data: [DONE]\n\n")
    assert text.count("[DONE]") == 1


@both
def test_a_timeout_keeps_what_there_is(path: str, body: dict[str, Any]) -> None:
    (choice,) = post(ending("timeout"), path, body).json()["choices"]
    assert choice["finish_reason"] == "timeout"
    assert "One two" in str(choice)


@both
def test_a_request_that_the_server_ended_is_a_503(path: str, body: dict[str, Any]) -> None:
    assert post(ending("cancelled"), path, body).status_code == 503


@both
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_a_status(path: str, body: dict[str, Any], stream: bool) -> None:
    overloaded = OverloadedError("too much", retry_after_s=2.2, predicted_ttft_s=3.5)
    found = post(refusing(overloaded), path, body | {"stream": stream})
    assert (found.status_code, found.headers["retry-after"]) == (429, "3")
    assert found.headers["x-predicted-ttft-s"] == "3.500"
    assert found.json()["error"]["code"] == "rate_limit_exceeded"
    found = post(refusing(EngineDiedError("gone")), path, body | {"stream": stream})
    assert (found.status_code, found.json()["error"]["code"]) == (500, "engine_died")
    found = post(refusing(BadRequestError("min_new_tokens must be less")), path, body | {"stream": stream})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "min_tokens")
    assert found.json()["error"]["message"] == "min_tokens must be less"


class Failing(ScriptedService):
    """A service whose answers fail, after some tokens or at once, for a reason that nobody foresaw."""

    num_tokens = 0

    async def submit(self, *arguments: Any, **more: Any) -> Any:
        if not self.num_tokens:
            raise ValueError("a secret of the server")
        running = await super().submit(*arguments, **more)
        del running._request._news[self.num_tokens :]
        running._request.fail(ValueError("a secret of the server"))
        return running


@both
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_the_cause_of_an_unforeseen_failure_is_not_told(path: str, body: dict[str, Any], num_tokens: int) -> None:
    service = Failing(scripted_codec(), lambda prompt, sampling: ([300, 301, 302, 303], "stop"))
    service.num_tokens = num_tokens

    async def run() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=application(service), raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://scripted") as client:
            return await client.post(f"/v1/{path}", json=body | {"stream": num_tokens > 0})

    found = asyncio.run(run())
    error = {"message": "the server failed to answer this request", "type": "server_error", "param": None, "code": None}
    assert found.status_code == (200 if num_tokens else 500)
    assert json.loads(found.text.rpartition("event: error\ndata: ")[2]) == {"error": error}
    assert "secret" not in found.text


def test_a_text_that_the_tokenizer_fails_to_encode_is_a_400() -> None:
    service = ending("stop")
    service.codec.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(length=0)
    found = post(service, "completions", ONCE)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "prompt")
    assert "tokenizer cannot encode this text: chunk size must be non-zero" in found.json()["error"]["message"]


class Panic(BaseException):
    """Stands for a panic of a library in Rust."""


@pytest.mark.parametrize("number", [1, 2])
def test_an_answer_that_ends_in_a_panic_ends_the_stream_of_all(number: int) -> None:
    class Panicking:
        async def __aiter__(self) -> AsyncIterator[list[Any]]:
            yield []
            raise Panic

        def cancel(self) -> None:
            pass

    async def run() -> None:
        async with asyncio.timeout(30), Batch([Panicking() for _ in range(number)]) as batch:  # type: ignore[misc]
            async for _ in batch.updates():
                pass

    with pytest.raises(Panic):
        asyncio.run(run())


@pytest.mark.parametrize(("retry_after_s", "told"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.1, "2"), (60.0, "60")])
def test_a_client_is_told_to_wait_for_whole_seconds_and_one_at_least(retry_after_s: float, told: str) -> None:
    found = post(refusing(OverloadedError("too much", retry_after_s=retry_after_s)), "completions", ONCE)
    assert (found.status_code, found.headers["retry-after"]) == (429, told)
    assert "x-predicted-ttft-s" not in found.headers


def test_of_several_prompts_all_run_or_none() -> None:
    service = refusing(OverloadedError("too much", retry_after_s=1), after=2)
    assert post(service, "completions", ONCE | {"prompt": ["a", "b", "c", "d"]}).status_code == 429
    assert (len(service.asked), service.num_cancelled) == (3, 2)


def test_a_tools_schema_that_the_engine_refuses_is_about_tools() -> None:
    service = refusing(BadRequestError("response_format (grammar) is refused: no"))
    service.codec.tokenizer.chat_template = "{{ tools }}<tool_call>"
    tools = [{"type": "function", "function": {"name": "add", "strict": True}}]
    error = post(service, "chat/completions", HELLO | {"tools": tools}).json()["error"]
    assert (error["param"], error["message"]) == ("tools", "tools (grammar) is refused: no")


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_while_it_waits_is_cancelled(path: str, body: dict[str, Any], stream: bool) -> None:
    service = ScriptedService(scripted_codec(), lambda prompt, sampling: ([], "stop"))
    messages = [
        {"type": "http.request", "body": json.dumps(body | {"stream": stream}).encode(), "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        while len(messages) == 1 and not service.asked:
            await asyncio.sleep(0)
        return messages.pop(0)

    async def send(message: Any) -> None:
        pass

    asyncio.run(asyncio.wait_for(application(service)(scope_of(path), receive, send), 30))
    assert (len(service.asked), service.num_cancelled) == (1, 1)


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_went_before_its_request_was_queued_is_cancelled(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    gone = Gone()

    def leave(prompt_ids: list[int], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
        gone.set()
        return [], "stop"

    service = ScriptedService(scripted_codec(), leave)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body | {"stream": stream}).encode(), "more_body": False}

    async def send(message: Any) -> None:
        pass

    scope = scope_of(path) | {"state": {"gone": gone}}
    asyncio.run(asyncio.wait_for(application(service)(scope, receive, send), 30))
    assert (len(service.asked), service.num_cancelled) == (1, 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ONCE),
        ("/v1/chat/completions", HELLO),
        ("/v1/responses", {"model": MODEL, "input": "Hello"}),
        ("/invocations", {"inputs": "Once"}),
        ("/generate", {"prompt": "Once"}),
    ],
)
def test_no_answer_is_encoded_for_a_client_that_has_gone(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, gone, ended = ending("stop"), Gone(), list[str]()
    for kind in (Batch, Running):
        monkeypatch.setattr(kind, "is_large", True)

    async def endless(work: Any) -> Any:
        gone.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(path)

    service.turns.run = endless  # type: ignore[method-assign]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        pass

    app = application(service)
    app.include_router(generate_routes(service))  # type: ignore[arg-type]
    scope = scope_of(path) | {"path": path, "state": {"gone": gone}}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    assert ended == [path]


def scope_of(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": f"/v1/{path}",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
