"""Finds bounds of numbers in a JSON schema that llguidance does not follow (1.9), so that they are refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# What these keys hold is data, and no schema.
_DATA = {"const", "enum", "default", "examples"}
_LEAST_INTEGER, _MOST_INTEGER = -(1 << 63), (1 << 63) - 1
# The states of the automaton grow with it, and another request may wait for the step that builds them.
_MOST_MULTIPLE = 10_000


def bound_not_followed(schema: Any) -> str | None:
    """Returns why a bound in ``schema`` would not be followed; ``None`` where all are.

    llguidance holds bounds as doubles, and those of integers in 64 bits. Between an exclusive bound that is whole and
    another bound less than 1 away it lets the exclusive one through. Integers of at most -2^63 end its process. Each
    object is looked at by itself: what ``allOf`` or ``$ref`` joins from two is not found.
    """
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            if (why := _of_number(value)) is not None:
                return why
            stack += [inner for name, inner in value.items() if name not in _DATA]
        elif isinstance(value, (list, tuple)):
            stack += value
    return None


def _of_number(schema: Mapping[str, Any]) -> str | None:
    bounds = {name: schema[name] for name in _BOUNDS if _is_number(schema.get(name))}
    given = schema.get("type", "number")
    types = given if isinstance(given, (list, tuple)) else [given]
    multiple: Any = schema.get("multipleOf")
    if _is_number(multiple) and _digits(multiple) > _MOST_MULTIPLE:
        return f"multipleOf {multiple} would take too long to follow: at most {_MOST_MULTIPLE} is, whatever its point"
    if "integer" in types:
        for name, bound in bounds.items():
            if not _is_exact(bound) or (bound <= _LEAST_INTEGER and name in _BOUNDS[2:]):
                return f"{name} {bound}: integers are bounded only by numbers of 64 bits that a double holds exactly"
    if "number" in types:
        least = max((bounds[name] for name in _BOUNDS[:2] if name in bounds), default=None)
        most = min((bounds[name] for name in _BOUNDS[2:] if name in bounds), default=None)
        if least is not None and most is not None and 0 < most - least < 1:
            for name, bound in bounds.items():
                if name.startswith("exclusive") and bound == int(bound):
                    inclusive = name.removeprefix("exclusive").lower()
                    return (
                        f"{name} {bound} cannot be followed with the other bound so near: "
                        f"give a {inclusive} that leaves it out"
                    )
    return None


def _is_number(value: Any) -> bool:
    """Returns whether ``value`` is a number that a double can hold. The library refuses larger ones itself."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _is_exact(bound: float) -> bool:
    if not _LEAST_INTEGER <= bound <= _MOST_INTEGER:
        return False
    return isinstance(bound, float) or bound == _MOST_INTEGER or int(float(bound)) == bound


def _digits(number: float) -> int:
    """Returns the digits of a decimal number without point, sign and zeros at its end."""
    return int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits)))
