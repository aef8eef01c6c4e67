"""Grammars that require tool calls, or require that calls are valid: in Lark's notation for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.response_format import COMPACT_JSON_OPTIONS, JSON_OPTIONS, OPTIONS_KEY, ResponseFormat
from fastgen.serving.tools.formats import NamedCall, ToolFormat

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolSchema:
    """A tool's name (letters, digits, ``_`` and ``-`` only) and the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] | None


def tool_grammar(
    tool_format: ToolFormat,
    tools: Sequence[ToolSchema],
    special_ids: Mapping[str, int],
    *,
    is_required: bool,
    is_parallel: bool,
    content: ResponseFormat | None = None,
    is_compact: bool = False,
) -> ResponseFormat:
    """Returns the format of answers that call ``tools``; several calls only with ``is_parallel``.

    If calls are not required, text may come before them or instead of them. The text has the format ``content``, if
    that is given. ``special_ids`` has the tokenizer's special tokens by spelling; they are not text. With
    ``is_compact`` arguments have no whitespace. Raises ``InvalidArgumentError`` for parameters that cannot be followed.
    """
    write = _Writer(special_ids)
    tail = _section_tail(tool_format, write, is_parallel=is_parallel)
    rules = [f"opening: {write(tool_format.opening)}", f"tail: {tail}"]
    rules += _call_rules(tool_format, tools, write, is_compact)
    if is_required:
        start = "calls"
    elif content is not None:
        rules.append(f"content: %json {_schema(_content_schema(content), content.is_compact)}")
        start = "content | calls"
    else:
        start = "plain | calls"
        rules += _text_rules(tool_format, write)
    calls = "tail" if tool_format.is_opening_optional else "opening tail"
    if not is_required and content is None and not tool_format.is_opening_optional:
        calls = "before tail"
    return ResponseFormat("grammar", "\n".join([f"start: {start}", f"calls: {calls}", *rules, ""]))


def _section_tail(tool_format: ToolFormat, write: _Writer, *, is_parallel: bool) -> str:
    """Returns the rule for the part after the first opening."""
    closing = write(tool_format.closing)
    if not is_parallel:
        return f"call {closing}"
    if tool_format.separator is None:
        between = write("\n") if closing else ""
        return f"call {closing} ({between} opening call {closing})*"
    return f"call ({write(tool_format.separator)} call)* {closing}"


def _call_rules(tool_format: ToolFormat, tools: Sequence[ToolSchema], write: _Writer, is_compact: bool) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        call = tool_format.call
        if isinstance(call, NamedCall):
            before, after = call.before + tool.name + call.between, call.after
        else:
            before, after = f'{{"{call.name_key}": "{tool.name}", "{call.arguments_key}": ', "}"
        rules.append(f"call_{number}: {write(before)} arguments_{number} {write(after)}")
        parameters = {"type": "object", **(tool.parameters or _NO_ARGUMENTS)}
        try:
            schema = _schema(parameters, is_compact)
            ResponseFormat("json_schema", schema)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{error} (in the parameters of {tool.name})") from None
        rules.append(f"arguments_{number}: %json {schema}")
    return rules


def _text_rules(tool_format: ToolFormat, write: _Writer) -> list[str]:
    """Returns the rules for text instead of calls and before them. Neither text contains the beginning of a section."""
    if tool_format.is_opening_optional:
        return [r"plain: PLAIN?", r"PLAIN: /[^\s{](?s:.*)/"]
    opening = tool_format.opening
    if any(opening.startswith(token) for token in write.special_ids):  # a special token never occurs in text
        return ["plain: PLAIN?", "PLAIN: /(?s:.+)/", f"before: PLAIN? {write(opening)}"]
    mark = opening.split()[0]
    rest = write(opening.removeprefix(mark))
    quoted = re.escape(mark).replace("/", r"\/")
    return [
        "plain: PLAIN",
        rf"PLAIN: /(?s:.*)/ & ~/(?s:.*){quoted}(?s:.*)/",
        rf"up_to_mark[lazy]: /(?s:.*){quoted}/",
        f"before: up_to_mark {rest}",
    ]


class _Writer:
    """Writes texts as Lark terms, and special tokens by their ids."""

    def __init__(self, special_ids: Mapping[str, int]):
        self.special_ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def __call__(self, text: str) -> str:
        pieces = self._special.split(text) if self._special is not None else [text]
        return " ".join(
            f"<[{self.special_ids[piece]}]>" if piece in self.special_ids else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )


def _schema(schema: Mapping[str, Any], is_compact: bool) -> str:
    options = COMPACT_JSON_OPTIONS if is_compact else JSON_OPTIONS
    try:
        return json.dumps({OPTIONS_KEY: options, **schema}, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # a number that JSON does not have, such as 1e400
        raise InvalidArgumentError(f"response_format: the schema cannot be written as JSON: {error}") from None


def _content_schema(content: ResponseFormat) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(content.text) if content.kind == "json_schema" else {"type": "object"}
    return schema
