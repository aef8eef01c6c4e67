"""Recipe expressions: arithmetic over the keys of a checkpoint's ``config.json``, in Jinja's expression syntax.

Jinja only parses; it never compiles or evaluates. Its syntax tree is checked once against an allow-list and is then
walked by the code below, which looks only into JSON values. So an expression cannot run code, and every size is
bounded: the text, its nesting, the integers that it makes. Nothing repeats or joins strings or lists.

A missing key is an error unless the expression provides a value for it, in one of three forms:

- ``x | default(v)``: ``v`` if ``x`` is absent (a JSON ``null`` stays ``None``);
- ``x | otherwise(v)``: ``v`` if ``x`` is absent, null, or a mapping without keys;
- ``first('a.b', 'c', v)``: the first of these paths that is present, else ``v``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.parser import Parser

from fastgen.models.recipe.expression_grammar import (
    ARITHMETIC,
    FUNCTIONS,
    MAX_INTEGER,
    MAX_ITEMS,
    MAX_LENGTH,
    ORDER,
    ExpressionError,
    Path,
    Value,
    bounded,
    check,
    check_tokens,
    first_arguments,
    mentioned,
)
from fastgen.models.recipe.spelling import close_to

_JINJA: Final = Environment(autoescape=False)  # only for its lexer and parser


@dataclass(frozen=True)
class Scope:
    """The values of names: those in ``names`` first, then the keys of ``config``. ``config_file`` is for messages."""

    config: Mapping[str, Value]
    names: Mapping[str, Value] = field(default_factory=dict)
    config_file: str = "config.json"

    def with_names(self, **names: Value) -> Scope:
        return Scope(self.config, {**self.names, **names}, self.config_file)


@dataclass(frozen=True, eq=False)
class Expression:
    """A parsed and checked expression. ``paths`` are all names that it mentions, in every branch of a condition."""

    text: str
    node: nodes.Expr
    paths: frozenset[Path]

    def evaluate(self, scope: Scope) -> Value:
        """Returns the expression's value, a JSON value. Raises :class:`ExpressionError`."""
        return _Evaluator(scope).value(self.node)

    def is_constant(self, value: bool | None) -> bool:
        return isinstance(self.node, nodes.Const) and self.node.value is value

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


def constant(value: bool | int | float | None) -> Expression:
    """Returns an expression whose value is ``value``."""
    node = nodes.Const(value)
    check(node, 0)
    return Expression(str(value), node, frozenset())


