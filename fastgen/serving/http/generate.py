"""``/generate``, with all features of ``LLM``; ``/info``; and ``/terminate``."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.responses import Response

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.admission.request_limits import (
    MAX_BEAMS,
    MAX_BIASES,
    MAX_CHECKED,
    MAX_MESSAGES,
    MAX_N,
    MAX_TOKEN_IDS,
)
from fastgen.serving.admission.turns import Turns
from fastgen.serving.answers import Update
from fastgen.serving.api_keys import bearer
from fastgen.serving.ending import Ending
from fastgen.serving.http.errors import ERRORS
from fastgen.serving.http.json_answers import event_of, json_response, large_event_of
from fastgen.serving.http.json_route import JsonRoute
from fastgen.serving.http.openai.messages import check_num_parts, few_parts
from fastgen.serving.http.openai.run import arrival_of, event_stream, request_id_of, session_of
from fastgen.serving.http.openai.validation import FewErrors, at_most, check_num_token_ids
from fastgen.serving.http.records import ChunkRecord, OutputRecord
from fastgen.serving.http.streaming import unless_gone
from fastgen.serving.isolated.queue import in_turn
from fastgen.serving.isolated.texts import encode_chat
from fastgen.serving.refusals import BadRequestError
from fastgen.serving.service import Running, Service
from fastgen.serving.threads import on_thread

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_StopString = Annotated[str, Field(min_length=1)]


class GenerateBody(FewErrors):
    """A prompt or a conversation, and the fields of ``fastgen.SamplingParams``; docs/sampling.md describes them. A
    field that is ``null`` or left out has the model's default.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    elsewhere = dict.fromkeys(
        ("inputs", "parameters"), "POST /invocations takes the bodies of TGI and LMI, which have it"
    )

    prompt: str | Annotated[list[_TokenId], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)] | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES), few_parts] | None = None
    stream: bool = False

    max_new_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    min_new_tokens: _Count | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: (
        Annotated[dict[Annotated[int, Field(ge=0, lt=2**31, strict=False)], _Bias], at_most(MAX_BIASES)] | None
    ) = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: _Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: _StopString | Annotated[list[_StopString], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    logprobs: _Count | None = None
    prompt_logprobs: _Count | None = None
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    beam_width: Annotated[int, Field(ge=1, le=MAX_BEAMS)] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    response_format: dict[str, Any] | None = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """Returns ``defaults`` with the given fields replaced."""
        given = self.model_dump(exclude={"prompt", "messages", "stream"}, exclude_none=True)
        return SamplingParams.from_fields(defaults, **given)


def _few_in_all(bodies: list[GenerateBody]) -> list[GenerateBody]:
    """Limits the token ids and the parts of all requests together."""
    check_num_token_ids(each.prompt for each in bodies)
    check_num_parts(chain.from_iterable(each.messages or () for each in bodies))
    return bodies


class CheckBody(FewErrors):
    """Requests of ``/generate``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    requests: Annotated[list[GenerateBody], Field(max_length=MAX_CHECKED), AfterValidator(_few_in_all)]


class CheckedBody(BaseModel):
    """The reasons why requests would be refused, ``null`` for one that would not."""

    errors: list[str | None]


class InfoBody(BaseModel):
    """The served model, and its limits."""

    model: str
    version: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    state: str


def generate_routes(service: Service) -> APIRouter:
    """Returns the routes ``/generate`` and ``/info``."""
    router = APIRouter(route_class=JsonRoute, responses=ERRORS)

    @router.post(
        "/generate",
        response_model=None,
        responses={
            200: {
                "content": {"application/json": {}, "text/event-stream": {}},
                "description": "An answer, or its stream",
            }
        },
    )
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Continue ``prompt`` (text or token ids), or answer ``messages``. With ``stream``, the response is server-sent
        events; the last one has the whole answer as ``output``.
        """
        with naming_the_field("prompt"):
            return await answer(body, request)

    async def answer(body: GenerateBody, request: Request) -> Response:
        async with unless_gone(request):
            prompt_ids, sampling = await _read(service, body)
            running = await service.submit(
                prompt_ids,
                sampling,
                is_stream=body.stream,
                arrived_s=arrival_of(request),
                request_id=request_id_of(request),
                session=session_of(request),
            )
        if body.stream:
            return await event_stream(request, running, _events(running, service.turns))
        async with running, unless_gone(request):
            output = await running.output()
            return await json_response(lambda: OutputRecord.of(output), service.turns, is_large=running.is_large)

    @router.post("/check")
    async def check(body: CheckBody, request: Request) -> CheckedBody:
        """Check whether requests of ``/generate`` could be served; nothing is run."""
        async with unless_gone(request):
            return CheckedBody(errors=[await refusal(each) for each in body.requests])

    async def refusal(body: GenerateBody) -> str | None:
        try:
            return await service.refusal(*await _read(service, body))
        except (BadRequestError, InvalidArgumentError) as error:
            return str(error)

    @router.get("/info")
    async def info() -> InfoBody:
        """The model that is served, and its sizes."""
        return InfoBody(**service.info())

    return router


def terminate_routes(ending: Ending) -> APIRouter:
    """Returns the route ``/terminate``."""
    router = APIRouter(route_class=JsonRoute, responses=ERRORS)

    @router.post("/terminate")
    async def terminate(request: Request) -> dict[str, str]:
        """End the server after the running requests are answered. Needs the token of its deployment, or an API key."""
        ending.ask(bearer(request.headers.get("authorization")))
        return {}

    return router


@contextmanager
def naming_the_field(otherwise: str) -> Iterator[None]:
    """Turns refusals in the block into ``BadRequestError`` with their message and code unchanged, in the field names of
    ``SamplingParams``. The refused field is the message's first word if that is a sampling field, else
    ``otherwise``.
    """
    try:
        yield
    except (BadRequestError, InvalidArgumentError) as error:
        first_word = re.match(r"\w*", str(error))
        assert first_word is not None
        param = getattr(error, "param", None) or (first_word[0] if first_word[0] in _SAMPLING_FIELDS else otherwise)
        raise BadRequestError(str(error), param=param, code=getattr(error, "code", None)) from None


_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}


