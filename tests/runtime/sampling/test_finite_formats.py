"""Formats with parts that no finite text satisfies allow the same tokens as formats without these parts. What has a
finite value is decided here by other means: by building values up to a depth, and by writing what is left by hand.
"""

from __future__ import annotations

import json
import random
from itertools import chain
from typing import Any

import pytest
from transformers import AutoTokenizer

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.response_format import parse_response_format
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling import structured_output
from fastgen.runtime.sampling.finite import grammar as finite_grammars
from fastgen.runtime.sampling.finite import schema as finite_schemas
from fastgen.runtime.sampling.finite.derivable import derivable
from fastgen.runtime.sampling.finite.lark import UnreadableError, read_lark
from fastgen.runtime.sampling.matcher import Matcher
from fastgen.runtime.sampling.structured_output import Grammars
from tests.runtime.constrained import EOS, VOCAB_SIZE, save_byte_tokenizer

# Tokens that bring an answer nearer to its end, the best first.
TO_THE_END = ["}", "]", '"', "n", "u", "l", "1", ":", ",", "e", "d", "c", "b", "a", "[", "{"]
# An object that requires one of its own kind.
ENDLESS: dict[str, Any] = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
NULL: dict[str, Any] = {"type": "null"}
# Tokens of an answer that are drawn.
DRAWN = 25


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


def of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "schema": schema, "disable_any_whitespace": True}


