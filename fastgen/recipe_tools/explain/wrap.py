"""Breaks text into lines of a width: at spaces, else at joints of names and expressions, else anywhere."""

from __future__ import annotations

from typing import Final

# Characters after which a word may be broken; the first group is preferred if it gives a long enough line.
_JOINTS: Final = (".,/|()", "_-")


def wrapped(text: str, width: int) -> list[str]:
    """Returns ``text`` in lines of at most ``width`` characters (at least 1); only spaces at line ends are lost."""
    assert width > 0
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) <= width:
            line = f"{line} {word}"
            continue
        if line:
            lines.append(line)
        while len(word) > width:
            cut = _cut(word, width)
            lines.append(word[:cut])
            word = word[cut:]
        line = word
    return [*lines, line] if line or not lines else lines


def _cut(word: str, width: int) -> int:
    """Returns how many characters of a ``word`` longer than ``width`` go into a line."""
    for joints in _JOINTS:
        cut = 1 + max(word.rfind(joint, 0, width) for joint in joints)
        if cut > width // 2:
            return cut
    return width
