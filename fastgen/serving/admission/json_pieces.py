"""Parses a long JSON text in pieces, so that a caller can do something else between them.

The text is cut behind commas outside its strings. Each part becomes a text of its own: the lists and objects that are
open where it begins are opened again before it, and those that are open where it ends are closed behind it. Then what
it holds is added to those of the whole value.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

# A part has at least so many bytes, and so many for each bracket that is open at its end, since each is opened again. A
# long string makes it longer.
PART_BYTES, _BRACKET_BYTES = 1 << 16, 512
# Strings that are passed over in search of a comma. A name has none behind it, but its value does.
_MAX_PASSED = 8
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_CLOSING = {ord("["): ord("]"), ord("{"): ord("}")}
_PLACE = re.compile(r"\(byte (\d+)\)")
# The steps to a value, which a part does not know.
_STEPS = re.compile(r" - at `[^`]*`")


@dataclass(frozen=True)
class Part:
    """A part of a text, and the brackets that are open where it begins and where it ends, the outermost first."""

    text: bytes
    opened: bytes
    left_open: bytes


def parsing(text: bytes) -> Generator[None, None, Any]:
    """Parses a JSON text, and yields after each piece. Raises ``msgspec.DecodeError`` and others, as
    ``msgspec.json.decode`` does, without the steps to the value at fault.
    """
    root, begin, whole = None, 0, _Whole()
    for part in parts(text):
        if part is None:
            yield
            continue
        head, tail = whole.frame(part)
        try:
            value = msgspec.json.decode(head + part.text + tail)
        except msgspec.DecodeError as error:
            raise msgspec.DecodeError(_moved(str(error), begin - len(head))) from None
        root = whole.add(part, value)
        begin += len(part.text)
        yield
    return root


def _moved(reason: str, num_bytes: int) -> str:
    """Returns why a part is refused, with places in the whole text: ``num_bytes`` behind those in the part."""
    return _PLACE.sub(lambda found: f"(byte {int(found[1]) + num_bytes})", _STEPS.sub("", reason))


def parts(text: bytes) -> Iterator[Part | None]:
    """Yields the parts of a JSON text, and ``None`` while it looks for the end of a long one. If the text is not JSON,
    then a part is not, or is not with the brackets that are open at its ends.
    """
    begin, place, opened, scan = 0, 0, b"", _Scan()
    while len(text) - place > 2 * PART_BYTES:
        num_bytes, is_comma = scan.advance(text[place : place + 2 * PART_BYTES])
        place += num_bytes
        if not scan.is_possible:
            break
        if is_comma and scan.open and place - begin >= len(scan.open) * _BRACKET_BYTES:
            yield Part(text[begin:place], opened, bytes(scan.open))
            begin, opened = place, bytes(scan.open)
        else:
            yield None
    yield Part(text[begin:], opened, b"")


class _Scan:
    """Goes through a text, and knows what is open."""

    def __init__(self) -> None:
        # The brackets that are open, the outermost first.
        self.open = bytearray()
        # Whether brackets closed what was open.
        self.is_possible = True
        self._is_in_string = False

    def advance(self, window: bytes) -> tuple[int, bool]:
        """Goes on to a comma outside strings in the second half of ``window``, the bytes that come next. Returns how
        many it has passed, and whether the last is that comma.
        """
        if b"\\" in window:
            if (len(window) - len(window.rstrip(b"\\"))) % 2:
                window = window[:-1]  # it is read with what it escapes
            window = window.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        place, is_comma = PART_BYTES, False
        is_in_string = self._is_in_string != (window.count(b'"', 0, place) % 2 == 1)
        for _ in range(_MAX_PASSED):
            if is_in_string:
                place, is_in_string = window.find(b'"', place) + 1, False
                if not place:
                    place, is_in_string = len(window), True
                    break
            quote = window.find(b'"', place)
            comma = window.find(b",", place, len(window) if quote < 0 else quote)
            if comma >= 0:
                place, is_comma = comma + 1, True
                break
            if quote < 0:
                place = len(window)
                break
            place, is_in_string = quote + 1, True
        self._count(b"".join(window[:place].split(b'"')[self._is_in_string :: 2]))
        self._is_in_string = is_in_string
        return place, is_comma

    def _count(self, outside: bytes) -> None:
        brackets = outside.translate(None, _NOT_BRACKETS)
        for _ in range(3):  # most lists and objects hold few others
            brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        for bracket in brackets:
            if bracket in _CLOSING:
                self.open.append(bracket)
            elif not self.open or _CLOSING[self.open.pop()] != bracket:
                self.is_possible = False
                return


class _Whole:
    """The value of all parts so far."""

    def __init__(self) -> None:
        # Its lists and objects that are open, the outermost first.
        self._open: list[Any] = []
        # The names of what a part has in place of what came before it, and comes behind it. No text has them.
        self._before, self._behind = (secrets.token_hex(8) for _ in range(2))

    def frame(self, part: Part) -> tuple[bytes, bytes]:
        """Returns what opens what is open where ``part`` begins, and what closes what is open where it ends."""
        name, end = b'"%b":' % self._before.encode(), b'"%b"' % self._behind.encode()
        head = b"".join(b"[" if bracket == ord("[") else b"{" + name for bracket in part.opened)
        tail = bytes(_CLOSING[bracket] for bracket in reversed(part.left_open))
        if part.opened:
            head += b"0,"
        if part.left_open:
            tail = (end if tail.startswith(b"]") else end + b":0") + tail
        return head, tail

    def add(self, part: Part, value: Any) -> Any:
        """Adds the ``value`` of ``part`` in its frame. Returns the whole value so far."""
        left_open = self._path_to_end(value, len(part.left_open))
        if left_open:
            left_open[-1].pop(*([] if isinstance(left_open[-1], list) else [self._behind]))
        if not self._open:
            self._open = left_open
            return value
        root, continued = self._open[0], value
        for level, container in enumerate(self._open):
            if level < len(left_open) and left_open[level] is continued:
                left_open[level] = container
            if isinstance(container, list):
                container += continued[1:]
                continued = continued[0]
            else:
                before = continued.pop(self._before)
                container.update(continued)
                continued = before
        self._open = left_open
        return root

    def _path_to_end(self, value: Any, length: int) -> list[Any]:
        """Returns the lists and objects that are open at the end of a part with this value: ``length`` of them."""
        if not length:
            return []
        path, others = [value], [self._candidates(value)]
        while len(path) < length or not self._is_end(path[-1]):
            if len(path) < length and (candidate := next(others[-1], None)) is not None:
                path.append(candidate)
                others.append(self._candidates(candidate))
            else:
                path.pop()
                others.pop()
        return path

    def _candidates(self, container: Any) -> Iterator[Any]:
        """Yields what may be open in ``container``. The last member of an object may replace an earlier one, and then
        has its place.
        """
        values = container[-1:] if isinstance(container, list) else reversed(container.values())
        return (value for value in values if isinstance(value, list | dict))

    def _is_end(self, container: Any) -> bool:
        return self._behind in (container if isinstance(container, dict) else container[-1:])
