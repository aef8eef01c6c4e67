"""The items of a response, as its text comes: messages and calls, and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fastgen.serving.http.openai.answers import ContentLogprob
from fastgen.serving.http.openai.responses.answers import OutputCall, OutputMessage, OutputText
from fastgen.serving.http.openai.tools import ChatTools, new_call_id
from fastgen.serving.tools.calls import Arguments, CallBegins, CallEnds, Content, Event

_Status = Literal["in_progress", "completed", "incomplete"]


class OutputWriter:
    """Builds the items of the answer ``answer_id``, which may call ``tools``. Each method returns the events that
    report its changes, still without their numbers.
    """

    def __init__(self, answer_id: str, tools: ChatTools | None):
        self._answer_id = answer_id
        self._parser = None if tools is None else tools.parser()
        self._is_parallel = tools is None or tools.is_parallel
        self.items: list[OutputMessage | OutputCall] = []
        self._open: OutputMessage | OutputCall | None = None
        # Log-probabilities of tokens that belong to no item yet, each with the place in the answer where its token
        # begins.
        self._logprobs: list[tuple[int, ContentLogprob]] = []
        self._num_written = 0  # characters
        # Whether the only allowed call is complete; anything after it is ignored.
        self.has_ended = False

    def write(
        self, text: str, logprobs: Iterable[tuple[int, ContentLogprob]], *, is_last: bool
    ) -> list[dict[str, Any]]:
        """Adds the next piece of the answer's text, and the log-probabilities of the next tokens, each with the number
        of characters of the answer before its token. A token's belong to the message in which it begins; those of
        calls are left out.
        """
        if self.has_ended:
            return []
        self._logprobs += logprobs
        events: list[dict[str, Any]] = []
        for piece in self._pieces(text, is_last):
            events += self._piece(piece)
            if self.has_ended:
                break
        self._num_written += len(text)
        return events

    def finish(self, status: _Status) -> list[dict[str, Any]]:
        """Ends the last item with ``status``; a call that breaks off is incomplete, whatever ended the answer. An
        answer without any item gets an empty message.
        """
        events = [] if self.items else self._begin_message()
        if self._open is not None and self._open["type"] == "message":
            self._open["content"][0]["logprobs"] += self._take_logprobs()  # such as of the token that ends the text
        is_inside_call = self._open is not None and self._open["type"] == "function_call"
        return events + self._end("incomplete" if is_inside_call else status)

    def _pieces(self, text: str, is_last: bool) -> list[Event]:
        if self._parser is None:
            return [Content(text, self._num_written)] if text else []
        return self._parser.feed(text) + (self._parser.finish() if is_last else [])

    def _piece(self, piece: Event) -> list[dict[str, Any]]:
        match piece:
            case Content():
                return self._text(piece)
            case CallBegins():
                return [*self._end("completed"), *self._begin_call(piece.name)]
            case Arguments():
                return [self._arguments(piece.text)]
            case CallEnds():
                self.has_ended = not self._is_parallel
                return self._end("completed")

    def _text(self, content: Content) -> list[dict[str, Any]]:
        events = []
        if self._open is None or self._open["type"] != "message":
            events = [*self._end("completed"), *self._begin_message()]
        assert self._open is not None
        assert self._open["type"] == "message"
        (part,) = self._open["content"]
        part["text"] += content.text
        self._take_logprobs(content.begin)  # of a call before it
        logprobs = self._take_logprobs(content.begin + len(content.text))
        part["logprobs"] += logprobs
        return [*events, self._event("output_text.delta", content_index=0, delta=content.text, logprobs=logprobs)]

    def _take_logprobs(self, end: int | None = None) -> list[ContentLogprob]:
        """Takes those of tokens that begin before ``end``, or all."""
        taken = [each for begin, each in self._logprobs if end is None or begin < end]
        del self._logprobs[: len(taken)]
        return taken

    def _begin_message(self) -> list[dict[str, Any]]:
        message: OutputMessage = {
            "type": "message",
            "id": f"msg_{self._answer_id}_{len(self.items)}",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        events = [self._begin(message), self._event("content_part.added", content_index=0, part=_empty_part())]
        message["content"] = [_empty_part()]
        return events

    def _begin_call(self, name: str) -> list[dict[str, Any]]:
        call: OutputCall = {
            "type": "function_call",
            "id": f"fc_{self._answer_id}_{len(self.items)}",
            "call_id": new_call_id(),
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        return [self._begin(call)]

    def _begin(self, item: OutputMessage | OutputCall) -> dict[str, Any]:
        self.items.append(item)
        self._open = item
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**item}}

    def _arguments(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        assert self._open["type"] == "function_call"
        self._open["arguments"] += text
        return self._event("function_call_arguments.delta", delta=text)

    def _end(self, status: _Status) -> list[dict[str, Any]]:
        """Ends the open item, if there is one."""
        item = self._open
        if item is None:
            return []
        events = []
        if item["type"] == "message":
            (part,) = item["content"]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            events.append(self._event("output_text.done", content_index=0, **done))
            events.append(self._event("content_part.done", content_index=0, part=part))
        else:
            events.append(self._event("function_call_arguments.done", arguments=item["arguments"], name=item["name"]))
        item["status"] = status
        self._open = None
        return [*events, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Returns an event about the last item."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **fields}


def _empty_part() -> OutputText:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
