"""JSON schemas with parts that no finite value satisfies allow the same tokens as schemas without these parts. What has
a finite value is decided here by building values up to a depth, or written by hand.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.sampling import structured_output
from fastgen.runtime.sampling.finite import schema as finite_schemas
from fastgen.runtime.sampling.finite.derivable import derivable
from fastgen.runtime.sampling.structured_output import Grammars
from tests.runtime.constrained import EOS, VOCAB_SIZE
from tests.runtime.sampling.matching_tokens import matcher
from tests.runtime.sampling.same_masks import check_same, emptiness_of, of_schema

# An object that requires one of its own kind.
ENDLESS: dict[str, Any] = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
NULL: dict[str, Any] = {"type": "null"}


def test_what_is_derivable_is_what_repeated_looks_find() -> None:
    rng = random.Random(0)
    for _ in range(300):
        size = rng.randint(1, 12)
        ways = {
            part: [
                [rng.randrange(size) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4]))]
                for _ in range(rng.randint(0, 3))
            ]
            for part in range(size)
            if rng.random() < 0.9
        }
        found: set[int] = set()
        for _ in range(size):
            found |= {part for part, own in ways.items() if any(found.issuperset(way) for way in own)}
        assert derivable(ways) == found


def with_endless(schema: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    return schema | {"$defs": {"n": ENDLESS, **definitions}}


TO_ENDLESS = {"$ref": "#/$defs/n"}
CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (with_endless({"anyOf": [TO_ENDLESS, NULL]}), NULL),
        (with_endless(CLOSED | {"properties": {"a": TO_ENDLESS, "b": NULL}}), CLOSED | {"properties": {"b": NULL}}),
        (with_endless(CLOSED | {"additionalProperties": TO_ENDLESS}), CLOSED),
        (
            with_endless(CLOSED | {"patternProperties": {"^a": TO_ENDLESS, "^b": NULL}}),
            CLOSED | {"patternProperties": {"^b": NULL}},
        ),
        (with_endless({"type": "array", "items": TO_ENDLESS}), {"type": "array", "maxItems": 0}),
        (
            with_endless({"type": "array", "prefixItems": [NULL, TO_ENDLESS, NULL]}),
            {"type": "array", "items": NULL, "maxItems": 1},
        ),
        (
            with_endless({"type": "array", "prefixItems": [NULL], "items": TO_ENDLESS}),
            {"type": "array", "items": NULL, "maxItems": 1},
        ),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#"}
            | with_endless(
                {"type": "array", "items": [NULL], "additionalItems": TO_ENDLESS, "prefixItems": [TO_ENDLESS]}
            ),
            {"type": "array", "items": NULL, "maxItems": 1},
        ),
        # By way of others, of a reference beside keywords, and of what is joined.
        (with_endless({"anyOf": [{"$ref": "#/$defs/m"}, NULL]}, m=TO_ENDLESS), NULL),
        (
            with_endless(
                {"anyOf": [{"$ref": "#/$defs/m"}, NULL]}, m={"type": "array", "items": TO_ENDLESS, "minItems": 1}
            ),
            NULL,
        ),
        (with_endless({"anyOf": [{"$ref": "#/$defs/n", "type": "object"}, NULL]}), NULL),
        (
            {
                "anyOf": [{"$ref": "#/$defs/joined"}, NULL],
                "$defs": {
                    "joined": {"allOf": [{"$ref": "#/$defs/next"}, {"required": ["x"]}]},
                    "next": {"type": "object", "properties": {"x": {"$ref": "#/$defs/joined"}}},
                },
            },
            NULL,
        ),
        ({"anyOf": [{"$ref": "#/$defs/self"}, NULL], "$defs": {"self": {"$ref": "#/$defs/self"}}}, NULL),
        (
            {
                "anyOf": [{"$ref": "#/$defs/a"}, NULL],
                "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, ENDLESS]}, "n": ENDLESS},
            },
            NULL,
        ),
        # Names with the signs of pointers.
        (
            {
                "anyOf": [{"$ref": "#/$defs/a~1b~0%20c"}, NULL],
                "$defs": {"a/b~ c": {"type": "array", "items": {"$ref": "#/$defs/a~1b~0%20c"}, "minItems": 2}},
            },
            NULL,
        ),
        # By a pattern that a required name matches, and by a reference to the whole.
        (
            {
                "anyOf": [{"$ref": "#/$defs/m"}, NULL],
                "$defs": {
                    "m": {"type": "object", "patternProperties": {"^a": {"$ref": "#/$defs/m"}}, "required": ["a"]}
                },
            },
            NULL,
        ),
        ({"anyOf": [{"type": "array", "items": {"$ref": "#/anyOf/0"}, "minItems": 1}, NULL]}, NULL),
        # A required name that no pattern matches.
        (
            {"anyOf": [CLOSED | {"required": ["a", "c"], "patternProperties": {"^a$": NULL}}, NULL]},
            NULL,
        ),
        # What is joined before a reference would be joined with what is forbidden.
        (
            {
                "anyOf": [{"allOf": [{}], "$ref": "#/$defs/m"}, NULL],
                "$defs": {
                    "m": {
                        "type": "object",
                        "properties": {"n": {"allOf": [{}], "$ref": "#/$defs/m"}},
                        "required": ["n"],
                    }
                },
            },
            NULL,
        ),
        # A number of either kind has a value.
        (
            with_endless(
                {"anyOf": [{"allOf": [{"$ref": "#/$defs/i"}, {"type": "number"}]}, TO_ENDLESS]}, i={"const": 1}
            ),
            {"const": 1},
        ),
    ],
)
def test_what_has_no_finite_value_is_left_out(
    grammars: Grammars, tokenizer: Any, given: dict[str, Any], meant: dict[str, Any]
) -> None:
    check_same(grammars, tokenizer, of_schema(given), of_schema(meant))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "children": {"type": "array", "items": {"$ref": "#/$defs/person"}},
        "mother": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
    },
    "required": ["name", "children", "mother"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/person", "$defs": {"person": PERSON}},
        # Each refers to itself, and can be ended.
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "items": {"anyOf": [{"$ref": "#"}, NULL]}, "minItems": 1},
        CLOSED | {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}},
        CLOSED | {"additionalProperties": {"anyOf": [{"$ref": "#"}, NULL]}, "minProperties": 1},
        {"$defs": {"n": ENDLESS}},
        # ``prefixItems`` beside ``additionalItems``, which the library does not look at.
        with_endless({"type": "array", "prefixItems": [TO_ENDLESS], "additionalItems": {}, "minItems": 1}, n=NULL),
        # References that are not followed here.
        {"$id": "http://a.b/c", "anyOf": [{"$ref": "d"}, NULL], "$defs": {"n": {"$id": "d", "type": "null"}}},
    ],
)
def test_what_can_be_ended_stays_as_it_is(grammars: Grammars, schema: dict[str, Any]) -> None:
    matcher(grammars, of_schema(schema))
    for text in (json.dumps(schema), f'{{"const": {"1" * 5000}}}'):
        assert finite_schemas.finite_schema(text, emptiness_of(grammars)) is text


@pytest.mark.parametrize(
    "schema",
    [
        with_endless({"type": "array", "prefixItems": [TO_ENDLESS], "additionalItems": {}, "minItems": 1}),
        with_endless(
            {
                "anyOf": [
                    {
                        "$schema": "http://json-schema.org/draft-07/schema#",
                        "type": "array",
                        "prefixItems": [TO_ENDLESS],
                        "minItems": 1,
                    }
                ]
            }
        ),
        with_endless(
            {
                "type": "array",
                "items": [NULL],
                "allOf": [{}],
                "additionalItems": TO_ENDLESS,
                "minItems": 2,
                "maxItems": 2,
            }
        ),
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "object",
            "properties": {
                "a": {
                    "id": "http://x.y/z",
                    "type": "array",
                    "minItems": 1,
                    "items": {"$ref": "#/definitions/n"},
                    "definitions": {"n": NULL},
                }
            },
            "required": ["a"],
            "definitions": {
                "n": {"type": "object", "properties": {"n": {"$ref": "#/definitions/n"}}, "required": ["n"]}
            },
        },
        CLOSED
        | {
            "properties": {
                "a": {"type": "object", "properties": {"b": NULL}},
                "c": {"$ref": "#/properties/a/properties/b"},
            },
            "patternProperties": {"^a$": {}},
        },
        CLOSED | {"properties": {"a": {"$ref": "#/patternProperties/%5Ea$"}}, "patternProperties": {"^a$": NULL}},
        {
            "allOf": [{"properties": {"b": {"allOf": [{"patternProperties": {"^a$": {"$ref": "#/$defs/r"}}}]}}}],
            "$defs": {
                "r": {
                    "anyOf": [
                        {
                            "properties": {
                                "b": {
                                    "items": {
                                        "properties": {"a": {"$ref": "#/$defs/r"}},
                                        "additionalProperties": False,
                                        "allOf": [{"const": 1}],
                                        "patternProperties": {"^a$": NULL},
                                    }
                                }
                            }
                        }
                    ]
                }
            },
        },
    ],
)
def test_a_schema_that_the_library_takes_is_not_refused(
    grammars: Grammars, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher(grammars, of_schema(schema))
    monkeypatch.delitem(structured_output._FINITE, "json_schema")
    matcher(Grammars(grammars._tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS]), of_schema(schema))


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        (with_endless(TO_ENDLESS), "#/$defs/n"),
        (with_endless({"anyOf": [TO_ENDLESS, TO_ENDLESS]}), "#/$defs/n"),
        (with_endless({"type": "array", "items": TO_ENDLESS, "minItems": 1}), "#/$defs/n"),
        (with_endless({"type": "array", "prefixItems": [NULL, TO_ENDLESS], "minItems": 2}), "#/$defs/n"),
        (with_endless(CLOSED | {"properties": {"a": TO_ENDLESS}, "required": ["a"]}), "#/$defs/n"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        (CLOSED | {"additionalProperties": {"$ref": "#"}, "minProperties": 1}, "#"),
        (CLOSED | {"properties": {"a": {"$ref": "#"}}, "minProperties": 1}, "#"),
    ],
)
def test_a_schema_without_a_finite_value_is_refused(grammars: Grammars, schema: dict[str, Any], reference: str) -> None:
    message = f"no finite JSON value satisfies the schema: from '{reference}' on, each would hold another, without end"
    with pytest.raises(InvalidArgumentError) as raised:
        matcher(grammars, of_schema(schema))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {"minimum": 4}}},
            {"properties": {"a": {"type": "integer", "minimum": 4}}},
        ),
        ({"required": ["a"], "patternProperties": {"^(a|a)$": NULL}}, {"properties": {"a": NULL}, "required": ["a"]}),
        (
            {"properties": {"a": NULL, "b": NULL}, "patternProperties": {"^(a|b)$": {}, "^c": NULL}},
            {"properties": {"a": NULL, "b": NULL}, "patternProperties": {"^c": NULL}},
        ),
        (
            {"required": ["b", "a"], "patternProperties": {"^a$": NULL, "^b": NULL}},
            {"properties": {"b": NULL, "a": NULL}, "required": ["b", "a"], "patternProperties": {"^b": NULL}},
        ),
        (
            {"required": ["a", "b"], "patternProperties": {"^b$": NULL, "^a$": NULL}},
            {"properties": {"a": NULL, "b": NULL}, "required": ["a", "b"]},
        ),
        (
            {"properties": {"é": {}}, "patternProperties": {"^é$": NULL}},
            {"properties": {"é": NULL}},
        ),
        # These have other matches, or other names are allowed.
        ({"properties": {"a": NULL}, "patternProperties": {"^[ab]$": {}}}, None),
        ({"properties": {"a": NULL}, "patternProperties": {"a$": {}}}, None),
        ({"properties": {"a": NULL}, "patternProperties": {"^a$": {}}, "additionalProperties": NULL}, None),
    ],
)
def test_a_pattern_that_matches_named_properties_only_is_left_out(
    grammars: Grammars, tokenizer: Any, given: dict[str, Any], meant: dict[str, Any] | None
) -> None:
    schema = CLOSED | given
    if meant is not None:
        check_same(grammars, tokenizer, of_schema(schema), of_schema(CLOSED | meant))
        return
    matcher(grammars, of_schema(schema))
    assert not finite_schemas.with_finite_parts(schema, emptiness_of(grammars))


def drawn(rng: random.Random, names: list[str], depth: int = 0) -> dict[str, Any]:
    """A schema that refers to definitions with these names."""
    kinds = ["null", "reference", "reference", "anyOf", "array", "object", "object"]
    match rng.choice(kinds) if depth < 3 else "reference":
        case "reference":
            return {"$ref": f"#/$defs/{rng.choice(names)}"}
        case "anyOf":
            return {"anyOf": [drawn(rng, names, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "array":
            own = {"type": "array", "minItems": rng.randint(0, 2), "items": drawn(rng, names, depth + 1)}
            return own | {"prefixItems": [drawn(rng, names, depth + 1)]} if rng.random() < 0.5 else own
        case "object":
            properties = {name: drawn(rng, names, depth + 1) for name in "abc"[: rng.randint(1, 3)]}
            required = [name for name in properties if rng.random() < 0.4]
            return CLOSED | {"properties": properties, "required": required}
    return NULL


def has_value(schema: Any, definitions: dict[str, Any], depth: int) -> bool:
    """Returns whether a value of at most ``depth`` schemas inside each other satisfies ``schema``."""
    if depth == 0 or schema is False:
        return False

    def inside(other: Any) -> bool:
        return has_value(other, definitions, depth - 1)

    if "$ref" in schema:
        return inside(definitions[schema["$ref"].removeprefix("#/$defs/")])
    if "anyOf" in schema:
        return any(map(inside, schema["anyOf"]))
    if schema["type"] == "array":
        items = [*schema.get("prefixItems", []), schema["items"], schema["items"]]
        return all(map(inside, items[: schema["minItems"]]))
    if schema["type"] == "object":
        return all(inside(schema["properties"][name]) for name in schema["required"])
    return True


def pruned(schema: Any, definitions: dict[str, Any]) -> Any:
    """Returns ``schema`` with ``false`` for each part without a value. With four definitions of at most four schemas
    inside each other, a value that needs more than 16 holds one of its own kind.
    """
    if not has_value(schema, definitions, 17):
        return False
    own = dict(schema)
    for name in ("anyOf", "prefixItems"):
        if name in own:
            own[name] = [pruned(each, definitions) for each in own[name]]
    if "items" in own:
        own["items"] = pruned(own["items"], definitions)
    if "properties" in own:
        own["properties"] = {name: pruned(each, definitions) for name, each in own["properties"].items()}
    return own


@pytest.mark.parametrize("seed", range(60))
def test_drawn_schemas_allow_what_their_finite_parts_allow(grammars: Grammars, tokenizer: Any, seed: int) -> None:
    rng = random.Random(seed)
    names = list("pqrs")
    definitions = {name: drawn(rng, names) for name in names}
    root = drawn(rng, names)
    meant = pruned(root, definitions)
    given = root | {"$defs": definitions}
    if meant is False:
        with pytest.raises(InvalidArgumentError):
            matcher(grammars, of_schema(given))
        return
    left = {name: own for name in names if (own := pruned(definitions[name], definitions)) is not False}
    check_same(grammars, tokenizer, of_schema(given), of_schema(meant | {"$defs": left}), seed)


def test_what_takes_long_to_look_at_stays_as_it_is(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    emptiness = emptiness_of(grammars)
    schema = with_endless({"anyOf": [TO_ENDLESS, NULL]})
    many = {f"{number}": CLOSED | {"properties": {"a": {}}, "patternProperties": {"^a$": NULL}} for number in range(3)}
    objects = {"type": "object", "properties": many}
    monkeypatch.setattr(finite_schemas, "_MOST_WORK", 5)
    monkeypatch.setattr(finite_schemas, "_MOST_TRIED", 2)
    assert json.loads(finite_schemas.finite_schema(json.dumps(schema), emptiness)) == schema
    left = json.loads(finite_schemas.finite_schema(json.dumps(objects), emptiness))["properties"].values()
    assert sorted(len(each["patternProperties"]) for each in left) == [0, 0, 1]


def test_a_schema_may_refer_from_one_to_the_next_thousands_of_times(grammars: Grammars) -> None:
    """The library recurses. On a usual stack 900 objects ended the process."""
    definitions = {f"{number}": {"prefixItems": [{"$ref": f"#/$defs/{number + 1}"}]} for number in range(3_000)}
    matcher(grammars, of_schema({"$ref": "#/$defs/0", "$defs": definitions | {"3000": NULL}}))
