"""Runs the requests of one call, one for each of its prompts: all of them or none."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from fastapi import Request
from starlette.responses import Response

from fastgen.errors import InvalidArgumentError, PromptTooLongError
from fastgen.runtime.requests.outputs import GenerationOutput
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.admission.request_limits import (
    MANY_VALUES,
    MAX_CALL_ANSWERS,
    MAX_SESSION_LENGTH,
    SESSION_HEADER,
    num_sequences,
)
from fastgen.serving.answers import USUAL_TEXT, TextRules, Update
from fastgen.serving.http.errors import failure_body
from fastgen.serving.http.json_answers import event_of
from fastgen.serving.http.openai.answers import Usage
from fastgen.serving.http.openai.sampling import named_refusal
from fastgen.serving.http.streaming import EventStream, unless_gone
from fastgen.serving.isolated.queue import in_turn
from fastgen.serving.refusals import BadRequestError, UnknownModelError
from fastgen.serving.service import Running, Service

# Prompts with as many characters or ids together are encoded on another thread, so that other streams do not wait. Each
# prompt takes some time beside that for its characters.
_LONG_PROMPTS, _EACH_PROMPT = 20_000, 100
# Prompts of a call that are queued before other requests have their turn.
_TURN_PROMPTS = 32
DONE = b"data: [DONE]\n\n"


class Batch:
    """The requests of one call, one per prompt. Leaving the context cancels what is left of them."""

    def __init__(self, running: list[Running]):
        self._running = running

    @classmethod
    async def submit(
        cls,
        service: Service,
        request: Request,
        prompts: Sequence[list[int]],
        samplings: Sequence[SamplingParams],
        *,
        is_stream: bool,
        rules: TextRules = USUAL_TEXT,
        session: str | None = None,
        param: str = "prompt",
    ) -> Self:
        """Queues all of them; ``rules`` and ``session`` are as in :meth:`Service.submit`, unless the request's header
        names a session. ``param`` is the field that gives the prompts. Raises ``RefusedError`` if one of them is
        refused, or if they ask for too many answers together; then none is queued.
        """
        _check_num_answers(samplings)
        service.check_num_requests(len(prompts), param)
        batch = cls([])
        try:
            async with unless_gone(request):  # a format may wait for its trial
                with _in_openai_names():
                    for number, (prompt_ids, sampling) in enumerate(zip(prompts, samplings, strict=True), start=1):
                        if number % _TURN_PROMPTS == 0:
                            await asyncio.sleep(0)
                        batch._running.append(
                            await service.submit(
                                prompt_ids,
                                sampling,
                                is_stream=is_stream,
                                arrived_s=arrival_of(request),
                                rules=rules,
                                request_id=request_id_of(request),
                                session=session_of(request) or session,
                            )
                        )
        except BaseException:
            batch.cancel()
            raise
        return batch

    @property
    def is_large(self) -> bool:
        """Returns whether so much has come that the answers must not be encoded in one piece."""
        return sum(running.size for running in self._running) > MANY_VALUES

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        for running in self._running:
            running.cancel()

    async def outputs(self) -> list[GenerationOutput]:
        """Returns all answers, in the order of the prompts."""
        outputs = []
        with _in_openai_names():
            for running in self._running:
                outputs.append(await running.output())
                await asyncio.sleep(0)  # several may have ended, and their tokens take time to decode
        return outputs

    async def updates(self) -> AsyncGenerator[list[tuple[int, Update]], None]:
        """Yields the progress, each update with the number of its prompt."""
        if len(self._running) == 1:
            with _in_openai_names():
                async for updates in self._running[0]:
                    yield [(0, update) for update in updates]
            return
        news: asyncio.Queue[list[tuple[int, Update]] | BaseException | None] = asyncio.Queue()

        async def follow(number: int, running: Running) -> None:
            try:
                with _in_openai_names():
                    async for updates in running:
                        news.put_nowait([(number, update) for update in updates])
                news.put_nowait(None)
            except BaseException as error:  # whatever ends this must end the stream, which waits for it
                news.put_nowait(error)
                raise

        tasks = [asyncio.ensure_future(follow(*each)) for each in enumerate(self._running)]
        num_open = len(tasks)
        try:
            while num_open:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _check_num_answers(samplings: Sequence[SamplingParams]) -> None:
    """Raises ``BadRequestError`` if one call asks for more than ``MAX_CALL_ANSWERS``."""
    number = sum(map(num_sequences, samplings))
    if number > MAX_CALL_ANSWERS:
        raise BadRequestError(
            f"n: {len(samplings)} prompts ask for {number} answers together; this server gives at most "
            f"{MAX_CALL_ANSWERS} in one call",
            param="n",
        )


@contextmanager
def _in_openai_names() -> Iterator[None]:
    """Translates the field names in a refusal by the engine to OpenAI's names."""
    try:
        yield
    except BadRequestError as error:
        if error.param is None:
            raise named_refusal(str(error), code=error.code) from error
        raise


