"""The input of a response: a text, or items, and the messages that they become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field
from pydantic import Tag as Reading
from pydantic_core import PydanticCustomError

from fastgen.serving.admission.request_limits import MAX_MESSAGES
from fastgen.serving.http.openai.json_texts import ObjectText
from fastgen.serving.http.openai.messages import (
    MAX_PARTS,
    AssistantMessage,
    CalledFunction,
    Message,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
    few_parts,
)
from fastgen.serving.http.openai.validation import Label, Strict

Status = Literal["in_progress", "completed", "incomplete"]
# What to do instead, by the kind of item that is refused.
_INSTEAD = {
    "item_reference": "nothing is stored here; send the item itself",
    "reasoning": "the models here write no such items; leave it out",
    "input_image": "the models here read text",
    "input_file": "the models here read text",
    "input_audio": "the models here read text",
}


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    """A text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _only(*kinds: str) -> BeforeValidator:
    """Returns a validator that refuses other kinds of parts or items by their names."""

    def check(value: Any) -> Any:
        kind = value.get("type", kinds[0]) if isinstance(value, dict) else kinds[0]
        if kind not in kinds:
            raise PydanticCustomError(
                "cannot_be_honoured",
                "{kind} cannot be honoured: {why}",
                {"kind": repr(kind)[:80], "why": _INSTEAD.get(str(kind), f"here are {', '.join(kinds)}")},
            )
        return value

    return BeforeValidator(check)


def _text_or_parts(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


_InputContent = Annotated[
    Annotated[str, Reading("text")]
    | Annotated[
        list[Annotated[InputText, _only("input_text")]], Reading("parts"), Field(fail_fast=True, max_length=MAX_PARTS)
    ],
    Discriminator(_text_or_parts),
]
_OutputContent = Annotated[
    Annotated[str, Reading("text")]
    | Annotated[
        list[Annotated[OutputText, _only("output_text")]], Reading("parts"), Field(fail_fast=True, max_length=MAX_PARTS)
    ],
    Discriminator(_text_or_parts),
]


class _Item(Strict):
    """Fields that have no effect. Items of this server's answers have them, or those of OpenAI's."""

    id: Label | None = None
    status: Status | None = None


class InputMessage(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user"]
    content: _InputContent


class AnswerMessage(_Item):
    """A message of the assistant. An item of this server's output can be sent back unchanged."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: _OutputContent
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: Label
    name: Label
    arguments: ObjectText
    namespace: None = None
    caller: None = None
    async_: Annotated[None, Field(alias="async")] = None


class FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: Label
    output: _InputContent
    name: Label | None = None
    namespace: None = None
    caller: None = None


def _kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type", "message")
    return "answer" if kind == "message" and value.get("role") == "assistant" else str(kind)


Item = Annotated[
    Annotated[
        Annotated[InputMessage, Reading("message")]
        | Annotated[AnswerMessage, Reading("answer")]
        | Annotated[FunctionCall, Reading("function_call")]
        | Annotated[FunctionCallOutput, Reading("function_call_output")],
        Discriminator(_kind),
    ],
    _only("message", "function_call", "function_call_output"),
]
Input = Annotated[
    Annotated[str, Reading("text")]
    | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), few_parts, Reading("parts")],
    Discriminator(_text_or_parts),
]


def messages_of(instructions: str | None, given: str | Sequence[Any]) -> list[Message]:
    """Returns the conversation. A call belongs to the assistant's message before it."""
    messages: list[Message] = []
    if instructions is not None:
        messages.append(SystemMessage(role="system", content=instructions))
    if isinstance(given, str):
        return [*messages, UserMessage(role="user", content=given)]
    for item in given:
        if isinstance(item, FunctionCall):
            if not messages or not isinstance(messages[-1], AssistantMessage):
                messages.append(AssistantMessage(role="assistant"))
            _add_call(messages[-1], item)
        else:
            messages.append(_message(item))
    return messages


def _add_call(message: Message, item: FunctionCall) -> None:
    assert isinstance(message, AssistantMessage)
    function = CalledFunction.model_construct(name=item.name, arguments=item.arguments)  # they are parsed already
    if message.tool_calls is None:
        message.tool_calls = []
    message.tool_calls.append(ToolCall(id=item.call_id, type="function", function=function))


def _message(item: Any) -> Message:
    match item:
        case FunctionCallOutput():
            return ToolMessage(role="tool", tool_call_id=item.call_id, content=_plain(item.output), name=item.name)
        case AnswerMessage():
            return AssistantMessage(role="assistant", content=_plain(item.content))
        case InputMessage(role="user"):
            return UserMessage(role="user", content=_plain(item.content))
        case _:
            return SystemMessage(role=item.role, content=_plain(item.content))


def _plain(content: str | list[Any]) -> Any:
    """Returns a content in the form that messages of chats have."""
    return content if isinstance(content, str) else list(_text_parts(content))


def _text_parts(content: list[Any]) -> Iterator[TextPart]:
    for part in content:
        yield TextPart(type="text", text=part.text)
