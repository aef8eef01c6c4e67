"""Limits what a JSON text may hold, and parses it.

A text is measured first, and one whose values would take longer than a tenth of a second of a processor's time is
refused. A prompt is text or whole numbers, of which there may be many.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import msgspec

from fastgen.serving.admission.json_pieces import parsing
from fastgen.serving.admission.turns import at_once
from fastgen.serving.refusals import TooLargeError

# A text of at most so many bytes is parsed within a millisecond or two, whatever it holds, and one of FREE_BYTES within
# some hundredths of a second.
QUICK_BYTES, FREE_BYTES = 16 << 10, 256 << 10
# Values of lists and objects. A prompt may have 2^20 token ids.
_MAX_VALUES = (1 << 20) + (1 << 17)
# Lists, objects, texts, names, and numbers with a fraction or an exponent, which take longer than whole numbers.
# ``/generate`` takes 65,536 of ``logit_bias``, which are a name and a fraction each.
_MAX_SLOW = 5 << 15
_SLOW = b"[{.eE"
# Digits of one number. The time to parse a number grows with the square of its digits.
_MAX_DIGITS = 64
_MANY_DIGITS = b"0" * (_MAX_DIGITS + 1)
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_PIECE_BYTES = 1 << 16
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
    """Returns what :func:`parsing_json` does, at once."""
    return at_once(parsing_json(text))


def parsing_json(text: bytes) -> Generator[None, None, Any]:
    """Parses a JSON text within the limits, and yields after each piece. Raises ``json.JSONDecodeError`` for anything
    else.

    A long text is parsed by msgspec, in half the time or less. It takes UTF-8 only, and no numbers that JSON does not
    have (``NaN``, ``1e999``). A short one is parsed by Python, whose errors say more.
    """
    try:
        if len(text) <= QUICK_BYTES:
            return _parse_short(text)
        return (yield from parsing(text.removeprefix(codecs.BOM_UTF8)))  # as Python's parser does
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


def check_json_sizes(texts: Iterable[bytes], what: str = "the body") -> None:
    """Raises ``TooLargeError`` if ``texts``, each of which is JSON, are beyond the limits together. The error calls
    them ``what``. See :func:`measured` for its time.
    """
    for _ in measured(texts, what):
        pass


def measured(texts: Iterable[bytes], what: str = "the body") -> Iterator[None]:
    """Does what :func:`check_json_sizes` does in pieces, and yields after each, so that a caller can do something else
    between them.

    A piece takes up to a millisecond, and a MiB up to 10 ms. What is beyond the limits is not measured to its end.
    """
    texts = [*texts]
    if sum(map(len, texts)) <= FREE_BYTES:
        return
    size, num_new_bytes = _Size(), 0
    for text in texts:
        size.begin_text()
        for begin in range(0, len(text), _PIECE_BYTES):
            piece = text[begin : begin + _PIECE_BYTES]
            size.add(piece)
            size.check(what)
            num_new_bytes += len(piece)
            if num_new_bytes >= _PIECE_BYTES:
                num_new_bytes = 0
                yield


class _Size:
    """Counts what is outside the strings of JSON texts. A string counts where it ends."""

    def __init__(self) -> None:
        self.num_values = self.num_slow = 0
        self.has_long_number = False
        self.begin_text()

    def begin_text(self) -> None:
        """The next piece is the first of another text, whatever the last one ended with."""
        self._is_in_string = self._is_escaped = False
        # What is outside strings at the end of the last piece, as far as a number may go on in the next.
        self._end = b""

    def add(self, piece: bytes) -> None:
        if self._is_escaped:
            piece = piece[1:]
        self._is_escaped = (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        num_quotes = len(parts) - 1 + self._is_in_string
        outside = b" ".join(parts[self._is_in_string :: 2])
        self._is_in_string = num_quotes % 2 == 1
        self.num_values += outside.count(b",")
        self.num_slow += num_quotes // 2 + len(outside) - len(outside.translate(None, _SLOW))
        numbers = self._end + outside.translate(_DIGITS_AS_ZEROS)
        self.has_long_number = self.has_long_number or _MANY_DIGITS in numbers
        self._end = b"" if self._is_in_string else numbers[-_MAX_DIGITS:]

    def check(self, what: str) -> None:
        """Raises ``TooLargeError`` if it is beyond the limits."""
        if self.num_values > _MAX_VALUES:
            raise TooLargeError(f"{what} has more than {_MAX_VALUES} values")
        if self.num_slow > _MAX_SLOW:
            raise TooLargeError(f"{what} has more than {_MAX_SLOW} lists, objects, texts, names and fractions")
        if self.has_long_number:
            raise TooLargeError(f"{what} has a number of more than {_MAX_DIGITS} digits")
