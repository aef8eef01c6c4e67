"""The tools of a chat: whether they are supported, the grammar that enforces calls, and calls in OpenAI's format."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.outputs import GenerationOutput
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.text.codec import TextCodec
from fastgen.runtime.text.detokenizer import Detokenizer
from fastgen.serving.http.openai.answers import ToolCallDelta, ToolCallOfMessage
from fastgen.serving.http.openai.formats import required_format, wants_compact_json
from fastgen.serving.http.openai.messages import NamedTool, Tool
from fastgen.serving.http.openai.requests import ChatRequest
from fastgen.serving.refusals import BadRequestError
from fastgen.serving.tools.calls import Arguments, CallBegins, CallEnds, Content, ToolCallParser
from fastgen.serving.tools.formats import ToolFormat, tool_format_of
from fastgen.serving.tools.grammar import ToolSchema, tool_grammar

_ID_CHARACTERS = string.ascii_letters + string.digits
# Mistral's templates accept only call ids of this length; the others accept any.
_ID_LENGTH = 9


@dataclass(frozen=True)
class ChatTools:
    """The tools that an answer may call. ``spelled`` are the special tokens in which calls are written."""

    tool_format: ToolFormat
    names: frozenset[str]
    spelled: dict[int, str]
    is_parallel: bool

    def parser(self) -> ToolCallParser:
        """Returns the parser for one answer."""
        return ToolCallParser(self.tool_format, self.names)


def chat_tools(
    request: ChatRequest, codec: TextCodec, override: ToolFormat | None
) -> tuple[ChatTools | None, ResponseFormat | None]:
    """Returns the tools that ``request`` may call, and the required format of its answer, of tool calls or otherwise.

    ``override`` replaces the tool format that the chat template implies. Raises ``BadRequestError``.
    """
    response_format = required_format(request)
    _check(request)
    if not request.tools or request.tool_choice == "none":
        return None, response_format
    template = codec.chat_template(has_tools=True)
    tool_format = override or tool_format_of(template)
    if "tools" not in template or tool_format is None:
        raise BadRequestError(
            "tools cannot be honoured: this model's chat template has no way to call them", param="tools"
        )
    special_ids = codec.special_ids(" ".join(tool_format.texts))
    is_parallel = request.parallel_tool_calls is not False
    found = ChatTools(
        tool_format,
        frozenset(tool.function.name for tool in request.tools),
        {token_id: spelling for spelling, token_id in special_ids.items()},
        is_parallel,
    )
    is_named, is_required = isinstance(request.tool_choice, NamedTool), request.tool_choice == "required"
    if not (is_named or is_required or response_format or any(tool.function.strict for tool in request.tools)):
        return found, None
    if response_format and not (is_named or is_required) and response_format.kind not in ("json_object", "json_schema"):
        raise BadRequestError(
            "tools cannot be honoured beside an answer that follows a pattern, choice or grammar; say with tool_choice "
            "which of them is wanted",
            param="tools",
        )
    if response_format and not (is_named or is_required) and tool_format.is_opening_optional:
        raise BadRequestError(
            "response_format cannot be honoured beside tools: calls of this model are JSON like the answer; say with "
            "tool_choice which of them is wanted",
            param="response_format",
        )
    try:
        grammar = tool_grammar(
            tool_format,
            _schemas(request.tools, request.tool_choice),
            special_ids,
            is_required=is_named or is_required,
            is_parallel=is_parallel and not is_named,
            content=response_format,
            is_compact=wants_compact_json(request),
        )
    except InvalidArgumentError as error:
        raise BadRequestError(str(error).replace("response_format", "tools"), param="tools") from error
    return found, grammar


def for_template(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Returns the tools as chat templates expect them; ``None`` where there are none."""
    if not tools:
        return None
    plain = [tool.model_dump(exclude_none=True) for tool in tools]
    for tool in plain:
        tool["function"].pop("strict", None)
        tool["function"].setdefault("description", "")
        tool["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return plain


def new_call_id() -> str:
    """Returns an id for a call of an answer."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


def until_first_call(output: GenerationOutput, tools: ChatTools, detokenizer: Detokenizer) -> GenerationOutput:
    """Returns ``output`` up to the token that ends its first call. ``detokenizer`` makes the text of its tokens."""
    writer = CallWriter(tools.parser(), is_parallel=False)
    text = ""
    for number, token_id in enumerate(output.token_ids, start=1):
        piece = detokenizer.append(token_id)
        text += piece
        writer.write(piece, is_last=False)
        if writer.has_ended:
            logprobs = None if output.logprobs is None else output.logprobs[:number]
            return replace(
                output, text=text, token_ids=output.token_ids[:number], logprobs=logprobs, finish_reason="stop"
            )
    return output


class CallWriter:
    """Gives the calls of one answer their ids, and converts them to OpenAI's format."""

    def __init__(self, parser: ToolCallParser, *, is_parallel: bool):
        self._parser, self._is_parallel = parser, is_parallel
        self._calls: list[ToolCallOfMessage] = []
        self._content: list[str] = []
        # Whether the only allowed call is complete; anything after it is ignored.
        self.has_ended = False
        # Whether the last call is not complete.
        self.is_inside_call = False

    @property
    def calls(self) -> list[ToolCallOfMessage]:
        """Returns all calls begun so far."""
        return self._calls

    @property
    def content(self) -> str:
        return "".join(self._content)

    def write(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCallDelta]]:
        """Returns the content and the calls in the next piece of the answer."""
        events = self._parser.feed(text) if not self.has_ended else []
        if is_last and not self.has_ended:
            events += self._parser.finish()
        content, deltas = "", list[ToolCallDelta]()
        for event in events:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallEnds):
                self.has_ended, self.is_inside_call = not self._is_parallel, False
            else:
                self.is_inside_call = True
                deltas.append(self._delta(event))
            if self.has_ended:
                break
        self._content.append(content)
        return content, deltas

    def _delta(self, event: CallBegins | Arguments) -> ToolCallDelta:
        if isinstance(event, Arguments):
            self._calls[event.index]["function"]["arguments"] += event.text
            return {"index": event.index, "function": {"arguments": event.text}}
        call_id = new_call_id()
        self._calls.append({"id": call_id, "type": "function", "function": {"name": event.name, "arguments": ""}})
        return {
            "index": event.index,
            "id": call_id,
            "type": "function",
            "function": {"name": event.name, "arguments": ""},
        }


