"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastgen.runtime.requests.outputs import FinishReason, GenerationOutput, Logprobs
from fastgen.serving.answers import Update
from fastgen.serving.http.errors import ERRORS
from fastgen.serving.http.json_answers import event_of, json_response
from fastgen.serving.http.openai.answers import (
    AssistantAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatFinish,
    ChatLogprobs,
    MessageDelta,
    finish_of,
    usage_of,
)
from fastgen.serving.http.openai.conversations import PreparedChat
from fastgen.serving.http.openai.formats import naming_format
from fastgen.serving.http.openai.json_texts import ConversationRoute
from fastgen.serving.http.openai.logprobs import chat_logprobs
from fastgen.serving.http.openai.requests import ChatRequest
from fastgen.serving.http.openai.run import Batch, StreamUsage, check_model, event_stream, now, request_id_of
from fastgen.serving.http.openai.tools import CallWriter, ChatTools
from fastgen.serving.http.streaming import unless_gone
from fastgen.serving.service import Service
from fastgen.serving.tools.formats import ToolFormat


def chat_routes(service: Service, tool_format: ToolFormat | None) -> APIRouter:
    """Returns the route, for ``service``. ``tool_format`` overrides the format that the chat template implies."""
    router = APIRouter(route_class=ConversationRoute, tags=["OpenAI"])

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={200: {"content": {"text/event-stream": {}}, "description": "An answer, or its stream"}, **ERRORS},
    )
    async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation, rendered by the checkpoint's own chat template."""
        check_model(service, body.model)
        async with unless_gone(request):
            chat = await PreparedChat.of(service, body, tool_format)
        writer = _Writer(service, body, chat.tools, len(chat.prompt_ids), f"chatcmpl-{request_id_of(request)}")
        with naming_format(chat.format_field):
            batch = await chat.submit(service, request, is_stream=bool(body.stream))
            if body.stream:
                return await event_stream(request, batch, _events(batch, writer, body))
            async with batch, unless_gone(request):
                (output,) = await batch.outputs()
                return await json_response(
                    lambda: writer.whole(chat.until_first_call(output, service.codec)),
                    service.turns,
                    is_large=batch.is_large,
                )

    return router


async def _events(batch: Batch, writer: _Writer, body: ChatRequest) -> AsyncGenerator[bytes, None]:
    includes_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    async with batch:
        async for updates in batch.updates():
            events = [event for _, update in updates for event in writer.chunks(update)]
            if events:
                yield b"".join(map(event_of, events))
            if writer.has_ended:
                break
        if includes_usage:
            yield event_of(writer.last())


class _Writer:
    """Converts the progress of one chat to OpenAI's format."""

    def __init__(
        self, service: Service, body: ChatRequest, tools: ChatTools | None, num_prompt_tokens: int, completion_id: str
    ):
        self._codec, self._tools = service.codec, tools
        self._num_top = body.top_logprobs or 0
        self._includes_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._reports_usage_always = body.stream_options is not None and body.stream_options.reports_usage_always
        self._n = body.n or 1
        self._head: dict[str, Any] = {"id": completion_id, "created": now(), "model": service.model_name}
        self._usage = StreamUsage(num_prompt_tokens)
        self._calls: dict[int, CallWriter] = {}
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    @property
    def has_ended(self) -> bool:
        """Returns whether nothing more will be sent, even if the model continues."""
        return len(self._ended) == self._n

    def whole(self, output: GenerationOutput) -> ChatCompletion:
        """Returns the answer without streaming."""
        choices = [self._choice(completion) for completion in output.completions]
        body: Any = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_of([output])}
        return body  # type: ignore[no-any-return]

    def _choice(self, completion: GenerationOutput) -> ChatChoice:
        message: AssistantAnswer = {"role": "assistant", "content": completion.text, "refusal": None}
        writer = self._call_writer(completion.index)
        if writer is not None:
            writer.write(completion.text, is_last=True)
            message["content"] = writer.content
            if writer.calls:
                message["content"] = writer.content or None
                message["tool_calls"] = writer.calls
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion.token_ids, completion.logprobs),
            "finish_reason": _finish(completion.finish_reason, completion.error, writer),
        }

    def chunks(self, update: Update) -> list[ChatChunk]:
        """Returns the next chunks of a stream."""
        if update.index in self._ended:
            return []
        self._usage.add(update)
        pieces: list[MessageDelta] = []
        if update.index not in self._begun:
            self._begun.add(update.index)
            pieces.append({"role": "assistant", "content": ""})
        writer = self._call_writer(update.index)
        text = update.text
        if writer is not None:
            text, calls = writer.write(update.text, is_last=update.end is not None)
            pieces += [{"tool_calls": [call]} for call in calls]
        logprobs = self._logprobs(update.token_ids, update.logprobs)
        if text or (logprobs is not None and not pieces):
            pieces.insert(len(self._roles(pieces)), {"content": text})
        chunks = [self._chunk(update.index, piece) for piece in pieces]
        if logprobs is not None:
            chunks[-1]["choices"][0]["logprobs"] = logprobs
        if update.end is not None or (writer is not None and writer.has_ended):
            self._ended.add(update.index)
            reason, error = ("stop", None) if update.end is None else (update.end.reason, update.end.error)
            chunks.append(self._chunk(update.index, {}, _finish(reason, error, writer)))
        return chunks

    def last(self) -> ChatChunk:
        """Returns the chunk of a stream that reports the usage."""
        chunk: Any = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage.usage()}
        return chunk  # type: ignore[no-any-return]

    def _roles(self, pieces: list[MessageDelta]) -> list[MessageDelta]:
        return [piece for piece in pieces if "role" in piece]

    def _call_writer(self, index: int) -> CallWriter | None:
        """Returns the writer of tool calls for answer ``index``, if there are tools."""
        if self._tools is None:
            return None
        if index not in self._calls:
            self._calls[index] = CallWriter(self._tools.parser(), is_parallel=self._tools.is_parallel)
        return self._calls[index]

    def _logprobs(self, token_ids: list[int], logprobs: Sequence[Logprobs] | None) -> ChatLogprobs | None:
        if logprobs is None:  # they were not asked for
            return None
        return chat_logprobs(self._codec, token_ids, logprobs, self._num_top)

    def _chunk(self, index: int, delta: MessageDelta, finish: ChatFinish | None = None) -> ChatChunk:
        choice: ChatChunkChoice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk: Any = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._includes_usage:
            chunk["usage"] = self._usage.usage() if self._reports_usage_always else None
        return chunk  # type: ignore[no-any-return]


def _finish(reason: FinishReason, error: str | None, writer: CallWriter | None) -> ChatFinish:
    finish = finish_of(reason, error)
    has_whole_calls = writer is not None and bool(writer.calls) and not writer.is_inside_call
    return "tool_calls" if finish == "stop" and has_whole_calls else finish
