"""Names and values in error messages: suggestions for a mistyped name, and bounded output of values."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

_MOST_CHARACTERS = 80
_NAME, _STEM = 0.6, 0.75  # smallest likeness of names, and of names without an ending that they share


def close_to(name: object, known: Iterable[str], *, ending: str = "") -> str:
    """Returns ``"; did you mean 'x'?"`` if some of ``known`` are spelled nearly like ``name``, else nothing.

    An ``ending`` that most of them share is left out of the comparison, since it would make all of them similar. What
    is left is short, so it must be nearer: Mamba is not Llama.
    """
    text = str(name)
    whole = {each.removesuffix(ending): each for each in sorted(map(str, known))}
    near = [
        whole[stem]
        for stem in difflib.get_close_matches(text.removesuffix(ending), whole, n=3, cutoff=_STEM if ending else _NAME)
    ]
    if not text.endswith(ending):  # it may be the ending that is mistyped
        near = near or difflib.get_close_matches(text, whole.values(), n=1)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def one_of(name: object, known: Iterable[str]) -> str:
    """Returns :func:`close_to` and then a list of all that are ``known``."""
    known = list(known)
    near = close_to(name, known)
    return f"{near}{' Known' if near else '; known'} are {', '.join(known)}"


def shown(value: object) -> str:
    """Returns the ``repr`` of the value, shortened if it is long or deeply nested."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return f"{type(value).__name__} of thousands of digits"


def quoted(name: str) -> str:
    """Returns a name, cut to ``_MOST_CHARACTERS``, with characters that cannot be printed escaped."""
    cut = name if len(name) <= _MOST_CHARACTERS else f"{name[:_MOST_CHARACTERS]}…"
    return cut if cut.isprintable() else ascii(cut)[1:-1]
