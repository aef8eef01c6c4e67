"""Response formats: any JSON object, JSON of a schema, a match of a pattern, a text of a grammar.

This module brings what a caller gives into one form, and checks it as far as possible without the library that compiles
it (:mod:`fastgen.runtime.sampling.structured_output`).
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.json_bounds import bound_not_followed

# Most characters of a schema as JSON text, a pattern or a grammar.
MAX_CHARACTERS = 200_000
# How llguidance reads every schema, in its own options.
JSON_OPTIONS = {
    # Bounded, since a model that likes blank lines would otherwise write them until its tokens are spent.
    "whitespace_pattern": r"[ \t\n\r]{1,20}",
    "lenient": False,
    "coerce_one_of": False,
}
# The same for JSON without any whitespace between its pieces.
COMPACT_JSON_OPTIONS = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
# The key under which llguidance finds its options in a schema. A schema of :class:`ResponseFormat` has it only if its
# JSON is compact.
OPTIONS_KEY = "x-guidance"

# One of them is in each schema that bounds numbers. A name may also have its letters escaped.
_WORDS_OF_BOUNDS = ("inimum", "aximum", "multipleOf", "\\u")
# What stands before each schema in a grammar, and before one by itself.
_BEGIN_OF_SCHEMA, _SPACE = re.compile(r"%json\s*"), re.compile(r"\s*")

Kind = Literal["json_object", "json_schema", "regex", "grammar"]

# vLLM's name for the switch.
_COMPACT_KEY = "disable_any_whitespace"
_COMPACT_BEGINNING = json.dumps({OPTIONS_KEY: COMPACT_JSON_OPTIONS})[:-1]


@dataclass(frozen=True)
class ResponseFormat:
    """The shape of an answer, a plain value: equal values mean the same shape."""

    kind: Kind
    # The schema as JSON text, its keys in the order given and before them the library's options, if any; the regular
    # expression; the Lark grammar.
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARACTERS:
            raise InvalidArgumentError(
                f"response_format holds {len(self.text)} characters; at most {MAX_CHARACTERS} are taken"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"response_format is not valid Unicode: {error}") from None
        if (why := _bound_not_followed(self.kind, self.text)) is not None:
            raise InvalidArgumentError(f"response_format: {why}")

    @property
    def is_compact(self) -> bool:
        """Returns whether it is JSON without any whitespace between its pieces."""
        return self.kind == "json_schema" and is_compact(self.text)

    def compact(self) -> ResponseFormat:
        """Returns the same format without whitespace, for JSON."""
        if self.is_compact or self.kind not in ("json_object", "json_schema"):
            return self
        schema = {"type": "object"} if self.kind == "json_object" else json.loads(self.text)
        options = {OPTIONS_KEY: COMPACT_JSON_OPTIONS}
        return ResponseFormat("json_schema", json.dumps(options | schema, ensure_ascii=False, allow_nan=False))

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON value from which :func:`parse_response_format` makes it."""
        match self.kind:
            case "json_object":
                return {"type": self.kind}
            case "json_schema":
                schema = json.loads(self.text)
                if self.is_compact:
                    del schema[OPTIONS_KEY]
                    return {"type": self.kind, "schema": schema, _COMPACT_KEY: True}
                return {"type": self.kind, "schema": schema}
            case "regex":
                return {"type": self.kind, "pattern": self.text}
            case "grammar":
                return {"type": self.kind, "grammar": self.text}


def _bound_not_followed(kind: Kind, text: str) -> str | None:
    """Returns why a bound of numbers in a format would not be followed, or ``None``. What is no JSON is left to
    the library, which refuses it.
    """
    if kind in ("json_object", "regex") or not any(word in text for word in _WORDS_OF_BOUNDS):
        return None
    return _bound_in_schemas(kind, text)


@lru_cache(maxsize=64)  # a server and its engine make the format of each request anew
def _bound_in_schemas(kind: Kind, text: str) -> str | None:
    begins = _BEGIN_OF_SCHEMA.finditer(text) if kind == "grammar" else [_SPACE.match(text)]
    for begin in filter(None, begins):
        with suppress(ValueError, RecursionError):
            schema, _ = json.JSONDecoder().raw_decode(text, begin.end())
            if (why := bound_not_followed(schema)) is not None:
                return why
    return None


def is_compact(schema: str) -> bool:
    """Returns whether the JSON text ``schema`` has the options for compact JSON, as :meth:`ResponseFormat.compact` puts
    them into it.
    """
    return schema.startswith(_COMPACT_BEGINNING)


