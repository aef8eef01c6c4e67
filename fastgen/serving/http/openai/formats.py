"""The required format of an answer, in OpenAI's fields and in vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, StringConstraints

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.response_format import MAX_CHARACTERS, ResponseFormat, parse_response_format
from fastgen.serving.http.openai.validation import Strict, refused
from fastgen.serving.refusals import BadRequestError

MAX_CHOICES = 1024
_Text = Annotated[str, StringConstraints(min_length=1)]
Schema = dict[str, Any] | str
Choices = Annotated[list[_Text], Field(min_length=1, max_length=MAX_CHOICES)]


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    # Accepted without effect: the schema is always enforced.
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


AnyFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's ``structured_outputs``: one kind of format, and how it is enforced."""

    # A JSON schema, as an object or as text.
    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: _Text | None = None
    choice: Choices | None = None
    # In Lark's notation or in GBNF.
    grammar: _Text | None = None
    json_object: bool | None = None
    # JSON has no whitespace between its pieces. It also applies to ``response_format``, and to arguments of tools.
    disable_any_whitespace: bool | None = None
    # Accepted without effect: there is no other implementation to fall back to.
    disable_fallback: bool | None = None
    disable_additional_properties: Annotated[
        Literal[False] | None, refused('write "additionalProperties": false into the schema', unless=False)
    ] = None
    whitespace_pattern: Annotated[None, refused("use disable_any_whitespace, or a grammar")] = None
    structural_tag: Annotated[None, refused("use a grammar, or tools with tool_choice")] = None


class _HasFormats(Protocol):
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Schema | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def wants_compact_json(request: _HasFormats) -> bool:
    """Returns whether JSON shall have no whitespace."""
    return request.structured_outputs is not None and bool(request.structured_outputs.disable_any_whitespace)


def format_field(request: _HasFormats) -> str | None:
    """Returns the name of the first field that gives a format, or ``None``."""
    return next((param for param, _, value in _fields(request) if value is not None), None)


@contextmanager
def naming_format(field: str | None) -> Iterator[None]:
    """Makes refusals of the answer's format name ``field``, which gives it."""
    try:
        yield
    except BadRequestError as error:
        if field is None or not str(error).startswith("response_format"):
            raise
        raise BadRequestError(str(error).replace("response_format", field, 1), param=field) from error


def required_format(request: _HasFormats) -> ResponseFormat | None:
    """Returns the format that a request's answer must have. Raises ``BadRequestError`` if several fields give one."""
    given = [(param, read, value) for param, read, value in _fields(request) if value is not None]
    if not given:
        return None
    if len(given) > 1:
        first, second = given[0][0], given[1][0]
        raise BadRequestError(f"{second}: {first} gives the format of the answer already; give one", param=second)
    ((param, read, value),) = given
    try:
        found = parse_response_format(read(value))
    except InvalidArgumentError as error:
        raise BadRequestError(str(error).replace("response_format", param), param=param) from error
    return found.compact() if found is not None and wants_compact_json(request) else found


def _fields(request: _HasFormats) -> list[tuple[str, Callable[[Any], Any], Any]]:
    """Returns the fields that may give a format: their names, how they are read, and their values."""
    openais = request.response_format
    outputs = request.structured_outputs or StructuredOutputs()
    return [
        ("response_format", _openais, None if openais is None or openais.type == "text" else openais),
        ("structured_outputs.json_object", lambda _: {"type": "json_object"}, outputs.json_object or None),
        ("structured_outputs.json", _of_schema, outputs.json_),
        ("structured_outputs.regex", _of_pattern, outputs.regex),
        ("structured_outputs.choice", _of_choices, outputs.choice),
        ("structured_outputs.grammar", _of_grammar, outputs.grammar),
        ("guided_json", _of_schema, request.guided_json),
        ("guided_regex", _of_pattern, request.guided_regex),
        ("guided_choice", _of_choices, request.guided_choice),
        ("guided_grammar", _of_grammar, request.guided_grammar),
    ]


def _openais(given: Strict) -> Any:
    return given.model_dump(by_alias=True, exclude_none=True)


def _of_schema(schema: Schema) -> Any:
    if isinstance(schema, str):
        if len(schema) > MAX_CHARACTERS:  # it is not even parsed
            raise InvalidArgumentError(
                f"response_format: the text has {len(schema)} characters; at most {MAX_CHARACTERS} are taken"
            )
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"response_format: the text is not JSON: {error}") from None
    return {"type": "json_schema", "schema": schema}


def _of_pattern(pattern: str) -> Any:
    return {"type": "regex", "pattern": pattern}


def _of_choices(choices: list[str]) -> Any:
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return {"type": "grammar", "grammar": f"start: {texts}"}


def _of_grammar(grammar: str) -> Any:
    return {"type": "grammar", "grammar": grammar}