def _check(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools or ()]
    if len(set(names)) < len(names):
        raise BadRequestError("tools: two functions have the same name", param="tools")
    if isinstance(request.tool_choice, NamedTool) and request.tool_choice.function.name not in names:
        raise BadRequestError(
            f"tool_choice: there is no tool named {request.tool_choice.function.name!r}", param="tool_choice"
        )
    if not names and request.tool_choice == "required":
        raise BadRequestError("tool_choice: there are no tools to choose from", param="tool_choice")
    if not names and request.parallel_tool_calls is not None:
        raise BadRequestError("parallel_tool_calls goes with tools only", param="parallel_tool_calls")
    for number, tool in enumerate(request.tools or ()):
        parameters = tool.function.parameters or {}
        where = f"tools[{number}].function.parameters"
        if parameters.get("type", "object") != "object":
            raise BadRequestError(f"{where}: the schema must be of an object", param=where)
        if "x-guidance" in parameters:
            raise BadRequestError(f"{where}: the key 'x-guidance' is not JSON Schema and is not taken", param=where)


def _schemas(tools: Sequence[Tool], choice: Any) -> list[ToolSchema]:
    """Returns the schemas of the tools that may be called."""
    return [
        ToolSchema(tool.function.name, tool.function.parameters)
        for tool in tools
        if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name
    ]
