"""The messages and tools of a chat, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StringConstraints
from pydantic import Tag as Reading
from pydantic_core import PydanticCustomError

from fastgen.serving.http.openai.json_texts import ObjectText

MAX_PARTS = 4096
FunctionName = Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(_Part):
    type: Literal["text"]
    text: str


def _reading(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


# Text, as one string or in parts.
Content = Annotated[
    Annotated[str, Reading("text")] | Annotated[list[TextPart], Reading("parts"), Field(max_length=MAX_PARTS)],
    Discriminator(_reading),
]


def check_num_parts(messages: Iterable[Any]) -> None:
    """Raises ``PydanticCustomError`` if these have more than :data:`MAX_PARTS` parts together."""
    contents = (each.get("content") for each in messages if isinstance(each, dict))
    if sum(len(content) for content in contents if isinstance(content, list)) > MAX_PARTS:
        raise PydanticCustomError("too_many_parts", "at most {max} parts in all messages together", {"max": MAX_PARTS})


def _few_parts(value: Any) -> Any:
    if isinstance(value, list):
        check_num_parts(value)
    return value


# Limits the contents of a whole conversation to :data:`MAX_PARTS` parts.
few_parts = BeforeValidator(_few_parts)


class SystemMessage(_Part):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(_Part):
    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(_Part):
    name: str
    arguments: ObjectText


class ToolCall(_Part):
    id: str
    type: Literal["function"]
    function: CalledFunction
    # Accepted without effect: clients that collect a stream send its calls back with their numbers.
    index: Annotated[int | None, Field(ge=0, exclude=True)] = None


class AssistantMessage(_Part):
    """A message of the assistant. An answer of this server can be sent back unchanged."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=128)] = None
    refusal: None = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    audio: None = None
    function_call: None = None
    # Fields of vLLM's answers.
    reasoning: None = None
    reasoning_content: None = None


class ToolMessage(_Part):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    # The name of the function; by default that of the call that this answers.
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(_Part):
    name: FunctionName
    description: str | None = None
    # A JSON schema; without it, the function takes no arguments.
    parameters: dict[str, Any] | None = None
    # Arguments match the schema; without it only those of a call that ``tool_choice`` demands do.
    strict: bool | None = None


class Tool(_Part):
    type: Literal["function"]
    function: Function


class NamedFunction(_Part):
    name: FunctionName


class NamedTool(_Part):
    type: Literal["function"]
    function: NamedFunction


def _choice(value: Any) -> str:
    return "mode" if isinstance(value, str) else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Reading("mode")] | Annotated[NamedTool, Reading("named")],
    Discriminator(_choice),
]


# They may be large, and are not copied.
_ARGUMENTS: Any = {"tool_calls": {"__all__": {"function": {"arguments"}}}}


def for_template(messages: list[Message], *, has_developer_role: bool) -> list[dict[str, Any]]:
    """Returns ``messages`` as chat templates expect them: the arguments of calls as objects, tool results with the
    names of their functions, and ``developer`` as ``system`` if the template has no such role.
    """
    names: dict[str, str] = {}
    return [_for_template(message, has_developer_role, names) for message in messages]


def _for_template(message: Message, has_developer_role: bool, names: dict[str, str]) -> dict[str, Any]:
    """Converts one message. ``names`` are the names of the functions called so far, by the ids of the calls."""
    plain = message.model_dump(exclude_none=True, exclude=_ARGUMENTS)
    plain.pop("annotations", None)
    plain.setdefault("content", "")
    if plain["role"] == "developer" and not has_developer_role:
        plain["role"] = "system"
    if plain.get("tool_calls") == []:
        del plain["tool_calls"]  # templates would take it for calls
    if isinstance(message, AssistantMessage):
        for call, given in zip(plain.get("tool_calls", ()), message.tool_calls or (), strict=True):
            call["function"]["arguments"] = given.function.arguments
            names[given.id] = given.function.name
    if plain["role"] == "tool" and plain["tool_call_id"] in names:
        plain.setdefault("name", names[plain["tool_call_id"]])
    return plain