def of_grammar(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


def matcher(grammars: Grammars, response_format: dict[str, Any]) -> Matcher:
    constraint = grammars.constraint(SamplingParams(response_format=parse_response_format(response_format)))
    assert constraint is not None
    return constraint.matcher()


def allowed(matcher: Matcher) -> list[int]:
    words = matcher.mask()
    return [token_id for token_id in range(VOCAB_SIZE) if words[token_id // 32] >> token_id % 32 & 1]


def check_same(
    grammars: Grammars,
    tokenizer: Any,
    given: dict[str, Any],
    meant: dict[str, Any],
    seed: int = 0,
    *,
    to_end: bool = True,
) -> None:
    """Follows drawn answers in both formats, and with ``to_end`` brings each to its end."""
    rng = random.Random(seed)
    end_ids = tokenizer.convert_tokens_to_ids(TO_THE_END)
    brace, quote = tokenizer.convert_tokens_to_ids(["}", '"'])
    for _ in range(6):
        both = [matcher(grammars, each) for each in (given, meant)]
        token_id = 0
        for step in range(400 if to_end else DRAWN):
            own, other = (allowed(each) for each in both)
            if not to_end and any("max is 2000" in each.error for each in both):
                break
            assert own == other, tokenizer.convert_ids_to_tokens(set(own) ^ set(other))
            assert own, both[0].error
            if EOS in own and (len(own) == 1 or step > DRAWN):
                break
            others = [token_id for token_id in own if token_id != EOS]
            if step < DRAWN:
                token_id = rng.choice(others)
            elif token_id == brace and quote in own:  # in a string
                token_id = quote
            else:
                token_id = next((token_id for token_id in end_ids if token_id in own), others[0])
            is_complete, is_other_complete = (each.advance(token_id) for each in both)
            assert is_complete == is_other_complete
            if is_complete:
                break
        else:
            assert not to_end


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


# JSON schemas


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
    assert grammars._vocabulary is not None
    for text in (json.dumps(schema), f'{{"const": {"1" * 5000}}}'):
        assert finite_schemas.finite_schema(text, grammars._vocabulary.emptiness()) is text


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
    assert grammars._vocabulary is not None
    assert not finite_schemas.with_finite_parts(schema, grammars._vocabulary.emptiness())


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


# Grammars

ENDLESS_JSON = '%json {"type": "array", "items": {"$ref": "#"}, "minItems": 1}'


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ('start: "b" | "a" x\nx: "a" x', 'start: "b"'),
        ('start: "a" start | "b"\n', 'start: "a" start | "b"'),
        ('start: "a" (x | "b")? "c"\nx: "d" y\ny: "e" x | "f" y', 'start: "a" "b"? "c"'),
        ('start: "a" x? "c"\nx: "d" x', 'start: "a" "c"'),
        ('start: "a" [x] "c"\nx: "d" x', 'start: "a" "c"'),
        ('start: "a" x* "c" x{0,2} "d" x{,3} "e" x~0\nx: "d" x', 'start: "a" "c" "d" "e"'),
        ('start: "a" | "b" x{1,2} | "c" x{2} | "d" x{1,} | "e" x~2..3 | "f" x+\nx: "d" x', 'start: "a"'),
        ('?start: a\n  | "b" -> other\n!a: "a" x\n\n# x: "x"\n_y: "y"\nx: "d" x // "e"', 'start: "b"'),
        ('start: "a" B | "c"\nB: /b+/ & /c+/', 'start: "c"'),
        ('start: "a" B | "c"\nB: C & /c+/\nC: /b+/\n  | /d/', 'start: "c"'),
        ('start: "a" ~(/(?s:.*)/ | ~/(?s:.*)/) | "c"', 'start: "c"'),
        ('start: "a" ~A | "c"\nA: /(?s:.*)/ | ~/(?s:.*)/', 'start: "c"'),
        (r'start: "a" /[^\s\S]/ | "c"', 'start: "c"'),
        ('%import common.INT\nstart: "a" B | "c"\nB: INT & /a+/', 'start: "c"'),
        ('start: "a" B | "c"\nB: "x".."z" & "a".."c"', 'start: "c"'),
        ('start[capture]: a | b\na[capture="q", lazy]: /a+/\nb: "b" b', "start: a\na[lazy]: /a+/"),
        ('start: %json {"$ref": "#"} | "c"', 'start: "c"'),
        (
            'start: "a" %json {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}], "$defs": {"n": {"type": "array", '
            '"items": {"$ref": "#/$defs/n"}, "minItems": 1}}} "c"',
            'start: "a" "null" "c"',
        ),
        ('start: %lark {\n start: "a" | "b" x\n x: "c" x\n} "d"\nx: "e"', 'start: "a" "d"'),
        ('start: a "d"\na[temperature=0.5]: %lark {\n start: "a" | "b"\n}\nx: x', 'start: ("a" | "b") "d"'),
        (
            'start: "x" a\na[temperature=0.5]: %json {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}], "$defs": '
            '{"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}}\n\n# end\nb: "b"',
            'start: "x" "null"',
        ),
        ('start: a::0x1\na::_: "b" a::incr(_) %if lt(_, 3) | "c" %if ge(_, 3)', 'start: "b" "b" "c"'),
        ('root ::= "b" | "a" x\nx ::= "a" x', 'start: "b"'),
        ('start: "a" B? %json {"$ref": "#"}* "c"\nB: /b/ & /c/', 'start: "a" "c"'),
        ('start: x | y | "a" | x -> q\n | y | "b" | y // z\nx: x\ny: "c" x', 'start: "a" | "b"'),
        ('start: (x | y)? "a" (x | "b" | y)\nx: x\ny: "c" x', 'start: "a" "b"'),
        (f'start: "x" a "y" | "z"\na[temperature=0.5]: {ENDLESS_JSON}', 'start: "z"'),
        (f'start: "x" a? "y"\na[temperature=0.5]: {ENDLESS_JSON}', 'start: "x" "y"'),
        ('start: "x" a | "y"\na[lazy]: /a/ & /b/', 'start: "y"'),
        ('start: "x" a | "y"\na[max_tokens=5]: A\nA: /a/ & /b/', 'start: "y"'),
        ('start: "x" a | "y"\na[max_tokens=0]: A\nA: /a/ & /b/', 'start: "x" | "y"'),
        ('start: "x" a | "y"\na[suffix="c"]: /a/ B\nB: A & /b/\nA: /c/', 'start: "y"'),
        ('start: "x" a | "y"\na[temperature=0.5]: %lark {\n start: "a" | "b" b\n b: "c" b\n}', 'start: "x" "a" | "y"'),
        # What no answer comes to.
        ('start: "a"\nx: "b" x', 'start: "a"'),
    ],
)
def test_alternatives_without_a_finite_text_are_left_out(
    grammars: Grammars, tokenizer: Any, given: str, meant: str
) -> None:
    check_same(grammars, tokenizer, of_grammar(given), of_grammar(meant))


@pytest.mark.parametrize(
    "text",
    [
        'start: a::0x0 | "c"\na::_: x "b" %if lt(_, 3)\nx: "d" x',
        'start: a::0x0 | "c"\na::_: x "b" %if lt(_, 3)\nx: B\nB: /q/ & /r/',
        f'start: a::0x0 | "z"\na::_: "x" {ENDLESS_JSON} "y" %if lt(_, 3)',
        "%import common.INT -> int\nstart: int",
        '%import common.INT -> int\nstart: "x" int | "c"',
        '%import common (INT, WORD)\nstart: "x" INT WORD | "c"',
        'start: "x" <[1-3]> <[^4]>? | "c"',
    ],
)
def test_a_grammar_of_which_nothing_is_known_to_have_no_text_stays_as_it_is(grammars: Grammars, text: str) -> None:
    matcher(grammars, of_grammar(text))
    assert grammars._vocabulary is not None
    assert finite_grammars.finite_grammar(text, grammars._vocabulary.emptiness()) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('start: [x] y\nx: x\ny: "a" y', "none satisfies '[x] y': y can never be completed"),
        (f'start: "x" a "y"\na[temperature=0.5]: {ENDLESS_JSON}', "a can never be completed"),
        ('start: "a" start', "in rule 'start' none satisfies '\"a\" start': start can never be completed"),
        ('start: "a" x | y\nx: "b" x\ny: "c" (y | x)', "none satisfies '\"a\" x': x can never be completed"),
        ('start: "a" ("b" x)\nx: x', 'none satisfies \'"a" ("b" x)\': a part can never be completed'),
        ("start: A B\nA: /a/\nB: A & /b/", "none satisfies 'A B': B matches nothing"),
        ('start: "a" %json {"type": "array", "items": {"$ref": "#"}, "minItems": 1}', "its JSON schema has no"),
        ("root ::= x\nx ::= [0-9] x", "none satisfies 'x': x can never be completed"),
        ('start: "' + 100 * "a" + '" start', "a…': start can never be completed"),
    ],
)
def test_a_grammar_without_a_finite_text_is_refused(grammars: Grammars, text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        matcher(grammars, of_grammar(text))
    assert "no finite text satisfies the grammar" in str(raised.value)
    assert message in str(raised.value)


# A piece of a drawn grammar: a letter, a rule by its number, or alternatives with a sign for their repetition.
Piece = str | int | tuple[list[list[Any]], str]


def drawn_alternatives(rng: random.Random, num_rules: int, depth: int = 0) -> list[list[Piece]]:
    def piece() -> Piece:
        kind = rng.random()
        if kind < 0.15 and depth < 2:
            return drawn_alternatives(rng, num_rules, depth + 1), rng.choice(["?", "*", "+", ""])
        return rng.randrange(num_rules) if kind < 0.65 else rng.choice("abcd")

    return [[piece() for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 3))]


