"""Names and values in error messages: what may have been meant, and what was there instead."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable


def close_to(name: object, known: Iterable[str], *, ending: str = "") -> str:
    """``"; did you mean 'x'?"`` where some of ``known`` are spelled nearly like ``name``, else nothing.

    An ``ending`` that most of them share is left out of the comparison, in which it would make all of them alike.
    """
    text = str(name)
    whole = {each.removesuffix(ending): each for each in sorted(map(str, known))}
    near = [whole[stem] for stem in difflib.get_close_matches(text.removesuffix(ending), whole, n=3)]
    if not text.endswith(ending):  # it may be the ending that is mistyped
        near = near or difflib.get_close_matches(text, whole.values(), n=1)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def one_of(name: object, known: Iterable[str], *, ending: str = "") -> str:
    """The same, and then all that are ``known``."""
    known = list(known)
    near = close_to(name, known, ending=ending)
    return f"{near}{' Known' if near else '; known'} are {', '.join(known)}"


def shown(value: object) -> str:
    """The value as Python writes it, cut to a bearable length however long or deep it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python is willing to print
        return f"{type(value).__name__} of thousands of digits"


def quoted(name: str, most: int = 80) -> str:
    """A name as it stands, cut to ``most`` characters, what cannot be printed escaped."""
    cut = name if len(name) <= most else f"{name[:most]}…"
    return cut if cut.isprintable() else ascii(cut)[1:-1]
