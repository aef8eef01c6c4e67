"""The formats in which families of models write tool calls, as data. The text of a chat template decides which one
applies.

A section of calls is ``opening call (separator call)* closing``, with optional spaces between these. A call is a JSON
object, or a name followed by its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.errors import InvalidArgumentError


@dataclass(frozen=True)
class ObjectCall:
    """A call as ``{"name": "f", "arguments": {…}}``, with these keys."""

    name_key: str = "name"
    arguments_key: str = "arguments"


@dataclass(frozen=True)
class NamedCall:
    """A call with its name between ``before`` and ``between``, then the arguments as a JSON object, then ``after``."""

    before: str
    between: str
    after: str


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls. Texts are as models write them; the parser ignores the spaces around them."""

    # A chat template that contains all of these uses this format.
    signs: tuple[str, ...]
    opening: str
    closing: str
    call: ObjectCall | NamedCall = ObjectCall()
    # Separates the calls of a section; ``None`` if each call has a section of its own.
    separator: str | None = None
    # Whether an answer that begins with ``{`` is a section too.
    is_opening_optional: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Returns all its texts that may contain special tokens of a tokenizer."""
        call = self.call
        return (
            self.opening,
            self.closing,
            *((call.before, call.between, call.after) if isinstance(call, NamedCall) else ()),
        )


# By name; formats with more signs come first.
TOOL_FORMATS = {
    "hermes": ToolFormat(("<tool_call>",), "<tool_call>\n", "\n</tool_call>"),
    "mistral-named": ToolFormat(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "", NamedCall("", "[ARGS]", "")),
    "mistral": ToolFormat(("[TOOL_CALLS]",), "[TOOL_CALLS] [", "]", separator=", "),
    "granite": ToolFormat(("<|tool_call|>",), "<|tool_call|>[", "]", separator=", "),
    "command": ToolFormat(
        ("<|START_ACTION|>",), "<|START_ACTION|>[", "]<|END_ACTION|>", ObjectCall("tool_name", "parameters"), ", "
    ),
    "deepseek-v3": ToolFormat(
        ("<｜tool▁calls▁begin｜>", "```json"),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        NamedCall("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        "\n",
    ),
    "deepseek-v3.1": ToolFormat(
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        NamedCall("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "",
    ),
    "llama3": ToolFormat(
        ('"parameters": ',),
        "<|python_tag|>",
        "",
        ObjectCall(arguments_key="parameters"),
        "; ",
        is_opening_optional=True,
    ),
}
# Signs of formats that are not supported, because their arguments are not JSON. Their templates also have signs of
# formats above.
_OTHER_SIGNS = ("<function=",)


def tool_format_of(template: str) -> ToolFormat | None:
    """Returns the format of a chat template: the first one all of whose signs it contains, if it supports tools."""
    if "tools" not in template or any(sign in template for sign in _OTHER_SIGNS):
        return None
    return next((each for each in TOOL_FORMATS.values() if all(sign in template for sign in each.signs)), None)


def tool_format_named(name: str) -> ToolFormat:
    """Returns one of :data:`TOOL_FORMATS`. Raises ``InvalidArgumentError`` for another name."""
    if name not in TOOL_FORMATS:
        raise InvalidArgumentError(f"tool_format={name!r} is not one of {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name]
