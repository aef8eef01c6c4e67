"""Recipe expressions: their values, and that hostile ones are refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.models.recipe.expression_grammar import ExpressionError
from fastgen.models.recipe.expressions import Scope, constant, parse_expression

CONFIG: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "eps": 1e-5,
    "flag": True,
    "off": False,
    "nothing": None,
    "empty": {},
    "act": "silu",
    "rope": {"theta": 5e5, "inner": {"kind": "yarn"}, "null": None},
    "kinds": ["full", "window", "full"],
}


def evaluate(text: str, names: dict[str, Any] | None = None, config: dict[str, Any] | None = None) -> Any:
    return parse_expression(text).evaluate(Scope(CONFIG if config is None else config, names or {}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("hidden_size", 4096),
        ("  hidden_size\n", 4096),
        ("hidden_size + 2 - 1", 4097),
        ("hidden_size * 2 + 1", 8193),
        ("1 + hidden_size * 2", 8193),
        ("hidden_size // 3", 1365),
        ("hidden_size % 3", 1),
        ("hidden_size / num_attention_heads", 128),
        ("hidden_size / 3", 4096 / 3),
        ("-hidden_size", -4096),
        ("+eps", 1e-5),
        ("(1 + 2) * 3", 9),
        ("1e-5", 1e-5),
        ("1_000", 1000),
        ("true", True),
        ("none", None),
        ("'silu'", "silu"),
        ("act == 'silu'", True),
        ('act != "silu"', False),
        ("1 < 2 <= 2", True),
        ("1 < 2 > 3", False),
        ("hidden_size == 4096.0", True),
        ("flag == 1", False),  # true is not a number in JSON
        ("nothing == none", True),
        ("act in ['relu', 'silu']", True),
        ("act not in ['relu']", True),
        ("'theta' in rope", True),
        ("1 in [true]", False),
        ("not off and flag", True),
        ("off or flag", True),
        ("off and nonsense", False),  # the right side is not evaluated
        ("1 if flag else nonsense", 1),
        ("1 if off else 2 if off else 3", 3),
        ("rope.theta", 5e5),
        ("rope.inner.kind", "yarn"),
        ("rope['inner']['kind']", "yarn"),
        ("kinds[1]", "window"),
        ("kinds.2", "full"),
        ("kinds[layer]", "window"),
        ("rope[act | default('x') if off else 'theta']", 5e5),
        ("min(3, 2, 5)", 2),
        ("max(hidden_size, 1.5)", 4096),
        ("sqrt(16)", 4.0),
        ("int(7 / 2)", 3),
        ("nonsense | default(7)", 7),
        ("nothing | default(7)", None),
        ("nonsense | otherwise(7)", 7),
        ("nothing | otherwise(7)", 7),
        ("off | otherwise(true)", False),
        ("0 | otherwise(7)", 0),
        ("nonsense | otherwise(nothing) | otherwise(3)", 3),
        ("nonsense | default(nonsense2) | default(3)", 3),
        ("nonsense | default(nothing) | default(3)", None),
        ("rope.nonsense | default(1)", 1),
        ("rope.nonsense.deeper | default(1)", 1),
        ("nothing.deeper | default(1)", 1),
        ("rope.null.deeper | otherwise(1)", 1),
        ("empty | otherwise(1)", 1),
        ("empty | default(1)", {}),
        ("[] | otherwise(1)", []),
        ("(nonsense if flag else act) | default(4)", 4),
        ("first('rope.theta', 'theta', 10000)", 5e5),
        ("first('theta', 'rope.theta', 10000)", 5e5),
        ("first('theta', 'nothing.theta', 10000)", 10000),
        ("first('nothing', 'rope')", None),
        ("first('a', hidden_size + 1)", 4097),
        ("first('a', 'b') | default('text')", "text"),
        ("first('a', none)", None),
    ],
)
def test_meaning(text: str, value: Any) -> None:
    found = evaluate(text, {"layer": 1})
    assert found == value
    assert type(found) is type(value)


def test_the_recipes_own_names_come_first() -> None:
    assert evaluate("hidden_size", {"hidden_size": 7}) == 7
    assert evaluate("first('hidden_size', 1)", {"hidden_size": 7}) == 7
    assert evaluate("num_attention_heads", {"hidden_size": 7}) == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden_size", "no key 'hiden_size'; did you mean 'hidden_size'?"),
        ("nonsense | default(other)", "no key 'other'"),
        ("rope.thetta", "no rope.thetta; did you mean 'theta'?"),
        ("nothing.theta", "no nothing.theta"),
        ("first('a.b', 'c')", "none of 'a.b', 'c'"),
        ("(nonsense + 1) | default(3)", "no key 'nonsense'"),  # `default` applies to a key, not to a typo inside a sum
        ("kinds[3]", "out of range for a list of 3"),
        ("kinds[-1]", "out of range for a list of 3"),
        ("kinds['a']", "a list cannot be indexed"),
        ("act.upper", "cannot be indexed"),
        ("hidden_size.real", "cannot be indexed"),
        ("kinds[true]", "cannot be indexed"),
        ("act + 1", r"\+ works on numbers, not on the text 'silu'"),
        ("'a' + 'b'", "works on numbers"),
        ("flag + 1", "works on numbers, not on true"),
        ("nothing * 2", "works on numbers, not on null"),
        ("kinds * 3", "works on numbers, not on a list"),
        ("act * 1000000", "works on numbers"),
        ("act % 3", "works on numbers"),
        ("-act", "works on numbers"),
        ("min('a', 'b')", "works on numbers"),
        ("act < 'b'", "works on numbers"),
        ("1 if hidden_size else 2", "must be true or false"),
        ("not nothing", "must be true or false"),
        ("hidden_size and flag", "must be true or false"),
        ("'s' in act", "searches a list or a mapping"),
        ("1 / 0", "division by zero"),
        ("1 // 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("sqrt(-1)", "no value"),
        ("9223372036854775807 + 1", "beyond 64 bits"),
        ("9223372036854775807 * 9223372036854775807", "beyond 64 bits"),
        ("1e308 * 10", "not finite"),
        ("int(1e300)", "beyond 64 bits"),
    ],
)
def test_what_has_no_value(text: str, message: str) -> None:
    expression = parse_expression(text)
    with pytest.raises(ExpressionError, match=message):
        expression.evaluate(Scope(CONFIG))


@pytest.mark.parametrize(
    "value", [10**40, -(10**40), 10**5000, math.inf, math.nan], ids=["large", "negative", "huge", "infinite", "nan"]
)
@pytest.mark.parametrize("text", ["x + 1", "-x", "x // 7", "min(x, 2)", "1 if x else 2", "x < 3"])
def test_numbers_of_a_configuration_are_bounded_when_used(text: str, value: Any) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text, config={"x": value})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 2**63])
def test_literals_are_bounded(value: float) -> None:
    with pytest.raises(ExpressionError):
        constant(value)


HOSTILE = [
    *("''.__class__", "x.__init__", "x['y'].__class__.__mro__", "().__class__", "[].__class__.__base__"),
    *("x|attr('__class__')", "x|map('upper')", "x|format(1)", "'%s'|format(x)", "'{0.__class__}'.format(x)"),
    *("x.format(y)", "x.upper()", "''.join(x)", "x()", "x()()", "x.y.z(1)", "(x)(1)", "x[0](1)", "first('a')()"),
    *("range(10**9)", "range(1000000000)", "dict(a=1)", "lipsum()", "cycler(1)", "joiner()", "namespace()"),
    *("open('f')", "eval('1')", "__import__('os')", "self.__init__", "loop.x.__y"),
    *("2**100000", "2**2**2**2", "9**9**9", "-2**9", "x**y"),
    *("1 if x", "x is defined", "x is sameas none", "x is not none", "x ~ y", "'a' ~ 'b'", "{'a': 1}", "{}", "(1, 2)"),
    *("x[1:2]", "x[::2]", "x[:]", "x[1, 2]", "x, y", "x = 1", "x := 1", "lambda: 1", "lambda x: x", "[x for x in y]"),
    *("{{ x }}", "x }} {{ y", "x %} {% set y = 1", "{% for x in y %}{% endfor %}", "{# x #}", "x {# y #}", "# x"),
    *(
        "",
        " ",
        "()",
        "[",
        ")",
        "x y",
        "x,",
        "1 +",
        "* 1",
        "x.",
        ".x",
        "x..y",
        "x[",
        "x]",
        "x[]",
        "'a",
        '"',
        "`x`",
        "x;y",
    ),
    *("default(1)", "|default(1)", "x|default", "x|default()", "x|default(1, 2)", "x|default(value=1)", "x|d(1)"),
    *("x|default(*y)", "x|default(**y)", "min()", "min(1)", "min(*x)", "min(1, key=2)", "sqrt(1, 2)", "sqrt(*x)"),
    *(
        "first()",
        "first(1)",
        "first(x)",
        "first('')",
        "first('a.')",
        "first('.a')",
        "first('a b')",
        "first('a', x, 'b')",
    ),
    *(
        "first('a', x, 'b')",
        "first('a', 1, 2)",
        "first('__class__')",
        "first('a.__class__')",
        "first('a[0]')",
        "first(*x)",
    ),
    *("_('x')", "x.__y__", "__x", "x|__y", "x.y|length", "x|length", "x|int", "super()", "caller()", "varargs()"),
    "\N{FULLWIDTH LATIN SMALL LETTER X}",
    "x\N{ZERO WIDTH SPACE}",
    "\N{CYRILLIC SMALL LETTER A}",
    "1\N{NO-BREAK SPACE}+ 1",
    "x\ny",
    "x\0",
    "'\ud800'",
    "\N{RIGHT-TO-LEFT OVERRIDE}x",
    "1" * 400,
    "9" * 30,
    "1e999",
    "-1e999",
    "0x" + "f" * 100,
]
HOSTILE += [
    before * count + "x" + after * count
    for before, after in [
        ("(", ")"), ("[", "]"), ("{", "}"), ("-", ""), ("- ", ""), ("+", ""), ("not ", ""), ("(not ", ")"), ("(-", ")"),
        ("x[", "]"), ("min(1,", ")"), ("x|default(", ")"), ("", "|default(1)"), ("", ".x"), ("", "[0]"), ("", "+x"),
        ("", " if x else x"), ("x if x else (", ")"), ("x and ", ""), ("", "()"), ("~", ""), ("'a'", ""),
    ]
    for count in (60, 300, 100_000)
]  # fmt: skip
HOSTILE += ["(" * 100_000, "[" * 1000, "-" * 1000, "'" * 100_001, "\\" * 500, "x." * 499, "{" * 900]


@pytest.mark.parametrize("text", HOSTILE, ids=[f"{index}-{text[:12]!a}" for index, text in enumerate(HOSTILE)])
def test_hostile_text_is_refused_before_anything_is_evaluated(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(text)


def test_depth_is_refused_on_a_deep_stack_too() -> None:
    def deep(frames: int) -> None:
        if frames:
            deep(frames - 1)
        else:
            with pytest.raises(ExpressionError):
                parse_expression("(" * 400 + "x" + ")" * 400)

    deep(500)


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("a", ["a"]),
        ("a.b.c", ["a.b.c"]),
        ("a['b'].c", ["a.b.c"]),
        ("a[layer].c", ["a", "layer"]),
        ("a.b[c.d].e", ["a.b", "c.d"]),
        ("first('a.b', 'c', d)", ["a.b", "c", "d"]),
        ("a if b else c", ["a", "b", "c"]),
        ("a | default(b) | otherwise(c.d)", ["a", "b", "c.d"]),
        ("min(a, sqrt(b)) + 1", ["a", "b"]),
        ("a in ['b', c]", ["a", "c"]),
        ("a < b < c", ["a", "b", "c"]),
        ("[a, b][0].c", ["a", "b"]),
        ("not (a and -b)", ["a", "b"]),
        ("'a'", []),
    ],
)
def test_mentioned_paths(text: str, paths: list[str]) -> None:
    assert sorted(".".join(path) for path in parse_expression(text).paths) == paths


ALPHABET = [
    *"ab01.,'\"()[]{}|+-*/%<>=!~ _:#",
    *(
        " if ",
        " else ",
        " not ",
        " in ",
        " is ",
        "first",
        "min",
        "default",
        "__",
        "**",
        "{{",
        "}}",
        "{%",
        "1e9",
        "true",
    ),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=500, deadline=None)
@given(
    text=st.lists(st.sampled_from(ALPHABET), max_size=24).map("".join) | st.text(max_size=12),
    config=st.dictionaries(st.sampled_from("ab"), json_values, max_size=2),
)
def test_any_text_is_a_json_value_or_one_kind_of_error(text: str, config: dict[str, Any]) -> None:
    before = json.dumps(config)
    try:
        found = parse_expression(text).evaluate(Scope(config))
    except ExpressionError:
        pass
    else:
        json.dumps(found)  # raises for anything that is not JSON
    assert json.dumps(config) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a +", "'a +' is not an expression: it ends after '+'"),
        ("a if b else", "it ends after 'else'"),
        ("min(1", "it ends after '1', but ',' is expected there"),
        ("(a", "it ends after 'a', but ')' is expected there"),
        ("a |", "it ends after '|', but 'name' is expected there"),
        (" ", "it is empty"),
    ],
)
def test_an_expression_that_ends_too_early(text: str, message: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse_expression(text)
    assert str(caught.value).endswith(message)
