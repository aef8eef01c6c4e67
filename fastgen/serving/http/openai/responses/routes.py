"""``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastgen.runtime.requests.outputs import FinishReason, GenerationOutput, Logprobs
from fastgen.serving.answers import Update
from fastgen.serving.http.errors import ERRORS
from fastgen.serving.http.json_answers import json_line, json_response
from fastgen.serving.http.openai.answers import ContentLogprob, Usage, finish_of, usage_of
from fastgen.serving.http.openai.conversations import PreparedChat
from fastgen.serving.http.openai.formats import naming_format
from fastgen.serving.http.openai.json_texts import ConversationRoute
from fastgen.serving.http.openai.logprobs import TokenOffsets, chat_logprobs
from fastgen.serving.http.openai.requests import ChatRequest
from fastgen.serving.http.openai.responses.answers import ResponseAnswer, response_usage
from fastgen.serving.http.openai.responses.output import OutputWriter
from fastgen.serving.http.openai.responses.requests import ResponsesRequest, in_its_names
from fastgen.serving.http.openai.run import Batch, StreamUsage, check_model, event_stream, now, request_id_of
from fastgen.serving.http.streaming import unless_gone
from fastgen.serving.service import Service
from fastgen.serving.tools.formats import ToolFormat


def responses_routes(service: Service, tool_format: ToolFormat | None) -> APIRouter:
    """Returns the route, for ``service``. ``tool_format`` overrides the format that the chat template implies."""
    router = APIRouter(route_class=ConversationRoute, tags=["OpenAI"])

    @router.post(
        "/v1/responses",
        response_model=ResponseAnswer,
        responses={200: {"content": {"text/event-stream": {}}, "description": "An answer, or its stream"}, **ERRORS},
    )
    async def create_response(request: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation, given as a text or as items. Nothing is stored."""
        check_model(service, body.model)
        with in_its_names():
            as_chat = body.chat()
            async with unless_gone(request):
                chat = await PreparedChat.of(service, as_chat, tool_format)
            writer = _Writer(service, body, as_chat, chat, request_id_of(request))
            with naming_format(chat.format_field):
                batch = await chat.submit(service, request, is_stream=bool(body.stream))
                if body.stream:
                    return await event_stream(request, batch, _events(batch, writer), done=b"", failed=writer.failed)
                async with batch, unless_gone(request):
                    (output,) = await batch.outputs()
                    return await json_response(
                        lambda: writer.whole(chat.until_first_call(output, service.codec)),
                        service.turns,
                        is_large=batch.is_large,
                    )

    return router


async def _events(batch: Batch, writer: _Writer) -> AsyncGenerator[bytes, None]:
    async with batch:
        async for updates in batch.updates():
            if events := [event for _, update in updates for event in writer.write(update)]:
                yield b"".join(events)
            if writer.has_ended:
                break


class _Writer:
    """Converts the progress of one answer to a response, or to the events of its stream."""

    def __init__(
        self, service: Service, body: ResponsesRequest, as_chat: ChatRequest, chat: PreparedChat, request_id: str
    ):
        self._codec, self._body = service.codec, body
        self._num_top = as_chat.top_logprobs or 0
        # Where tokens begin, if their log-probabilities are wanted.
        self._offsets = (
            TokenOffsets(service.codec, chat.rules.spelled, context_ids=chat.prompt_ids)
            if body.wants_logprobs
            else None
        )
        self._output = OutputWriter(request_id, chat.tools)
        self._usage = StreamUsage(len(chat.prompt_ids))
        self._head = _head(service, body, chat, f"resp_{request_id}")
        self._num_events = 0
        self.has_ended = False

    def whole(self, output: GenerationOutput) -> ResponseAnswer:
        """Returns the response without streaming."""
        self._output.write(output.text, self._logprobs(output.token_ids, output.logprobs), is_last=True)
        return self._finish(output.finish_reason, output.error, usage_of([output]))[1]

    def write(self, update: Update) -> list[bytes]:
        """Returns the next events of the stream; none once it has ended, even if the model continues."""
        if self.has_ended:
            return []
        events: list[dict[str, Any]] = []
        if not self._num_events:
            begun = self._response("in_progress")
            events += ({"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress"))
        self._usage.add(update)
        logprobs = self._logprobs(update.token_ids, update.logprobs)
        events += self._output.write(update.text, logprobs, is_last=update.end is not None)
        if update.end is not None or self._output.has_ended:
            reason, error = ("stop", None) if update.end is None else (update.end.reason, update.end.error)
            ending, response = self._finish(reason, error, self._usage.usage())
            events += [*ending, {"type": f"response.{response['status']}", "response": response}]
            self.has_ended = True
        return self._numbered(events)

    def failed(self, body: Any) -> bytes:
        """Returns the last events of a stream that failed with an error of this ``body``."""
        error = body["error"]
        response = self._response("failed", error={"code": "server_error", "message": error["message"]})
        events = [
            {"type": "response.failed", "response": response},
            {"type": "error", **{name: error[name] for name in ("code", "message", "param")}, "error": error},
        ]
        return b"".join(self._numbered(events))

    def _finish(
        self, reason: FinishReason, error: str | None, usage: Usage
    ) -> tuple[list[dict[str, Any]], ResponseAnswer]:
        """Ends the answer; returns the last events of its items, and the response."""
        is_whole = self._output.has_ended or finish_of(reason, error) == "stop"
        status = "completed" if is_whole else "incomplete"
        events = self._output.finish(status)  # type: ignore[arg-type]
        response = self._response(
            status,
            completed_at=now() if is_whole else None,
            usage=response_usage(usage),
            incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
        )
        return events, response

    def _response(self, status: str, **fields: Any) -> ResponseAnswer:
        response: Any = {**self._head, "status": status, "output": [*self._output.items], **fields}
        return response  # type: ignore[no-any-return]

    def _logprobs(
        self, token_ids: list[int], logprobs: Sequence[Logprobs] | None
    ) -> Iterable[tuple[int, ContentLogprob]]:
        """Returns those of the next tokens, each with the token's place in the answer."""
        if logprobs is None or self._offsets is None:
            return ()
        found = chat_logprobs(self._codec, token_ids, logprobs, self._num_top)["content"]
        return zip(self._offsets.next(token_ids), found, strict=True)

    def _numbered(self, events: Iterable[dict[str, Any]]) -> list[bytes]:
        encoded = []
        for event in events:
            numbered = {**event, "sequence_number": self._num_events}
            encoded.append(f"event: {event['type']}\ndata: ".encode() + json_line(numbered) + b"\n\n")
            self._num_events += 1
        return encoded


def _head(service: Service, body: ResponsesRequest, chat: PreparedChat, response_id: str) -> dict[str, Any]:
    """Returns the fields of a response that are known when it begins."""
    given = body.model_dump(by_alias=True, exclude_unset=True, include={"reasoning", "text", "tool_choice"})
    return {
        "id": response_id,
        "object": "response",
        "created_at": now(),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": service.model_name,
        "usage": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "background": False,
        "reasoning": {"effort": None, "summary": None} | (given.get("reasoning") or {}),
        "service_tier": "default",
        "store": False,
        "temperature": chat.sampling.temperature,
        "text": {"format": {"type": "text"}} | (given.get("text") or {}),
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": chat.sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