def parse_response_format(value: object) -> ResponseFormat | None:
    """Returns the format that a caller's ``value`` asks for, ``None`` for free text. Raises ``InvalidArgumentError``.

    Accepted are ``None`` and ``{"type": "text"}``; ``{"type": "json_object"}``; ``{"type": "json_schema", "schema":
    {…}}`` or, as OpenAI spells it, ``{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}``; ``{"type":
    "regex", "pattern": …}``; ``{"type": "grammar", "grammar": …}``. Both kinds of JSON may have
    ``"disable_any_whitespace": true``.
    """
    if value is None or isinstance(value, ResponseFormat):
        return value
    if not isinstance(value, Mapping) or not isinstance(kind := value.get("type"), str):
        raise InvalidArgumentError(f"response_format must be an object with a 'type', not {reprlib.repr(value)}")
    if kind not in _READERS:
        raise InvalidArgumentError(f"response_format type {kind!r:.40} is not one of {', '.join(_READERS)}")
    return _READERS[kind](value)


def _text(value: Mapping[str, Any]) -> None:
    _check_keys(value, "response_format", ("type",))


def _json_object(value: Mapping[str, Any]) -> ResponseFormat:
    _check_keys(value, "response_format", ("type", _COMPACT_KEY))
    return _compact_if_asked(ResponseFormat("json_object"), value)


def _json_schema(value: Mapping[str, Any]) -> ResponseFormat:
    return _compact_if_asked(_any_json_schema(value), value)


def _compact_if_asked(found: ResponseFormat, value: Mapping[str, Any]) -> ResponseFormat:
    asked = value.get(_COMPACT_KEY, False)
    if not isinstance(asked, bool):
        raise InvalidArgumentError(f"response_format: {_COMPACT_KEY} must be true or false, not {asked!r:.40}")
    return found.compact() if asked else found


def _any_json_schema(value: Mapping[str, Any]) -> ResponseFormat:
    if "json_schema" not in value:
        _check_keys(value, "response_format", ("type", "schema", _COMPACT_KEY))
        return _of_schema("response_format", value)
    _check_keys(value, "response_format", ("type", "json_schema", _COMPACT_KEY))
    nested = value["json_schema"]
    if not isinstance(nested, Mapping):
        raise InvalidArgumentError(f"response_format: json_schema must be an object, not {reprlib.repr(nested)}")
    # The schema is always followed, so "strict" changes nothing; name and description are for people.
    _check_keys(nested, "response_format.json_schema", ("schema", "name", "description", "strict"))
    return _of_schema("response_format.json_schema", nested)


def _of_schema(where: str, holder: Mapping[str, Any]) -> ResponseFormat:
    schema = holder.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidArgumentError(f"{where}: schema must be a JSON schema (an object), not {reprlib.repr(schema)}")
    if OPTIONS_KEY in schema:
        raise InvalidArgumentError(f"{where}: the key {OPTIONS_KEY!r} is not JSON Schema and is not taken")
    try:
        text = json.dumps(schema, default=dict, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{where}: the schema is not JSON: {error}") from None
    except RecursionError:
        raise InvalidArgumentError(f"{where}: the schema is nested too deeply") from None
    return ResponseFormat("json_schema", text)


def _regex(value: Mapping[str, Any]) -> ResponseFormat:
    _check_keys(value, "response_format", ("type", "pattern"))
    return ResponseFormat("regex", _given_text(value, "pattern", "a regular expression"))


def _grammar(value: Mapping[str, Any]) -> ResponseFormat:
    _check_keys(value, "response_format", ("type", "grammar"))
    return ResponseFormat("grammar", _given_text(value, "grammar", "a grammar in Lark's notation"))


def _given_text(value: Mapping[str, Any], name: str, what: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not text:
        raise InvalidArgumentError(f"response_format: {name} must be {what}, not {reprlib.repr(text)}")
    return text


def _check_keys(value: Mapping[str, Any], where: str, known: tuple[str, ...]) -> None:
    unknown = [key for key in value if key not in known]
    if unknown:
        raise InvalidArgumentError(f"{where}: {unknown[0]!r:.40} is not known here; the keys are {', '.join(known)}")


_READERS: dict[str, Callable[[Mapping[str, Any]], ResponseFormat | None]] = {
    "text": _text,
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "grammar": _grammar,
}
