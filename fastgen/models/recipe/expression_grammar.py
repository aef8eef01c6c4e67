"""The grammar of recipe expressions, checked on Jinja's syntax tree before anything is evaluated.

It consists of an allow-list of nodes and functions and of bounds on every size. This module also finds the names that
an expression mentions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from jinja2 import nodes

from fastgen.errors import FastgenError
from fastgen.models.recipe.spelling import close_to

# A JSON value: ``None``, bool, int, float, str, list or dict with string keys.
Value = Any

# A path into ``config.json``: ``("rope_parameters", "rope_theta")``.
Path = tuple[str, ...]

MAX_LENGTH: Final = 1000
MAX_TOKENS: Final = 200
MAX_BRACKETS: Final = 12
MAX_DEPTH: Final = 40
MAX_INTEGER: Final = 2**63
MAX_ITEMS: Final = 10_000


class ExpressionError(FastgenError, ValueError):
    """An expression is malformed, uses what is not allowed, or does not fit the configuration."""


_OPENING: Final = frozenset({"lparen", "lbracket", "lbrace"})
_CLOSING: Final = frozenset({"rparen", "rbracket", "rbrace"})


def check_tokens(types: Iterator[str]) -> None:
    """Refuses tokens that would make Jinja's recursive parser recurse deeply, before it starts."""
    depth = 0
    for count, kind in enumerate(types, start=1):
        depth += (kind in _OPENING) - (kind in _CLOSING)
        if depth > MAX_BRACKETS:
            raise ExpressionError(f"brackets are nested deeper than {MAX_BRACKETS}")
        if count > MAX_TOKENS:
            raise ExpressionError(f"the expression has more than {MAX_TOKENS} parts")


def _add(a: Value, b: Value) -> Value:
    return a + b


def _divide(a: Value, b: Value) -> Value:
    """Returns an integer if two integers divide exactly, so that a head size that is not an integer is noticed."""
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return a / b


