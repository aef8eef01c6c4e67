"""Things that are chosen by a name and parameters in one string, such as ``paper:prompt=2600,answer=60``.

A kind of thing is a dataclass whose fields state their parameters as arguments (:mod:`fastgen.arguments`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from textwrap import fill
from typing import Any

from fastgen.arguments import Argument, arguments_of, build, check
from fastgen.errors import InvalidArgumentError

# Columns of the descriptions.
_WIDTH = 100
_WORDS: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def checked(thing: object) -> None:
    """Raises ``InvalidArgumentError`` for the first parameter of ``thing`` that is out of range."""
    check(thing)


def stated(thing: Any) -> dict[str, Any]:
    """Returns the name and the parameters of ``thing``, as JSON, by the names that users give."""
    fields = {argument.name: field for argument, field in _arguments(type(thing))}
    return {"name": thing.name} | {name: getattr(thing, field) for name, field in fields.items()}


def make(text: str, kinds: Mapping[str, type], *, what: str, first: str | None = None, **made: Any) -> Any:
    """Returns the thing that ``text`` names: ``NAME`` or ``NAME:PARAMETER=VALUE,…``.

    ``what`` says in messages what is chosen. A first part without ``=`` is the value of the parameter ``first``, where
    the kind has it. ``made`` are fields that users do not give; a kind without one of them does not get it.

    :raises InvalidArgumentError: for an unknown name or parameter (the message lists those that exist), a parameter
        given twice, or a value that it does not take.
    """
    name, _, rest = text.partition(":")
    if name not in kinds:
        raise InvalidArgumentError(f"{what}={text!r}: {name!r} is not known; {_offer(name, kinds)}")
    kind = kinds[name]
    known = {argument.name: argument for argument, _ in _arguments(kind)}
    given: dict[str, Any] = {}
    for place, part in enumerate(rest.split(",") if rest else []):
        word, equals, value = part.partition("=")
        if not equals and place == 0 and first in known:
            word, value = first, part
        elif not equals:
            raise InvalidArgumentError(f"{what}={text!r}: {part!r}: expected PARAMETER=VALUE")
        if word not in known:
            raise InvalidArgumentError(f"{what}={text!r}: {name} has no {word!r}; {_offer(word, known)}")
        if word in given:
            raise InvalidArgumentError(f"{what}={text!r}: {word} is given twice")
        given[word] = _value(known[word], value, f"{what}={text!r}")
    missing = [one.name for one in known.values() if one.is_required and one.name not in given]
    if missing:
        raise InvalidArgumentError(f"{what}={text!r}: {name} needs {', '.join(missing)}")
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    try:
        return build(kind, given, **{field: value for field, value in made.items() if field in fields})
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{what}={text!r}: {error}") from None


def described(kinds: Mapping[str, type]) -> str:
    """Returns what ``kinds`` are and take, for ``--help`` and docs: a paragraph for each name."""
    paragraphs = []
    for name, kind in kinds.items():
        about = " ".join((kind.__doc__ or "").split("\n\n")[0].replace("``", "").split())
        lines = [fill(f"{name}: {about}", _WIDTH, subsequent_indent="  ")]
        lines += [
            fill(f"    {one.name}: {one.summary}", _WIDTH, subsequent_indent=" " * 6) for one, _ in _arguments(kind)
        ]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _arguments(kind: type) -> list[tuple[Argument, str]]:
    """Returns the parameters of ``kind`` with the names of their fields."""
    assert is_dataclass(kind)
    fields = [field for field in kind.__dataclass_fields__.values() if hasattr(field.type, "__metadata__")]
    return list(zip(arguments_of(kind), (field.name for field in fields), strict=True))


def _value(argument: Argument, text: str, where: str) -> Any:
    kind = argument.flag_type
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise InvalidArgumentError(f"{where}: {argument.name}={text!r}: expected {_WORDS[kind]}") from None


def _offer(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}There are: {', '.join(known)}"