@lru_cache(maxsize=4096)  # variants repeat the expressions of what they extend
def parse_expression(text: str) -> Expression:
    """Parses ``text`` and checks it against the allow-list. Raises :class:`ExpressionError`."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression may have {MAX_LENGTH} characters, this one has {len(text)}")
    if not text.isascii() or not text.isprintable():
        raise ExpressionError(f"an expression must be ASCII text on one line: {text!r}")
    try:
        check_tokens(token.type for token in _JINJA.lexer.tokenize(text, state="variable"))
        parser = Parser(_JINJA, text, state="variable")
        node = parser.parse_expression()
        if not parser.stream.eos:
            raise ExpressionError(f"{text!r} has extra text after the expression, at {str(parser.stream.current)!r}")
    except TemplateSyntaxError as error:
        raise ExpressionError(f"{text!r} is not an expression: {_problem(text, error)}") from None
    check(node, 0)
    return Expression(text, node, frozenset(mentioned(node)))


def _problem(text: str, error: TemplateSyntaxError) -> str:
    message = error.message or "malformed"
    if "end of template" not in message:
        return message
    expected = re.search(r", expected '(.+)'", message)
    last = re.findall(r"\w+|\W", text)[-1:]
    where = f"it ends after {last[0]!r}" if last else "it is empty"
    return f"{where}, but {expected[1]!r} is expected there" if expected else where


@dataclass(frozen=True)
class _Absent:
    """The result of a lookup that found nothing: ``what`` is missing, ``known`` are the names that exist instead."""

    what: str
    key: str = ""
    known: Collection[str] = ()
    advice: str = ""

    def message(self, config_file: str) -> str:
        return f"{config_file} has {self.what}{close_to(self.key, self.known)}{self.advice}"


class _Evaluator:
    """Evaluates a checked tree. Every method returns JSON values; only a bool can be a condition."""

    def __init__(self, scope: Scope):
        self.scope = scope

    def value(self, node: nodes.Node) -> Value:
        found = self.find(node)
        if isinstance(found, _Absent):
            raise ExpressionError(found.message(self.scope.config_file))
        return found

    def find(self, node: nodes.Node) -> Value | _Absent:
        """Returns what :meth:`value` returns, but an :class:`_Absent` for a missing key, which may have a default."""
        match node:
            case nodes.Const(value=value):
                return value
            case nodes.Name(name=name):
                return self.root(name)
            case nodes.Getattr(node=inner, attr=name):
                return self.member(self.find(inner), name, _spelling(node))
            case nodes.Getitem(node=inner, arg=arg):
                found = self.find(inner)
                return self.member(found, self.value(arg), _spelling(node))
            case nodes.Filter(node=nodes.Expr() as inner, name=name, args=[fallback]):
                found = self.find(inner)
                if isinstance(found, _Absent) or (name == "otherwise" and (found is None or found == {})):
                    return self.find(fallback)
                return found
            case nodes.Call(node=nodes.Name(name="first")):
                return self.first(node)
            case nodes.Call(node=nodes.Name(name=name), args=args):
                return self.call(name, [self.value(arg) for arg in args])
            case nodes.CondExpr(test=test, expr1=chosen, expr2=nodes.Expr() as other):
                return self.find(chosen if self.truth(test) else other)
            case nodes.And(left=left, right=right):
                return self.truth(left) and self.truth(right)
            case nodes.Or(left=left, right=right):
                return self.truth(left) or self.truth(right)
            case nodes.Not(node=inner):
                return not self.truth(inner)
            case nodes.Neg(node=inner):
                return bounded(-_number(self.value(inner), "-"))
            case nodes.Pos(node=inner):
                return _number(self.value(inner), "+")
            case nodes.Compare():
                return self.compare(node)
            case nodes.List(items=items):
                return [self.value(item) for item in items]
            case nodes.BinExpr(left=left, right=right):
                sign, apply = ARITHMETIC[type(node)]
                return _compute(sign, apply, [self.value(left), self.value(right)])
        raise AssertionError(f"{type(node).__name__} passed the check but has no meaning")

    def root(self, name: str) -> Value | _Absent:
        if name in self.scope.names:
            return self.scope.names[name]
        if name in self.scope.config:
            return self.scope.config[name]
        if name == "layer":
            return _Absent(f"no key {name!r}", advice="; `layer` exists only inside model.layers")
        known = [*self.scope.names, *self.scope.config]
        advice = " (give it a value with `| default(...)`; put a text in quotes)"
        return _Absent(f"no key {name!r}", name, known, advice)

    def member(self, found: Value | _Absent, key: Value, spelling: str) -> Value | _Absent:
        """Returns ``found[key]``. Below an absent or null mapping everything is absent."""
        if isinstance(found, _Absent):
            return found
        if found is None:
            return _Absent(f"no {spelling}: the value that contains it is null")
        if isinstance(found, list) and isinstance(key, int) and not isinstance(key, bool):
            if 0 <= key < len(found):
                return found[key]
            raise ExpressionError(f"{spelling}: index {key} is out of range for a list of {len(found)}")
        if isinstance(found, dict) and isinstance(key, str):
            if key in found:
                return found[key]
            return _Absent(f"no {spelling}", key, found)
        raise ExpressionError(f"{spelling}: {_kind(found)} cannot be indexed by {_kind(key)}")

    def first(self, node: nodes.Call) -> Value | _Absent:
        paths, fallback = first_arguments(node)
        for path in paths:
            found = self.root(path[0])
            for depth, name in enumerate(path[1:], start=2):
                found = self.member(found, name, ".".join(path[:depth]))
            if not isinstance(found, _Absent):
                return found
        if fallback is not None:
            return self.find(fallback)
        return _Absent(f"none of {', '.join(repr('.'.join(path)) for path in paths)}")

    def call(self, name: str, arguments: list[Value]) -> Value:
        return _compute(name, FUNCTIONS[name][2], arguments)

    def truth(self, node: nodes.Node) -> bool:
        value = self.value(node)
        if not isinstance(value, bool):
            raise ExpressionError(f"a condition must be true or false, not {_kind(value)}")
        return value

    def compare(self, node: nodes.Compare) -> bool:
        left = self.value(node.expr)
        for operand in node.ops:
            right = self.value(operand.expr)
            if not self.holds(operand.op, left, right):
                return False
            left = right
        return True

    @staticmethod
    def holds(op: str, left: Value, right: Value) -> bool:
        if op in ("eq", "ne"):
            return _same(left, right) == (op == "eq")
        if op in ("in", "notin"):
            if not isinstance(right, list | dict):
                raise ExpressionError(f"`in` searches a list or a mapping, not {_kind(right)}")
            if len(right) > MAX_ITEMS:
                raise ExpressionError(f"`in` searches at most {MAX_ITEMS:,} items, but there are {len(right):,}")
            return any(_same(left, item) for item in right) == (op == "in")
        sign, apply = ORDER[op]
        return apply(_number(left, sign), _number(right, sign))


def _compute(sign: str, apply: Callable[..., Value], operands: list[Value]) -> Value:
    """Applies ``apply`` to numbers and returns a bounded number."""
    try:
        return bounded(apply(*(_number(operand, sign) for operand in operands)))
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except (OverflowError, ValueError) as error:
        if isinstance(error, ExpressionError):
            raise
        raise ExpressionError(f"{sign} of {', '.join(map(str, operands))} has no value: {error}") from None


def _number(value: Value, sign: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExpressionError(f"{sign} works on numbers, not on {_kind(value)}")
    bounded(value)
    return value


def _same(a: Value, b: Value) -> bool:
    """Compares as JSON does: ``true`` is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _kind(value: Value) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {value[:40]!r}"
        case int():
            return f"the number {value}" if abs(value) < MAX_INTEGER else "an integer beyond 64 bits"
        case float():
            return f"the number {value:.15g}"
        case list():
            return "a list"
    return "a mapping"


def _spelling(node: nodes.Node) -> str:
    """Returns a chain of lookups as it is written in the recipe, for messages."""
    match node:
        case nodes.Name(name=name):
            return name
        case nodes.Getattr(node=inner, attr=name):
            return f"{_spelling(inner)}.{name}"
        case nodes.Getitem(node=inner, arg=arg):
            return f"{_spelling(inner)}[{_spelling(arg)}]"
        case nodes.Const(value=value):
            return repr(value)
    return "…"
