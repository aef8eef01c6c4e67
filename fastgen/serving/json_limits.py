"""How much a JSON text may hold.

Parsing holds Python's lock until it is done, in whatever thread it runs. So a text is measured first, and one whose
values would stop every stream for seconds is refused. A prompt is text or whole numbers, of which there may be many.
"""

from __future__ import annotations

import numpy as np

from fastgen.serving.refusals import TooLargeError

# A text of at most so many bytes is parsed within some hundredths of a second, whatever it holds.
FREE_BYTES = 256 << 10
# Values of lists and objects. A prompt may have 2^20 token ids.
_MAX_VALUES = (1 << 20) + (1 << 17)
# Lists, objects, names of objects, and numbers with a fraction or an exponent, which take longer than whole numbers.
# ``/generate`` takes 65,536 of ``logit_bias``, which are a name and a fraction each.
_MAX_SLOW = 1 << 18
_SLOW = b"[{:.eE"
_PIECE_BYTES = 1 << 18
_QUOTE, _BACKSLASH, _SPACE = b'"\\ '


def is_surely_small(text: bytes) -> bool:
    """Returns whether ``text`` is within the limits even if all the marks in its strings count. This takes about a
    millisecond for each MiB.
    """
    if len(text) <= FREE_BYTES:
        return True
    return text.count(b",") <= _MAX_VALUES and len(text) - len(text.translate(None, _SLOW)) <= _MAX_SLOW


def check_json_size(text: bytes) -> None:
    """Raises ``TooLargeError`` if ``text``, which is JSON, is beyond the limits.

    It takes about 20 ms for each MiB, mostly without holding Python's lock.
    """
    if is_surely_small(text):
        return
    counts = _count_outside_strings(text)
    num_values, num_slow = int(counts[ord(",")]), int(sum(counts[mark] for mark in _SLOW))
    if num_values > _MAX_VALUES:
        raise TooLargeError(f"the body has {num_values} values, and may have {_MAX_VALUES}")
    if num_slow > _MAX_SLOW:
        raise TooLargeError(
            f"the body has {num_slow} lists, objects, names and fractions, and may have {_MAX_SLOW} of them"
        )


def _count_outside_strings(text: bytes) -> np.ndarray:
    """Returns how often each byte occurs outside the strings of a JSON text."""
    counts = np.zeros(256, np.int64)
    is_in_string, is_escaped = 0, False
    for begin in range(0, len(text), _PIECE_BYTES):
        piece = np.frombuffer(text, np.uint8, min(_PIECE_BYTES, len(text) - begin), begin).copy()
        if is_escaped:
            piece[0] = _SPACE
        escaped = _after_odd_backslashes(piece)
        is_escaped = bool(len(escaped)) and int(escaped[-1]) == len(piece)
        piece[escaped[: len(escaped) - is_escaped]] = _SPACE
        num_quotes = np.cumsum(piece == _QUOTE, dtype=np.int32) + is_in_string
        counts += np.bincount(piece[num_quotes % 2 == 0], minlength=256)
        is_in_string = int(num_quotes[-1]) % 2
    return counts


def _after_odd_backslashes(piece: np.ndarray) -> np.ndarray:
    """Returns the places behind the runs of an odd number of backslashes: those of escaped characters."""
    places = np.flatnonzero(piece == _BACKSLASH)
    firsts = places[np.diff(places, prepend=-2) != 1]
    lasts = places[np.diff(places, append=len(piece) + 1) != 1]
    behind: np.ndarray = lasts[(lasts - firsts) % 2 == 0] + 1
    return behind
