"""``/generate``, which takes and gives all that ``LLM`` does; ``/info``; and ``/terminate``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.sampling_params import MAX_N, SamplingParams
from fastgen.serving.answers import Update
from fastgen.serving.api_keys import bearer
from fastgen.serving.ending import Ending
from fastgen.serving.http.errors import ErrorBody, error_body
from fastgen.serving.http.streaming import EventStream, unless_gone
from fastgen.serving.records import ChunkRecord, OutputRecord
from fastgen.serving.refusals import BadRequestError, RefusedError
from fastgen.serving.service import Running, Service

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_StopString = Annotated[str, Field(min_length=1)]
_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 401, 413, 429, 500, 503)}


class GenerateBody(BaseModel):
    """A prompt or a conversation, and the fields of ``fastgen.SamplingParams``; docs/sampling.md has their meaning. One
    that is ``null`` or left out has the model's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str | list[_TokenId] | None = None
    messages: list[dict[str, Any]] | None = None
    stream: bool = False

    max_new_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    min_new_tokens: _Count | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[Annotated[int, Field(ge=0, lt=2**31, strict=False)], _Bias] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: _Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: _StopString | list[_StopString] | None = None
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool | None = None
    logprobs: _Count | None = None
    prompt_logprobs: _Count | None = None
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    beam_width: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    response_format: dict[str, Any] | None = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """``defaults`` with what was given."""
        given = self.model_dump(exclude={"prompt", "messages", "stream"}, exclude_none=True)
        return SamplingParams.from_fields(defaults, **given)


class InfoBody(BaseModel):
    """What is served."""

    model: str
    version: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    state: str


def generate_routes(service: Service) -> APIRouter:
    """``/generate`` and ``/info``."""
    router = APIRouter(responses=_ERRORS)

    @router.post("/generate", response_model=None)
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Go on with ``prompt`` (text or token ids), or answer ``messages``. With ``stream``, server-sent events of the
        pieces, the last of which has the whole answer as ``output``."""
        prompt_ids, sampling = await asyncio.to_thread(_read, service, body)
        running = await service.submit(
            prompt_ids, sampling, is_stream=body.stream, request_id=request.headers.get("x-request-id", "")
        )
        if body.stream:
            return await stream_response(request, running, _events(running))
        async with running:
            output = await unless_gone(request, running.output())
        return Response(msgspec.json.encode(OutputRecord.of(output)), media_type="application/json")

    @router.get("/info")
    async def info() -> InfoBody:
        """What is served, and its sizes."""
        return InfoBody(**service.info())

    return router


def terminate_routes(ending: Ending) -> APIRouter:
    """``/terminate``."""
    router = APIRouter(responses=_ERRORS)

    @router.post("/terminate")
    async def terminate(request: Request) -> dict[str, str]:
        """End the server, when what runs has been answered: for who has its deployment's token, or an API key."""
        ending.ask(bearer(request.headers.get("authorization")))
        return {}

    return router


async def stream_response(request: Request, running: Running, events: AsyncIterator[bytes]) -> Response:
    """The response of a stream, begun with its first event: a refusal until then is a status of its own."""
    try:
        first = await unless_gone(request, anext(events))
    except BaseException:
        running.cancel()
        raise

    async def whole() -> AsyncIterator[bytes]:
        async with running:
            yield first
            try:
                async for event in events:
                    yield event
            except RefusedError as error:
                yield b"event: error\n" + _event(error_body(error)[1])

    return EventStream(whole())


def _read(service: Service, body: GenerateBody) -> tuple[list[int], SamplingParams]:
    codec = service.codec
    try:
        sampling = body.sampling(codec.default_sampling)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidArgumentError("give prompt or messages, and one of them only")
        ids = codec.encode_chat(body.messages) if body.messages is not None else codec.encode(body.prompt or "")
    except InvalidArgumentError as error:
        raise BadRequestError(str(error)) from None
    return ids, sampling


async def _events(running: Running) -> AsyncIterator[bytes]:
    async for updates in running:
        *earlier, last = updates
        output = OutputRecord.of(await running.output()) if running.finished else None
        yield b"".join([_event(_record(update)) for update in earlier] + [_event(_record(last, output))])


def _record(update: Update, output: OutputRecord | None = None) -> ChunkRecord:
    return ChunkRecord(
        index=update.index,
        text=update.text,
        token_ids=update.token_ids,
        finish_reason=None if update.end is None else update.end.reason,
        output=output,
    )


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
