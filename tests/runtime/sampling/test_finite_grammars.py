"""Grammars with alternatives that no finite text satisfies allow the same tokens as grammars without these. What has a
finite text is decided here on the drawn rules themselves, or written by hand.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.sampling.finite import grammar as finite_grammars
from fastgen.runtime.sampling.finite.lark import UnreadableError, read_lark
from fastgen.runtime.sampling.structured_output import Grammars
from tests.runtime.sampling.matching_tokens import matcher
from tests.runtime.sampling.same_masks import check_same, emptiness_of, of_grammar

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
    assert finite_grammars.finite_grammar(text, emptiness_of(grammars)) == text


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
        ("start[max_tokens=5]: A\nA: /a/ & /b/", "none satisfies 'A': A matches nothing"),
        ('start[stop="x"]: A\nA: /a/ & /b/', "none satisfies 'A': A matches nothing"),
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
    assert finite_grammars.finite_grammar(text, emptiness_of(grammars)) is text


def test_terminals_beyond_a_number_are_not_tried(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite_grammars, "_MOST_TRIED", 1)
    text = "start: A | B\nA: /a/ & /b/\nB: /c/ & /d/"
    assert finite_grammars.finite_grammar(text, emptiness_of(grammars)) == "start: B\nA: /a/ & /b/\nB: /c/ & /d/"


def test_terminals_beyond_the_library_s_limits_count_as_having_a_text(grammars: Grammars) -> None:
    long = "(" + "|".join(f"a{{1,{number}}}b{number}" for number in range(1, 300)) + "){1,90}"
    assert emptiness_of(grammars).empty_terminals("", [f"/{long}/ & /[^c]*c/", "/a/ & /b/"]) == set()
    assert emptiness_of(grammars).empty_terminals("", ["/a/ & /b/", "/a/", "NOT-DEFINED"]) == set()
    assert emptiness_of(grammars).empty_terminals("A: /a/", ["A & /b/", "A & /[ab]/"]) == {0}


def test_a_rule_may_lead_to_the_next_thousands_of_times(grammars: Grammars) -> None:
    """The library recurses. On a usual stack 4,000 rules ended the process."""
    rules = "".join(f"\nr{number}: r{number + 1}" for number in range(12_000))
    matcher(grammars, of_grammar(f'start: r0{rules}\nr12000: "x"'))
