"""Response formats as callers give them: every spelling that is taken, and what is said of the others."""

from __future__ import annotations

import json
import pickle
from types import MappingProxyType
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.response_format import MAX_CHARACTERS, ResponseFormat, parse_response_format
from fastgen.runtime.requests.sampling_params import SamplingParams

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "ä"}}}
AS_TEXT = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "ä"}}}'


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, ResponseFormat("json_object")),
        ({"type": "json_schema", "schema": SCHEMA}, ResponseFormat("json_schema", AS_TEXT)),
        ({"type": "json_schema", "schema": MappingProxyType({})}, ResponseFormat("json_schema", "{}")),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "strict": True, "schema": {}}},
            ResponseFormat("json_schema", "{}"),
        ),
        ({"type": "json_object", "disable_any_whitespace": True}, ResponseFormat("json_object").compact()),
        ({"type": "json_object", "disable_any_whitespace": False}, ResponseFormat("json_object")),
        (
            {"type": "json_schema", "schema": SCHEMA, "disable_any_whitespace": True},
            ResponseFormat("json_schema", AS_TEXT).compact(),
        ),
        ({"type": "regex", "pattern": "[ab]+"}, ResponseFormat("regex", "[ab]+")),
        ({"type": "grammar", "grammar": 'start: "a"'}, ResponseFormat("grammar", 'start: "a"')),
        (ResponseFormat("regex", "a"), ResponseFormat("regex", "a")),
    ],
)
def test_what_is_taken(given: object, kept: ResponseFormat | None) -> None:
    assert parse_response_format(given) == kept


@pytest.mark.parametrize("given", [ResponseFormat("json_object"), ResponseFormat("json_schema", AS_TEXT)])
def test_compact_json_keeps_its_schema_and_comes_back_from_json(given: ResponseFormat) -> None:
    compact = given.compact()
    assert compact.is_compact
    assert not given.is_compact
    assert compact.compact() == compact
    schema = json.loads(given.text or '{"type": "object"}')
    assert compact.as_json() == {"type": "json_schema", "schema": schema, "disable_any_whitespace": True}
    assert parse_response_format(compact.as_json()) == compact
    assert ResponseFormat("regex", "a b").compact() == ResponseFormat("regex", "a b")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("json_object", "must be an object with a 'type', not 'json_object'"),
        ({"pattern": "a"}, "must be an object with a 'type'"),
        ({"type": 3}, "must be an object with a 'type'"),
        ({"type": "yaml"}, "type 'yaml' is not one of text, json_object, json_schema, regex, grammar"),
        ({"type": "json_object", "schema": {}}, "'schema' is not known here; the keys are type"),
        ({"type": "text", "pattern": "a"}, "'pattern' is not known here"),
        ({"type": "json_object", "disable_any_whitespace": 1}, "disable_any_whitespace must be true or false, not 1"),
        ({"type": "regex", "pattern": "a", "disable_any_whitespace": True}, "'disable_any_whitespace' is not known"),
        ({"type": "regex"}, "pattern must be a regular expression, not None"),
        ({"type": "regex", "pattern": ""}, "pattern must be a regular expression, not ''"),
        ({"type": "regex", "regex": "a"}, "'regex' is not known here; the keys are type, pattern"),
        ({"type": "grammar", "grammar": ["start"]}, "grammar must be a grammar in Lark's notation"),
        ({"type": "json_schema"}, "schema must be a JSON schema"),
        ({"type": "json_schema", "schema": "{}"}, "schema must be a JSON schema .an object., not '{}'"),
        ({"type": "json_schema", "schema": {}, "strict": True}, "'strict' is not known here"),
        ({"type": "json_schema", "json_schema": "{}"}, "json_schema must be an object"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, r"response_format\.json_schema: schema must be"),
        ({"type": "json_schema", "json_schema": {"shema": {}}}, "'shema' is not known here"),
        ({"type": "json_schema", "schema": {"const": {1, 2}}}, "the schema is not JSON"),
        ({"type": "json_schema", "schema": {"const": float("nan")}}, "the schema is not JSON"),
        ({"type": "json_schema", "schema": nested(20_000)}, "nested too deeply"),
        ({"type": "json_schema", "schema": {"x-guidance": {"lenient": True}}}, "'x-guidance' is not JSON Schema"),
        ({"type": "regex", "pattern": "a" * (MAX_CHARACTERS + 1)}, "200001 characters; at most 200000"),
        ({"type": "regex", "pattern": "\ud800"}, "not valid Unicode"),
    ],
)
def test_what_is_refused(given: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        SamplingParams(response_format=given)  # type: ignore[arg-type]


def test_a_format_may_be_as_long_as_the_documentation_says() -> None:
    assert len(ResponseFormat("regex", "a" * 200_000).text) == 200_000


def test_a_schema_that_is_changed_later_changes_no_request() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    sampling = SamplingParams(response_format={"type": "json_schema", "schema": schema})  # type: ignore[arg-type]
    schema["properties"] = {}
    assert sampling.response_format is not None
    assert json.loads(sampling.response_format.text)["properties"] == {"a": {"type": "integer"}}


def test_parameters_with_a_format_are_values() -> None:
    first, second = (
        SamplingParams(response_format={"type": "regex", "pattern": pattern})  # type: ignore[arg-type]
        for pattern in ("a", "a")
    )
    assert first == second
    assert hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == first


def test_what_ends_a_format_cannot_be_ignored() -> None:
    with pytest.raises(InvalidArgumentError, match="ignore_eos cannot go with response_format"):
        SamplingParams(ignore_eos=True, response_format=ResponseFormat("json_object"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "json_schema", "schema": SCHEMA}, {"type": "json_schema", "schema": SCHEMA}),
        ({"type": "regex", "pattern": "[ab]+"}, {"type": "regex", "pattern": "[ab]+"}),
        ({"type": "grammar", "grammar": 'start: "a"'}, {"type": "grammar", "grammar": 'start: "a"'}),
        (
            {"type": "json_schema", "schema": SCHEMA, "disable_any_whitespace": True},
            {"type": "json_schema", "schema": SCHEMA, "disable_any_whitespace": True},
        ),
        (
            {"type": "json_object", "disable_any_whitespace": True},
            {"type": "json_schema", "schema": {"type": "object"}, "disable_any_whitespace": True},
        ),
    ],
)
def test_a_format_is_written_as_it_is_read(given: dict[str, Any], expected: dict[str, Any]) -> None:
    kept = parse_response_format(given)
    assert kept is not None
    assert kept.as_json() == expected
    assert parse_response_format(expected) == kept
