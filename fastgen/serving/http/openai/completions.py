"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.outputs import GenerationOutput, Logprobs
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.admission.request_limits import MANY_CHARACTERS, MAX_ECHOED_CHARACTERS, MAX_REQUEST_LOGPROBS
from fastgen.serving.admission.turns import Turns
from fastgen.serving.answers import TextRules, Update
from fastgen.serving.http.errors import ERRORS
from fastgen.serving.http.json_answers import LazyList, event_of, json_response, large_event_of, make_large
from fastgen.serving.http.json_route import JsonRoute
from fastgen.serving.http.openai.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
    finish_of,
    usage_of,
)
from fastgen.serving.http.openai.decoding import echoing
from fastgen.serving.http.openai.formats import format_field, naming_format
from fastgen.serving.http.openai.logprobs import CompletionLogprobsWriter
from fastgen.serving.http.openai.requests import CompletionRequest
from fastgen.serving.http.openai.run import (
    Batch,
    StreamUsage,
    check_model,
    encode_prompts,
    event_stream,
    now,
    request_id_of,
)
from fastgen.serving.http.openai.sampling import completion_sampling, completion_tokens
from fastgen.serving.http.openai.text_rules import num_kept, text_rules, with_special_stops
from fastgen.serving.http.streaming import unless_gone
from fastgen.serving.refusals import BadRequestError
from fastgen.serving.service import Service


def completion_routes(service: Service) -> APIRouter:
    """Returns the route, for ``service``."""
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

    @router.post(
        "/v1/completions",
        response_model=Completion,
        responses={200: {"content": {"text/event-stream": {}}, "description": "An answer, or its stream"}, **ERRORS},
    )
    async def create_completion(request: Request, body: CompletionRequest) -> Response:
        """Continue one prompt or several."""
        check_model(service, body.model)
        prompts, codec, facts = _prompts(body.prompt), service.codec, service.facts
        keep = num_kept(body, body.max_tokens or 1, facts.max_model_len)
        async with unless_gone(request):
            prompt_ids = await encode_prompts(
                service, prompts, add_special_tokens=body.add_special_tokens is not False, keep=keep
            )
        if keep is not None:
            prompts = [*prompt_ids]  # what is echoed
        wanted = [completion_tokens(body, len(ids), facts.max_model_len) for ids in prompt_ids]
        by_wanted = {each: _sampling(body, each, codec, facts.vocab_size) for each in set(wanted)}
        samplings = [by_wanted[each] for each in wanted]
        rules = text_rules(body, codec)
        echoes = [""] * len(prompts)
        try:
            if body.echo:
                given = (ids for prompt, ids in zip(prompts, prompt_ids, strict=True) if not isinstance(prompt, str))
                with service.making_text(sum(map(len, given))):
                    async with unless_gone(request):
                        echoes = await service.turns.run(echoing(codec, prompts, prompt_ids))
        except InvalidArgumentError as error:
            raise BadRequestError(f"echo: {error}", param="echo") from error
        _check_echoes(body, echoes, prompt_ids)
        writer = _Writer(service, body, prompts, prompt_ids, echoes, rules, f"cmpl-{request_id_of(request)}")
        is_stream = bool(body.stream)
        with naming_format(format_field(body)):
            batch = await Batch.submit(service, request, prompt_ids, samplings, is_stream=is_stream, rules=rules)
            if is_stream:
                return await event_stream(request, batch, _events(batch, writer, body, service.turns))
            async with batch, unless_gone(request):
                outputs = await batch.outputs()
                is_large = batch.is_large or (body.n or 1) * sum(map(len, echoes)) > MANY_CHARACTERS
                return await json_response(lambda: writer.whole(outputs), service.turns, is_large=is_large)

    return router


async def _events(batch: Batch, writer: _Writer, body: CompletionRequest, turns: Turns) -> AsyncGenerator[bytes, None]:
    includes_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    async with batch:
        async for updates in batch.updates():
            # A prompt's log-probabilities come at once, with the first token.
            if batch.is_large and any(update.prompt_logprobs is not None for _, update in updates):
                for chunk in await make_large(partial(writer.chunks, updates)):
                    yield await large_event_of(chunk, turns)
            elif chunks := writer.chunks(updates):
                yield b"".join(map(event_of, chunks))
        if includes_usage:
            yield event_of(writer.last())


