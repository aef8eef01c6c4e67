"""Bounds of numbers in a schema are followed or refused, by comparison with what is accepted of numbers near them."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.response_format import ResponseFormat, parse_response_format

NUMBERS = [-2, -1.5, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 1.5, 2, 2.5, 10, 10.5]
TEXTS = [*map(str, NUMBERS), "-0", "0.0", "1.0", "0.1", "0.9", "-0.1", "1.1", "9", "2.1", "-1.9", "10.1", "3"]


def schema_format(schema: dict[str, Any]) -> Any:
    return parse_response_format({"type": "json_schema", "schema": schema})


def accepts(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    return all(matcher.consume_token(byte) for byte in text.encode()) and bool(matcher.is_accepting())


def test_numbers_outside_of_drawn_bounds_are_never_accepted() -> None:
    rng, tokenizer, num_refused = random.Random(1), LLTokenizer("byte"), 0
    for low, high in itertools.combinations(NUMBERS, 2):
        lower, upper = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        schema = {"type": rng.choice(["number", "integer"]), lower: low, upper: high}
        try:
            text = schema_format(schema).text
        except InvalidArgumentError:
            num_refused += 1
            continue
        grammar = LLMatcher.grammar_from_json_schema(text)
        for each in TEXTS:
            number = float(each)
            is_above = number > low if lower.startswith("exclusive") else number >= low
            is_below = number < high if upper.startswith("exclusive") else number <= high
            assert (is_above and is_below) or not accepts(tokenizer, grammar, each), (schema, each)
    assert 0 < num_refused < 15


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum 0 .*give a minimum"),
        ({"type": ["number", "null"], "minimum": -0.5, "exclusiveMaximum": 0}, "exclusiveMaximum 0 .*give a maximum"),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "exclusiveMinimum 1 "),
        ({"exclusiveMinimum": -3, "minimum": 0.25, "maximum": 0.5}, "exclusiveMinimum -3 "),
        ({"exclusiveMinimum": 0, "maximum": 5, "exclusiveMaximum": 0.5}, "exclusiveMinimum 0 "),
        ({"type": "integer", "exclusiveMaximum": -(1 << 63)}, "exclusiveMaximum -9223372036854775808: "),
        ({"type": "integer", "minimum": 10**20}, "minimum 100000000000000000000: "),
        ({"type": "integer", "maximum": -(1 << 63) - 1}, "maximum -9223372036854775809: "),
        ({"type": "integer", "exclusiveMinimum": (1 << 53) + 1}, "exclusiveMinimum 9007199254740993: "),
        ({"type": "integer", "minimum": -(1 << 63), "maximum": -(1 << 63)}, "maximum -9223372036854775808: "),
        ({"type": "integer", "minimum": -1e30, "maximum": -1e30}, "minimum -1e.30: "),
        ({"type": "integer", "multipleOf": 10_001}, "multipleOf 10001 would take too long"),
        ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf 1000003 would take too long"),
        ({"type": "number", "multipleOf": 1000.003}, "multipleOf 1000.003 would take too long"),
    ],
)
def test_what_cannot_be_followed_is_refused_wherever_it_stands(schema: dict[str, Any], why: str) -> None:
    for whole in (schema, {"properties": {"minimum": schema}}, {"$defs": {"a": {"anyOf": [{}, schema]}}}):
        with pytest.raises(InvalidArgumentError, match=why):
            schema_format(whole)
    schema_format({"enum": [schema], "default": schema, "examples": [schema], "const": schema})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0.25, "maximum": 0.5},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "number", "minimum": 0, "maximum": 0.5},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "exclusiveMaximum": 0},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0},
        {"type": "integer", "exclusiveMinimum": -(1 << 63)},
        {"type": "integer", "maximum": 1 - (1 << 63) + 1023},
        {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
        {"type": "integer", "minimum": 1 << 62},
        {"type": "number", "minimum": True, "maximum": "much"},
        {"type": "integer", "multipleOf": 9999},
        {"type": "number", "multipleOf": 0.01},
    ],
)
def test_what_is_followed_is_taken(schema: dict[str, Any]) -> None:
    assert json.loads(schema_format(schema).text) == schema


NOT_FOLLOWED = '{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", NOT_FOLLOWED),
        ("json_schema", " \n" + NOT_FOLLOWED),
        ("json_schema", NOT_FOLLOWED.replace("exclusiveM", "exclusive\\u004d").replace("max", "m\\u0061x")),
        ("grammar", f'start: "a" %json {{"type": "number"}} | %json\n{NOT_FOLLOWED}'),
    ],
)
def test_a_format_is_refused_however_it_comes(kind: Any, text: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"^response_format: exclusiveMinimum 0 .*give a minimum"):
            ResponseFormat(kind, text)


@pytest.mark.parametrize(
    "text",
    [
        '{"minimum": 1' + "0" * 400 + ', "maximum": 0.5}',
        '{"minimum": 0, "exclusiveMinimum": -1e999, "maximum": 0.5}',
        '{"minimum": 0',
        '{"minimum": ' + "[" * 100_000,
    ],
)
def test_what_the_library_cannot_read_is_left_to_it(text: str) -> None:
    assert ResponseFormat("json_schema", text).text == text
    grammar = LLMatcher.grammar_from_json_schema(text)
    assert LLMatcher(LLTokenizer("byte"), grammar, log_level=0).is_error()


def test_a_grammar_may_have_the_mark_of_a_schema_in_a_text() -> None:
    ResponseFormat("grammar", 'start: "%json minimum" | "%json"')


def test_a_format_that_is_made_again_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"type": "number", "minimum": 77, "maximum": 777}'
    ResponseFormat("json_schema", text)
    monkeypatch.setattr(json, "JSONDecoder", lambda: pytest.fail("it was read"))
    ResponseFormat("json_schema", text)
    ResponseFormat("json_schema", '{"type": "string"}')