class StreamUsage:
    """Counts the usage of a stream's requests as updates come."""

    def __init__(self, num_prompt_tokens: int, *, counts_answer: bool = True):
        self._num_prompt, self._counts_answer = num_prompt_tokens, counts_answer
        self._num_answer = self._num_cached = 0

    def add(self, update: Update) -> None:
        if self._counts_answer:
            self._num_answer += len(update.token_ids)
        if update.end is not None and update.index == 0:
            self._num_cached += update.end.metrics.cached_tokens

    def usage(self) -> Usage:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_answer,
            "total_tokens": self._num_prompt + self._num_answer,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


async def event_stream(
    request: Request,
    running: Batch | Running,
    events: AsyncGenerator[bytes, None],
    *,
    done: bytes = DONE,
    failed: Callable[[Any], bytes] = lambda body: b"event: error\n" + event_of(body),
) -> Response:
    """Returns a streaming response of ``events``, which are those of ``running``.

    It is returned once the first event exists: an earlier failure has its own HTTP status, and if the client
    disconnects earlier, ``running`` is cancelled. ``done`` comes last; after a later error, ``failed`` of the error's
    body does.
    """
    try:
        async with unless_gone(request):
            first = await anext(events)
    except BaseException:
        running.cancel()  # a generator that was not started cannot do it
        await events.aclose()
        raise
    return EventStream(_WithEnd(first, events, done, failed))


class _WithEnd:
    """Iterates over ``first``, ``events`` and the end. Closing it closes ``events``, even if they were not started."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], done: bytes, failed: Callable[[Any], bytes]):
        self._first: bytes | None = first
        self._events, self._done, self._failed = events, done, failed
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._has_ended:
            raise StopAsyncIteration
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            end = self._done
        except Exception as error:
            end = self._failed(failure_body(error))
        self._has_ended = True
        return end

    async def aclose(self) -> None:
        await self._events.aclose()


async def encode_prompts(
    service: Service,
    prompts: Sequence[str | list[int]],
    *,
    param: str = "prompt",
    add_special_tokens: bool = True,
    keep: int | None = None,
) -> list[list[int]]:
    """Returns the token ids of each prompt, the last ``keep`` of them, which leave room for an answer. Raises
    ``BadRequestError`` about ``param``, and ``OverloadedError`` if too many texts wait to be encoded.
    """

    def encode_one(prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return service.codec.encode_text(prompt, add_special_tokens=add_special_tokens)
        return service.codec.encode(prompt)

    def encode() -> list[list[int]]:
        return [encode_one(prompt) if keep is None else encode_one(prompt)[-keep:] for prompt in prompts]

    try:
        is_long = sum(map(len, prompts)) + _EACH_PROMPT * len(prompts) >= _LONG_PROMPTS
        waits = is_long or service.codec.waits_to_encode
        encoded = await in_turn(service.codec.encode_plain, encode) if waits else encode()
    except InvalidArgumentError as error:
        raise BadRequestError(str(error), param=param, code=code_of(error)) from error
    for prompt_ids in encoded:
        check_prompt(service, prompt_ids, param)
    return encoded


def code_of(error: InvalidArgumentError) -> str | None:
    """Returns OpenAI's error code for a refused prompt."""
    return "context_length_exceeded" if isinstance(error, PromptTooLongError) else None


def check_prompt(service: Service, prompt_ids: list[int], param: str) -> None:
    """Raises ``BadRequestError`` if the model does not have these ids, or if they leave no room for an answer."""
    facts = service.facts
    if not prompt_ids:
        raise BadRequestError(f"{param}: a prompt needs at least one token", param=param)
    if len(prompt_ids) >= facts.max_model_len:
        raise BadRequestError(
            f"{param} has {len(prompt_ids)} tokens; the model takes {facts.max_model_len}, the answer's included",
            param=param,
            code="context_length_exceeded",
        )
    check_ids(service, prompt_ids, param)


def check_ids(service: Service, token_ids: list[int], param: str) -> None:
    """Raises ``BadRequestError`` if the model does not have these ids."""
    if (largest := max(token_ids, default=0)) >= (vocab_size := service.facts.vocab_size):
        raise BadRequestError(
            f"{param} holds token id {largest}; the model's ids are 0 to {vocab_size - 1}", param=param
        )


def check_model(service: Service, name: str | None) -> None:
    """Raises ``UnknownModelError`` if ``name`` is given and is not the served model."""
    if name is not None and name != service.model_name:
        raise UnknownModelError(f"the model {name!r:.200} does not exist; this server has {service.model_name!r}")


def request_id_of(request: Request) -> str:
    """Returns the id that the request has in logs and headers, or else a new one."""
    found: str | None = getattr(request.state, "request_id", None)
    return found or secrets.token_hex(12)


def session_of(request: Request) -> str | None:
    """Returns the session that the header ``x-session-id`` names, or ``None``."""
    return request.headers.get(SESSION_HEADER, "")[:MAX_SESSION_LENGTH] or None


def arrival_of(request: Request) -> float | None:
    """Returns when the request was complete, by ``time.monotonic``, if that was recorded."""
    return getattr(request.state, "arrived_s", None)


def now() -> int:
    """Returns the seconds since 1970, for ``created``."""
    return int(time.time())