ARITHMETIC: Final[dict[type[nodes.Expr], tuple[str, Callable[[Value, Value], Value]]]] = {
    nodes.Add: ("+", _add),
    nodes.Sub: ("-", lambda a, b: a - b),
    nodes.Mul: ("*", lambda a, b: a * b),
    nodes.Div: ("/", _divide),
    nodes.FloorDiv: ("//", lambda a, b: a // b),
    nodes.Mod: ("%", lambda a, b: a % b),
}
ORDER: Final[dict[str, tuple[str, Callable[[Value, Value], bool]]]] = {
    "lt": ("<", lambda a, b: a < b),
    "lteq": ("<=", lambda a, b: a <= b),
    "gt": (">", lambda a, b: a > b),
    "gteq": (">=", lambda a, b: a >= b),
}
FUNCTIONS: Final[dict[str, tuple[int, int, Callable[..., Value]]]] = {  # name: fewest and most arguments, function
    "min": (2, 16, min),
    "max": (2, 16, max),
    "sqrt": (1, 1, math.sqrt),
    "log": (1, 1, math.log),
    "int": (1, 1, int),
}
_FILTERS: Final = ("default", "otherwise")


def check(node: nodes.Node, depth: int) -> None:
    """Refuses every construct that the evaluator does not know. Raises :class:`ExpressionError`."""
    if depth > MAX_DEPTH:
        raise ExpressionError(f"the expression is nested deeper than {MAX_DEPTH}")
    match node:
        case nodes.Const(value=value):
            bounded(value)
        case nodes.Name(name=name) | nodes.Getattr(attr=name):
            if name.startswith("__"):
                raise ExpressionError(f"{name!r} is not allowed as the name of a key")
        case nodes.Getitem(arg=nodes.Slice()):
            raise ExpressionError("slices are not allowed in an expression")
        case nodes.Call(node=nodes.Name(name="first")):
            _check_first(node)
        case nodes.Call(node=nodes.Name(name=name)):
            if name not in FUNCTIONS:
                raise ExpressionError(f"unknown function {name!r}{close_to(name, (*FUNCTIONS, 'first'))}")
            fewest, most, _ = FUNCTIONS[name]
            _check_arguments(name, node, fewest, most)
        case nodes.Call():
            raise ExpressionError("only the functions of the recipe language can be called, not methods of values")
        case nodes.Filter(name=name):
            if name not in _FILTERS or node.node is None:
                raise ExpressionError(f"unknown filter {name!r}{close_to(name, _FILTERS)}")
            _check_arguments(name, node, 1, 1)
        case nodes.Pow():
            raise ExpressionError("powers (**) are not allowed in an expression")
        case nodes.Getitem() | nodes.Compare() | nodes.Operand() | nodes.List() | nodes.CondExpr(expr2=nodes.Expr()):
            pass
        case nodes.And() | nodes.Or() | nodes.Not() | nodes.Neg() | nodes.Pos():
            pass
        case nodes.CondExpr():
            raise ExpressionError("a condition needs an `else`")
        case _ if type(node) not in ARITHMETIC:
            raise ExpressionError(f"{type(node).__name__} is not allowed in an expression")
    for child in node.iter_child_nodes():
        if not (isinstance(node, nodes.Call) and child is node.node):  # the name of a function is not a key
            check(child, depth + 1)


def _check_arguments(name: str, node: nodes.Call | nodes.Filter, fewest: int, most: int) -> None:
    if node.kwargs or node.dyn_args is not None or node.dyn_kwargs is not None:
        raise ExpressionError(f"{name} takes its arguments by position only")
    if not fewest <= len(node.args) <= most:
        wanted = str(fewest) if fewest == most else f"{fewest} to {most}"
        raise ExpressionError(f"{name} takes {wanted} argument{'s' if most > 1 else ''}, not {len(node.args)}")


def _check_first(node: nodes.Call) -> None:
    _check_arguments("first", node, 1, 16)
    paths, fallback = first_arguments(node)
    if not paths or len(paths) + (fallback is not None) != len(node.args):
        raise ExpressionError("first takes quoted paths, as in first('a.b', 'c'), and then at most one value")
    for path in paths:
        for name in path:
            if not name.isidentifier() or name.startswith("__"):
                raise ExpressionError(f"{'.'.join(path)!r} is not a path into the configuration")


def first_arguments(node: nodes.Call) -> tuple[list[Path], nodes.Expr | None]:
    """Returns the paths that ``first`` tries, and its fallback: a last argument that is not a quoted text."""
    texts = [arg.value for arg in node.args if isinstance(arg, nodes.Const) and isinstance(arg.value, str)]
    last = node.args[-1]
    fallback = None if isinstance(last, nodes.Const) and isinstance(last.value, str) else last
    return [tuple(text.split(".")) for text in texts], fallback


def mentioned(node: nodes.Node) -> Iterator[Path]:
    """Yields every path that the expression mentions, as far as it is constant: ``a['b'][i].c`` gives ``a.b``."""
    match node:
        case nodes.Call(node=nodes.Name(name="first")):
            paths, fallback = first_arguments(node)
            yield from paths
            if fallback is not None:
                yield from mentioned(fallback)
        case nodes.Name() | nodes.Getattr() | nodes.Getitem():
            path, rest = _static_path(node)
            if path:
                yield path
            for part in rest:
                yield from mentioned(part)
        case _:
            for child in node.iter_child_nodes():
                if not (isinstance(node, nodes.Call) and child is node.node):
                    yield from mentioned(child)


def _static_path(node: nodes.Node) -> tuple[Path, list[nodes.Node]]:
    """Returns the constant path that a chain of lookups begins with, and the expressions inside the chain."""
    links: list[nodes.Node] = []
    while isinstance(node, nodes.Getattr | nodes.Getitem):
        links.append(node)
        node = node.node
    if not isinstance(node, nodes.Name):
        return (), [node, *(link.arg for link in links if isinstance(link, nodes.Getitem))]
    path, open_ended, rest = [node.name], False, list[nodes.Node]()
    for link in reversed(links):
        key = _constant_key(link)
        open_ended |= key is None
        if key is None and isinstance(link, nodes.Getitem):
            rest.append(link.arg)
        elif key is not None and not open_ended:
            path.append(key)
    return tuple(path), rest


def _constant_key(link: nodes.Node) -> str | None:
    match link:
        case nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=str(name))):
            return str(name)
    return None


def bounded(value: Value) -> Value:
    """Returns ``value``; raises :class:`ExpressionError` for an integer beyond 64 bits or a number that is
    not finite.
    """
    if isinstance(value, int) and not -MAX_INTEGER <= value < MAX_INTEGER:
        raise ExpressionError("an integer beyond 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ExpressionError("a number that is not finite")
    return value
