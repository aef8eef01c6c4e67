"""Compiled formats that are kept for later requests, bounded in number and in bytes."""

from __future__ import annotations

import ctypes
from collections import OrderedDict

from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.sampling.matcher import CompiledFormat

MAX_KEPT = 64
# A format takes 0.1 to 8 MiB at its start, and up to 60 MiB when its lexer has seen long texts.
MOST_BYTES = 128 << 20
_SHARE_OF_MEMORY = 64


def most_kept_bytes(memory_bytes: int) -> int:
    """Returns how many bytes a machine with so much memory gives to compiled formats: a 64th part, at most 128 MiB."""
    return min(MOST_BYTES, memory_bytes // _SHARE_OF_MEMORY)


class KeptFormats:
    """Holds the formats that were used most recently, while this process's heap has grown by at most ``max_bytes``
    since :meth:`measure_from_here`. Beyond that the format that was not used for the longest time is dropped first; the
    most recent one stays, however large it is.
    """

    def __init__(self, max_bytes: int = MOST_BYTES) -> None:
        self._formats: OrderedDict[ResponseFormat, CompiledFormat] = OrderedDict()
        self._max_bytes = max_bytes
        self._first_bytes = 0

    def measure_from_here(self) -> None:
        """Notes the size of the heap before anything is compiled."""
        self._first_bytes = heap_bytes()

    def get(self, response_format: ResponseFormat) -> CompiledFormat | None:
        """Returns a kept format, which is the most recent one then."""
        found = self._formats.get(response_format)
        if found is None or found.is_spoiled:
            return None
        self._formats.move_to_end(response_format)
        return found

    def keep(self, response_format: ResponseFormat, compiled: CompiledFormat) -> None:
        """Keeps a format as the most recent one, and drops others if they are too many."""
        self._formats[response_format] = compiled
        self._formats.move_to_end(response_format)
        while len(self._formats) > MAX_KEPT:
            self._formats.popitem(last=False)
        while len(self._formats) > 1 and heap_bytes() - self._first_bytes > self._max_bytes:
            self._formats.popitem(last=False)


_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallInfo(ctypes.Structure):
    """The C library's ``struct mallinfo2``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


def heap_bytes() -> int:
    """Returns the bytes that this process has allocated from the C library; 0 for one that does not say."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return 0
    mallinfo.restype = _MallInfo
    found = mallinfo()
    return int(found.uordblks) + int(found.hblkhd)