def written(alternatives: list[list[Piece]], finite: set[int] | None) -> str:
    """Returns the alternatives in Lark; with ``finite`` only those that these rules complete."""

    def is_finite(alternative: list[Piece]) -> bool:
        return finite is None or all(completes(piece, finite) for piece in alternative)

    def of_piece(piece: Piece) -> str:
        if isinstance(piece, tuple):
            inner, sign = piece
            return f"({written(inner, finite)}){sign}"
        return f"r{piece}" if isinstance(piece, int) else f'"{piece}"'

    return " | ".join(" ".join(map(of_piece, each)) for each in alternatives if is_finite(each)) or '""'


def completes(piece: Piece, finite: set[int]) -> bool:
    if isinstance(piece, int):
        return piece in finite
    if isinstance(piece, str):
        return True
    inner, sign = piece
    return sign in ("?", "*") or any(all(completes(each, finite) for each in own) for own in inner)


@pytest.mark.parametrize("seed", range(60))
def test_drawn_grammars_allow_what_their_finite_rules_allow(grammars: Grammars, tokenizer: Any, seed: int) -> None:
    rng = random.Random(seed)
    rules = [drawn_alternatives(rng, 5) for _ in range(5)]
    finite: set[int] = set()
    for _ in rules:
        finite |= {number for number, own in enumerate(rules) if completes((own, ""), finite)}

    def text(own: set[int] | None) -> str:
        numbers = [number for number in range(len(rules)) if own is None or number in own]
        return "\n".join(["start: r0", *(f"r{number}: {written(rules[number], own)}" for number in numbers)])

    if 0 not in finite:
        with pytest.raises(InvalidArgumentError):
            matcher(grammars, of_grammar(text(None)))
        return
    check_same(grammars, tokenizer, of_grammar(text(None)), of_grammar(text(finite)), seed, to_end=False)