async def _read(service: Service, body: GenerateBody) -> tuple[list[int], SamplingParams]:
    """Returns the token ids of the prompt, and the sampling parameters. Both may take long, so they are found on other
    threads. Raises ``InvalidArgumentError``, and ``OverloadedError`` if too much waits to be encoded.
    """
    codec, messages, prompt = service.codec, body.messages, body.prompt

    def sampling() -> SamplingParams:
        return body.sampling(codec.default_sampling)

    if messages is not None and prompt is None:
        given = await on_thread(sampling)
        return await encode_chat(codec, messages), given
    if prompt is not None and messages is None:
        encode = codec.encode_plain if isinstance(prompt, str) else codec.encode  # ids are only checked
        return await in_turn(encode, lambda: (codec.encode(prompt), sampling()))
    raise InvalidArgumentError("give prompt or messages, and one of them only")


async def _events(running: Running, turns: Turns) -> AsyncGenerator[bytes, None]:
    async with running:
        async for updates in running:
            *earlier, last = updates
            output = OutputRecord.of(await running.output()) if running.finished else None
            record = _record(last, output)
            before = b"".join(event_of(_record(update)) for update in earlier)
            if output is None or not running.is_large:
                yield before + event_of(record)
                continue
            if before:
                yield before
            yield await large_event_of(record, turns)


def _record(update: Update, output: OutputRecord | None = None) -> ChunkRecord:
    return ChunkRecord(
        index=update.index,
        text=update.text,
        token_ids=update.token_ids,
        finish_reason=None if update.end is None else update.end.reason,
        output=output,
    )