class _Writer:
    """Converts the progress of one call to OpenAI's format. Choice ``n · i + j`` is answer ``j`` to prompt ``i``."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        prompts: list[str | list[int]],
        prompt_ids: list[list[int]],
        echoes: list[str],
        rules: TextRules,
        completion_id: str,
    ):
        self._codec, self._body = service.codec, body
        self._prompts, self._prompt_ids, self._echoes, self._rules = prompts, prompt_ids, echoes, rules
        self._n = body.n or 1
        self._head: dict[str, Any] = {
            "id": completion_id,
            "object": "text_completion",
            "created": now(),
            "model": service.model_name,
        }
        self._shows_answer = body.max_tokens != 0
        self._usage = StreamUsage(sum(map(len, prompt_ids)), counts_answer=self._shows_answer)
        self._logprobs: dict[int, CompletionLogprobsWriter] = {}
        self._prompt_logprobs: dict[int, CompletionLogprobs] = {}
        # The characters sent so far of each choice that has begun.
        self._lengths: dict[int, int] = {}

    def whole(self, outputs: list[GenerationOutput]) -> Completion:
        """Returns the answer without streaming."""
        choices = []
        for number, output in enumerate(outputs):
            for completion in output.completions:
                finish = finish_of(completion.finish_reason, completion.error)
                logprobs = None
                text = self._echoes[number]
                if self._body.logprobs is not None:
                    index = self._n * number + completion.index
                    logprobs = self._start_logprobs(index, number, output.prompt_logprobs)
                    if self._shows_answer:
                        end = len(text) + len(completion.text)
                        more = self._logprobs[index].write(completion.token_ids, completion.logprobs or [], end)
                        logprobs = _joined(logprobs, more)
                if self._shows_answer:
                    text += completion.text
                choices.append(self._choice(number, completion.index, text, logprobs, finish))
        return self._completion(choices, usage_of(outputs, counts_answer=self._shows_answer))

    def chunks(self, updates: list[tuple[int, Update]]) -> list[Completion]:
        """Returns the next chunks of a stream."""
        return [chunk for number, update in updates for chunk in self.chunk(number, update)]

    def chunk(self, number: int, update: Update) -> list[Completion]:
        """Returns the next chunk of a stream, in a list that is empty if there is nothing to send."""
        self._usage.add(update)
        index = self._n * number + update.index
        finish = None if update.end is None else finish_of(update.end.reason, update.end.error)
        text, logprobs = "", None
        if self._body.logprobs is not None:
            logprobs = _none()
        if index not in self._lengths:
            self._lengths[index] = 0
            text = self._echoes[number]
            if logprobs is not None:
                logprobs = self._start_logprobs(index, number, update.prompt_logprobs)
        if self._shows_answer:
            text += update.text
        self._lengths[index] += len(text)
        if self._shows_answer and logprobs is not None:
            end = None if update.end is None else self._lengths[index]
            more = self._logprobs[index].write(update.token_ids, update.logprobs or [], end)
            logprobs = _joined(logprobs, more)
        if not (text or finish or (logprobs is not None and logprobs["tokens"])):
            return []
        options = self._body.stream_options
        usage = self._usage.usage() if options is not None and options.reports_usage_always else None
        return [self._completion([self._choice(number, update.index, text, logprobs, finish)], usage)]

    def last(self) -> Completion:
        """Returns the chunk of a stream that reports the usage."""
        return self._completion([], self._usage.usage())

    def _start_logprobs(
        self, index: int, number: int, prompt_logprobs: Sequence[Logprobs | None] | None
    ) -> CompletionLogprobs:
        """Returns the log-probabilities with which those of choice ``index`` begin: the prompt's if it is echoed, else
        none.
        """
        num_top, prompt, ids = self._body.logprobs or 0, self._prompts[number], self._prompt_ids[number]
        self._logprobs[index] = CompletionLogprobsWriter(
            self._codec, num_top, self._rules.spelled, context_ids=ids, start=len(self._echoes[number])
        )
        if not self._body.echo:
            return _none()
        if prompt_logprobs is not None:
            written = self._codec.special_ids(prompt) if isinstance(prompt, str) else {}
            spelled = {token_id: spelling for spelling, token_id in written.items()}
            writer = CompletionLogprobsWriter(self._codec, num_top, spelled)
            self._prompt_logprobs[number] = writer.write(ids, prompt_logprobs, len(self._echoes[number]))
        return self._prompt_logprobs[number]

    def _choice(
        self, number: int, index: int, text: str, logprobs: CompletionLogprobs | None, finish: Any
    ) -> CompletionChoice:
        return {"index": self._n * number + index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        body: Any = {**self._head, "choices": choices}
        options = self._body.stream_options
        if usage is not None or (options is not None and options.include_usage):
            body["usage"] = usage
        return body  # type: ignore[no-any-return]


def _sampling(body: CompletionRequest, wanted: int, codec: TextCodec, vocab_size: int) -> SamplingParams:
    sampling = completion_sampling(body, wanted, defaults=codec.default_sampling, vocab_size=vocab_size)
    return with_special_stops(body, sampling, codec)


def _none() -> CompletionLogprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _joined(first: CompletionLogprobs, more: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": first["tokens"] + more["tokens"],
        "token_logprobs": LazyList(lambda: chain(first["token_logprobs"], more["token_logprobs"])),
        "top_logprobs": LazyList(lambda: chain(first["top_logprobs"], more["top_logprobs"])),
        "text_offset": first["text_offset"] + more["text_offset"],
    }


def _check_echoes(body: CompletionRequest, echoes: list[str], prompt_ids: list[list[int]]) -> None:
    """Raises ``BadRequestError`` if the answers repeat too much of their prompts."""
    n = body.n or 1
    if (number := n * sum(map(len, echoes))) > MAX_ECHOED_CHARACTERS:
        raise BadRequestError(
            f"echo: the answers would repeat {number} characters of the prompts; this server repeats at most "
            f"{MAX_ECHOED_CHARACTERS} in one call: ask for fewer prompts or completions",
            param="echo",
        )
    more = (n - 1) * sum(map(len, prompt_ids)) * (1 + (body.logprobs or 0))
    if body.echo and body.logprobs is not None and more > MAX_REQUEST_LOGPROBS:
        raise BadRequestError(
            f"echo: {n} completions would repeat {more} log-probabilities of the prompts; this server repeats at most "
            f"{MAX_REQUEST_LOGPROBS} in one call: ask for fewer prompts, alternatives or completions",
            param="echo",
        )


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Returns the prompts of a request, in whichever form they are given."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