@pytest.mark.parametrize(
    "text",
    ["start: $", "start: %what", "start: (", 'start: "a"{x}', "start: )", "start[capture", "start: ~(A", "%declare A"],
)
def test_what_the_reader_does_not_know_is_left_to_the_library(grammars: Grammars, text: str) -> None:
    with pytest.raises(UnreadableError):
        read_lark(text)
    grammars.prepare()
    assert grammars._vocabulary is not None
    assert finite_grammars.finite_grammar(text, grammars._vocabulary.emptiness()) is text


# Size


def test_a_format_may_lead_from_one_part_to_the_next_thousands_of_times(grammars: Grammars) -> None:
    """The library recurses. On a usual stack 4,000 rules or 900 objects ended the process."""
    rules = "".join(f"\nr{number}: r{number + 1}" for number in range(12_000))
    matcher(grammars, of_grammar(f'start: r0{rules}\nr12000: "x"'))
    definitions = {f"{number}": {"prefixItems": [{"$ref": f"#/$defs/{number + 1}"}]} for number in range(3_000)}
    matcher(grammars, of_schema({"$ref": "#/$defs/0", "$defs": definitions | {"3000": NULL}}))


def test_what_takes_long_to_look_at_stays_as_it_is(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars.prepare()
    assert grammars._vocabulary is not None
    emptiness = grammars._vocabulary.emptiness()
    schema = with_endless({"anyOf": [TO_ENDLESS, NULL]})
    many = {f"{number}": CLOSED | {"properties": {"a": {}}, "patternProperties": {"^a$": NULL}} for number in range(3)}
    objects = {"type": "object", "properties": many}
    monkeypatch.setattr(finite_schemas, "_MOST_WORK", 5)
    monkeypatch.setattr(finite_schemas, "_MOST_TRIED", 2)
    assert json.loads(finite_schemas.finite_schema(json.dumps(schema), emptiness)) == schema
    left = json.loads(finite_schemas.finite_schema(json.dumps(objects), emptiness))["properties"].values()
    assert sorted(len(each["patternProperties"]) for each in left) == [0, 0, 1]
    monkeypatch.setattr(finite_grammars, "_MOST_TRIED", 1)
    text = "start: A | B\nA: /a/ & /b/\nB: /c/ & /d/"
    assert finite_grammars.finite_grammar(text, emptiness) == "start: B\nA: /a/ & /b/\nB: /c/ & /d/"


def test_terminals_beyond_the_library_s_limits_count_as_having_a_text(grammars: Grammars) -> None:
    grammars.prepare()
    assert grammars._vocabulary is not None
    long = "(" + "|".join(f"a{{1,{number}}}b{number}" for number in range(1, 300)) + "){1,90}"
    assert grammars._vocabulary.emptiness().empty_terminals("", [f"/{long}/ & /[^c]*c/", "/a/ & /b/"]) in (set(), {1})
    assert grammars._vocabulary.emptiness().empty_terminals("", ["/a/ & /b/", "/a/", "NOT-DEFINED"]) == set()
    assert list(chain(grammars._vocabulary.emptiness().empty_terminals("A: /a/", ["A & /b/", "A & /[ab]/"]))) == [0]
