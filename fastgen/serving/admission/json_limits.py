"""Limits what a JSON text may hold, and parses it.

Parsing holds Python's lock until it is done, in whatever thread it runs. So a text is measured first, and one whose
values would stop every stream for longer than a tenth of a second is refused. A prompt is text or whole numbers, of
which there may be many.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from fastgen.serving.refusals import TooLargeError

# A text of at most so many bytes is parsed within some hundredths of a second, whatever it holds.
FREE_BYTES = 256 << 10
# Values of lists and objects. A prompt may have 2^20 token ids.
_MAX_VALUES = (1 << 20) + (1 << 17)
# Lists, objects, texts, names, and numbers with a fraction or an exponent, which take longer than whole numbers.
# ``/generate`` takes 65,536 of ``logit_bias``, which are a name and a fraction each.
_MAX_SLOW = 5 << 15
_SLOW = b'[{".eE'
# Digits of one number. The time to parse a number grows with the square of its digits.
_MAX_DIGITS = 64
_MANY_DIGITS = b"0" * (_MAX_DIGITS + 1)
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_PIECE_BYTES = 1 << 18
_QUOTE, _BACKSLASH, _SPACE, _NEWLINE = b'"\\ \n'
# It ends a text whatever that holds: a string of JSON has no newline, and a backslash escapes one of two at most.
_BETWEEN_TEXTS = b"\n\n"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = "has half of a pair of surrogates"
# The steps to a value before the last one, and the last one.
_Steps = tuple["_Steps", str | int] | None


class InvalidJsonError(json.JSONDecodeError):
    """A text is not JSON that is read here. ``place`` has the steps to the value at fault, as far as they are known."""

    def __init__(self, reason: str, place: tuple[str | int, ...] = ()):
        super().__init__(reason, "", 0)
        self.place = place


def parse_json(text: bytes) -> Any:
    """Returns the value of a JSON text within the limits. Raises ``json.JSONDecodeError`` for anything else.

    A long text is parsed by msgspec, in half the time or less. It takes UTF-8 only, and no numbers that JSON does not
    have (``NaN``, ``1e999``). A short one is parsed by Python, whose errors say more.
    """
    try:
        if len(text) <= FREE_BYTES:
            return _parse_short(text)
        return msgspec.json.decode(text.removeprefix(codecs.BOM_UTF8))  # as Python's parser does
    except json.JSONDecodeError:
        raise
    except msgspec.DecodeError as error:
        reason = str(error)
        if "truncated" in reason:  # msgspec says the same of both
            reason = f"it ends too early, or {_HALF}"
    except RecursionError:
        reason = "it is nested too deeply"
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except ValueError:
        reason = "a number in it has too many digits"
    raise InvalidJsonError(reason)


def _parse_short(text: bytes) -> Any:
    decoded = text.decode(json.detect_encoding(text))
    value = json.loads(decoded)
    if _SURROGATE.search(decoded) and not _is_unicode(json.dumps(value, ensure_ascii=False)):
        raise InvalidJsonError(f"it {_HALF}", _place_of_half(value))
    return value


def _place_of_half(value: Any) -> tuple[str | int, ...]:
    """Returns the steps to the first text of ``value`` with half of a pair of surrogates; to a name, those of its
    object.
    """
    stack: list[tuple[Any, _Steps]] = [(value, None)]
    while stack:
        value, steps = stack.pop()
        if isinstance(value, str) and not _is_unicode(value):
            break
        if isinstance(value, dict) and not all(map(_is_unicode, value)):
            break
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        stack += [(each, (steps, step)) for step, each in inner][::-1]
    place: list[str | int] = []
    while steps is not None:
        steps, step = steps
        place.append(step)
    return tuple(place[::-1])


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_json_size(text: bytes, what: str = "the body") -> None:
    """Raises ``TooLargeError`` if ``text``, which is JSON, is beyond the limits. The error calls it ``what``.

    It takes 3 to 20 ms for each MiB, in pieces between which other threads run.
    """
    if _is_surely_small(text):
        return
    counts, has_long_number = _count_outside_strings(text)
    num_values, num_slow = int(counts[ord(",")]), int(sum(counts[mark] for mark in _SLOW))
    if num_values > _MAX_VALUES:
        raise TooLargeError(f"{what} has {num_values} values, and may have {_MAX_VALUES}")
    if num_slow > _MAX_SLOW:
        raise TooLargeError(
            f"{what} has {num_slow} lists, objects, texts, names and fractions, and may have {_MAX_SLOW} of them"
        )
    if has_long_number:
        raise TooLargeError(f"{what} has a number of more than {_MAX_DIGITS} digits")


def check_json_sizes(texts: Iterable[str], what: str) -> None:
    """Raises ``TooLargeError`` if ``texts``, each of which is JSON, are beyond the limits together."""
    check_json_size(_BETWEEN_TEXTS.join(text.encode() for text in texts), what)


def _is_surely_small(text: bytes) -> bool:
    """Returns whether ``text`` is within the limits even if all the marks in its strings count."""
    if len(text) <= FREE_BYTES:
        return True
    return (
        text.count(b",") <= _MAX_VALUES
        and len(text) - len(text.translate(None, _SLOW)) <= _MAX_SLOW
        and _MANY_DIGITS not in text.translate(_DIGITS_AS_ZEROS)
    )


def _count_outside_strings(text: bytes) -> tuple[np.ndarray, bool]:
    """Returns how often each byte occurs outside the strings of a JSON text, to which the quote at their end belongs,
    and whether a number in it has too many digits.
    """
    counts = np.zeros(256, np.int64)
    is_in_string, is_escaped = 0, False
    end, has_long_number = b"", False
    for begin in range(0, len(text), _PIECE_BYTES):
        piece = np.frombuffer(text, np.uint8, min(_PIECE_BYTES, len(text) - begin), begin).copy()
        if is_escaped:
            piece[0] = _SPACE
        escaped = _after_odd_backslashes(piece)
        is_escaped = bool(len(escaped)) and int(escaped[-1]) == len(piece)
        piece[escaped[: len(escaped) - is_escaped]] = _SPACE
        num_quotes = np.cumsum(piece == _QUOTE, dtype=np.int32) + is_in_string
        # A newline in a string is an error, after which nothing is parsed. The next text begins outside a string.
        num_quotes -= np.maximum.accumulate(np.where(piece == _NEWLINE, num_quotes, 0))
        is_outside = num_quotes % 2 == 0
        counts += np.bincount(piece[is_outside], minlength=256)
        is_in_string = int(num_quotes[-1]) % 2
        outside = end + np.where(is_outside, piece, np.uint8(_SPACE)).tobytes()
        has_long_number = has_long_number or _MANY_DIGITS in outside.translate(_DIGITS_AS_ZEROS)
        end = outside[-_MAX_DIGITS:]
    return counts, has_long_number


def _after_odd_backslashes(piece: np.ndarray) -> np.ndarray:
    """Returns the places behind the runs of an odd number of backslashes: those of escaped characters."""
    places = np.flatnonzero(piece == _BACKSLASH)
    firsts = places[np.diff(places, prepend=-2) != 1]
    lasts = places[np.diff(places, append=len(piece) + 1) != 1]
    behind: np.ndarray = lasts[(lasts - firsts) % 2 == 0] + 1
    return behind
