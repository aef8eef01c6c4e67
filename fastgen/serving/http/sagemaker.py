"""SageMaker's container contract: ``/ping`` and ``/invocations``.

A body with ``messages`` or ``prompt`` is an OpenAI request and gets an OpenAI answer. A body with ``inputs`` is a
request of the LMI and TGI containers.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field, ValidationError
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fastgen.runtime.requests.outputs import GenerationOutput, Logprobs
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.http.errors import ERRORS, invalid_request, not_json
from fastgen.serving.http.generate import naming_the_field
from fastgen.serving.http.json_answers import LazyList, json_line, json_response
from fastgen.serving.http.json_route import PARSED, JsonRoute
from fastgen.serving.http.openai.answers import finish_of
from fastgen.serving.http.openai.requests import MAX_PROMPTS
from fastgen.serving.http.openai.run import Batch, encode_prompts, event_stream
from fastgen.serving.http.openai.validation import FewErrors, refused
from fastgen.serving.http.streaming import unless_gone
from fastgen.serving.refusals import BadRequestError
from fastgen.serving.service import Service

_DEFAULT_MAX_NEW_TOKENS = 30  # as in LMI
# Integers that the engine takes.
_Int = Annotated[int, Field(lt=2**63)]
_DRAWING = {"temperature", "top_k", "top_p", "min_p"}
_OPENAI = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}


class Parameters(FewErrors):
    """``parameters`` of LMI and TGI. Without ``do_sample``, tokens are drawn if one of the fields for that is given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    do_sample: bool | None = None
    max_new_tokens: _Int | None = None
    temperature: float | None = None
    top_k: _Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[_Int], Field(fail_fast=True)] | None = None
    ignore_eos_token: bool | None = None
    n: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    details: bool = False
    decoder_input_details: bool = False
    return_full_text: bool = False
    # Keeps so many of the prompt's last tokens.
    truncate: Annotated[int | None, Field(ge=1, lt=2**31)] = None

    # Fields that TGI's clients send whether or not they are wanted.
    adapter_id: Annotated[None, refused("the model runs without adapters")] = None
    best_of: Annotated[Literal[1] | None, refused("use n, or num_beams", unless=1)] = None
    grammar: Annotated[None, refused("send response_format with messages or prompt, or to POST /generate")] = None
    top_n_tokens: Annotated[Literal[0] | None, refused("use logprobs of POST /generate", unless=0)] = None
    typical_p: Annotated[None, refused("use top_p or min_p")] = None
    watermark: Annotated[Literal[False] | None, refused("texts are not watermarked", unless=False)] = None

    def sampling(self) -> SamplingParams:
        """Returns the sampling parameters of the engine. Raises ``InvalidArgumentError``."""
        given = {
            name: value
            for name, value in self.model_dump(exclude_none=True).items()
            if name in SamplingParams.__dataclass_fields__
        }
        draws = not _DRAWING.isdisjoint(given) if self.do_sample is None else self.do_sample
        given["temperature"] = given.get("temperature", 1.0) if draws else 0.0
        given["stop"] = [*(self.stop or ()), *(self.stop_sequences or ())]
        given["ignore_eos"] = bool(self.ignore_eos_token)
        given["beam_width"] = 1 if self.num_beams is None else self.num_beams
        given["logprobs"] = 0
        if given.get("top_k") == -1:  # all, in vLLM
            del given["top_k"]
        if self.decoder_input_details:
            given["prompt_logprobs"] = 0
        return SamplingParams(**{"max_new_tokens": _DEFAULT_MAX_NEW_TOKENS, **given})


class Invocation(FewErrors):
    """The body of a request of LMI and TGI."""

    model_config = ConfigDict(extra="forbid", strict=True)

    inputs: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    parameters: Parameters = Parameters()
    stream: bool = False


_ANSWERS: dict[str, Any] = {"application/json": {}, "application/jsonlines": {}, "text/event-stream": {}}


def _body_schema() -> dict[str, Any]:
    """Returns the schema for the OpenAPI document; OpenAI bodies are described at their own endpoints."""
    theirs = Invocation.model_json_schema()
    theirs["properties"]["parameters"] = theirs.pop("$defs")["Parameters"]
    openai = [{"type": "object", "required": [field]} for field in _OPENAI]
    return {"required": True, "content": {"application/json": {"schema": {"anyOf": [theirs, *openai]}}}}


def sagemaker_routes(service: Service) -> APIRouter:
    """Returns the routes ``/ping`` and ``/invocations``."""
    router = APIRouter(route_class=JsonRoute)

    @router.get("/ping", responses={503: {"description": "The server takes no requests now."}})
    async def ping() -> Response:
        """Answers 200 when the server takes requests, else 503."""
        return Response(status_code=200 if service.state == "ready" else 503)

    @router.post(
        "/invocations",
        response_model=None,
        responses={200: {"content": _ANSWERS, "description": "An answer, or its stream"}, **ERRORS},
        openapi_extra={"requestBody": _body_schema()},
    )
    async def invocations(request: Request) -> Response:
        """Answers a request of OpenAI, or of LMI and TGI."""
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            raise not_json(error) from None
        if not isinstance(body, dict):
            raise BadRequestError("the body must be a JSON object")
        for field, path in _OPENAI.items():
            if field in body:
                return _Forwarded(request, path, {"model": service.model_name, **body})
        try:
            invocation = Invocation.model_validate(body)
        except ValidationError as error:
            raise invalid_request(error.errors(), body) from None
        with naming_the_field("inputs"):
            return await _answer(service, request, invocation)

    return router


