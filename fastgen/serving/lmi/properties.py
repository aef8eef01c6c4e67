"""Reads Java's properties files: keys, values and their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastgen.errors import InvalidArgumentError

_SPACE = " \t\f"
_KEY = re.compile(r"(?:\\.|[^\\=: \t\f])*", re.DOTALL)
_SEPARATOR = re.compile(r"[ \t\f]*[=:]?[ \t\f]*")
_ESCAPE = re.compile(r"\\(u.{0,4}|.)", re.DOTALL)
_SHORT = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


@dataclass(frozen=True)
class Property:
    """One entry of a file."""

    key: str
    value: str
    # From 1; the first one of an entry that continues over several.
    line: int


def read_properties(file: Path) -> list[Property]:
    """Returns the entries of ``file`` in their order; a key that is given twice is there twice.

    Raises ``InvalidArgumentError``, with the file and the line, for a file that Java would not read either.
    """
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{file}: is not UTF-8 text") from None
    return [_parse(file, number, line) for number, line in _logical_lines(text)]


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the text of each entry and its first line: comments and blank lines are left out, and a line that ends in
    a backslash is joined with the next."""
    began, gathered = 0, ""
    for number, natural in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        line = natural.lstrip(_SPACE)
        if not began:
            if not line or line[0] in "#!":
                continue
            began = number
        num_backslashes = len(line) - len(line.rstrip("\\"))
        if num_backslashes % 2:
            gathered += line[:-1]
            continue
        yield began, gathered + line
        began, gathered = 0, ""
    if gathered:
        yield began, gathered


def _parse(file: Path, number: int, line: str) -> Property:
    key = _KEY.match(line)
    assert key is not None, "the pattern also matches an empty key"
    separator = _SEPARATOR.match(line, key.end())
    assert separator is not None, "the pattern also matches an empty separator"

    def unescape(text: str) -> str:
        return _ESCAPE.sub(replacement, text)

    def replacement(found: re.Match[str]) -> str:
        escaped = found[1]
        if escaped[0] != "u":
            return _SHORT.get(escaped, escaped)
        if not re.fullmatch("u[0-9a-fA-F]{4}", escaped):
            raise InvalidArgumentError(f"{file}:{number}: {found[0]} is not a character; expected \\u and four digits")
        return chr(int(escaped[1:], 16))

    return Property(unescape(key[0]), unescape(line[separator.end() :]), number)