class _Forwarded(Response):
    """The response of ``path`` of the same application to ``body``, which is parsed JSON."""

    def __init__(self, request: Request, path: str, body: dict[str, Any]):
        super().__init__()
        self._app, self._path, self._body = request.app.router, path, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}]  # it is not parsed

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"content-type")]
        headers.append((b"content-type", b"application/json"))
        asked = {"type": "http", "path": self._path, "raw_path": self._path.encode(), "headers": headers}
        await self._app({**scope, **asked, "state": {**scope["state"], PARSED: self._body}}, replay, send)


async def _answer(service: Service, request: Request, invocation: Invocation) -> Response:
    texts = [invocation.inputs] if isinstance(invocation.inputs, str) else invocation.inputs
    sampling = invocation.parameters.sampling()
    if invocation.stream and (len(texts) != 1 or sampling.n > 1):
        raise BadRequestError("stream: one text and one answer at a time", param="stream")
    prompts = await encode_prompts(service, texts, param="inputs", keep=invocation.parameters.truncate)
    batch = await Batch.submit(
        service,
        request,
        prompts,
        [sampling] * len(prompts),
        is_stream=invocation.stream,
        param="inputs",
    )
    lmi = _LmiFormat(service, invocation.parameters)
    if invocation.stream:
        is_sse = "text/event-stream" in request.headers.get("accept", "")
        line = _event if is_sse else _line
        events = _lines(batch, lmi, texts[0], line)
        if is_sse:
            return await event_stream(request, batch, events, done=b"")
        response = await event_stream(request, batch, events, done=b"", failed=line)
        response.headers["content-type"] = "application/jsonlines"
        return response
    async with batch, unless_gone(request):
        outputs = await batch.outputs()

        def answer() -> Any:
            answers = [lmi.answer(text, output) for text, output in zip(texts, outputs, strict=True)]
            return answers[0] if isinstance(invocation.inputs, str) else answers

        return await json_response(answer, service.turns, is_large=batch.is_large)


class _LmiFormat:
    """Builds answers in the format of LMI."""

    def __init__(self, service: Service, parameters: Parameters):
        self._codec, self._parameters = service.codec, parameters

    def answer(self, text: str, output: GenerationOutput) -> dict[str, Any]:
        """Returns the whole answer to ``text``, with details if requested. Raises where the generation failed."""
        for completion in output.completions:
            finish_of(completion.finish_reason, completion.error)
        answer: dict[str, Any] = {"generated_text": self.text(text, output.text)}
        if self._parameters.details or self._parameters.decoder_input_details:
            answer["details"] = self.details(text, output.finish_reason, output.token_ids)
            answer["details"]["tokens"] = self.tokens(output.token_ids, output.logprobs)
            if output.prompt_logprobs is not None:
                answer["details"]["prefill"] = self.tokens(output.prompt_token_ids, output.prompt_logprobs)
            if output.others:
                answer["details"]["best_of_sequences"] = [
                    {
                        "generated_text": self.text(text, other.text),
                        "finish_reason": self._finish(other.finish_reason, other.token_ids),
                        "generated_tokens": len(other.token_ids),
                        "tokens": self.tokens(other.token_ids, other.logprobs),
                    }
                    for other in output.others
                ]
        return answer

    def text(self, prompt: str, answer: str) -> str:
        return prompt + answer if self._parameters.return_full_text else answer

    def details(self, text: str, reason: str, token_ids: list[int]) -> dict[str, Any]:
        return {
            "finish_reason": self._finish(reason, token_ids),
            "generated_tokens": len(token_ids),
            "inputs": text,
        }

    def tokens(self, token_ids: list[int], logprobs: Sequence[Logprobs | None] | None) -> Iterable[dict[str, Any]]:
        each = logprobs if logprobs is not None else [None] * len(token_ids)
        return LazyList(
            lambda: (
                {
                    "id": token_id,
                    "text": self._codec.token_bytes(token_id).decode("utf-8", "replace"),
                    "log_prob": None if entry is None else entry[token_id],
                }
                for token_id, entry in zip(token_ids, each, strict=True)
            )
        )

    def _finish(self, reason: str, token_ids: list[int]) -> str:
        if reason != "stop":
            return reason
        return "eos_token" if token_ids and token_ids[-1] in self._codec.eos_token_ids else "stop_sequence"


async def _lines(
    batch: Batch, lmi: _LmiFormat, prompt: str, line: Callable[[Any], bytes]
) -> AsyncGenerator[bytes, None]:
    """Yields a ``line`` for each token; the last one has the whole text."""
    text, token_ids = "", list[int]()
    async with batch:
        async for updates in batch.updates():
            for _, update in updates:
                text += update.text
                token_ids += update.token_ids
                values: list[dict[str, Any]] = [
                    {"token": token} for token in lmi.tokens(update.token_ids, update.logprobs)
                ]
                if update.end is not None:
                    finish_of(update.end.reason, update.end.error)
                    values = values or [{}]
                    values[-1]["generated_text"] = lmi.text(prompt, text)
                    values[-1]["details"] = lmi.details(prompt, update.end.reason, token_ids)
                if values:
                    yield b"".join(map(line, values))


def _line(value: Any) -> bytes:
    return json_line(value) + b"\n"


def _event(value: Any) -> bytes:
    return b"data:" + json_line(value) + b"\n\n"
