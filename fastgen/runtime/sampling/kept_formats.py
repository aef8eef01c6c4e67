"""Compiled formats that are kept for later requests, bounded in number and in bytes."""

from __future__ import annotations

import ctypes
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import NamedTuple
from weakref import WeakSet, WeakValueDictionary, ref

from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.sampling.matcher import CompiledFormat

MAX_KEPT = 64
# Most formats take 0.1 to 8 MiB at their start. A repetition of 100,000 takes 37 MiB, and a lexer that has seen long
# texts 60 MiB.
FORMAT_BYTES = 60 << 20
MOST_BYTES = 128 << 20
_SHARE_OF_MEMORY = 64
# Formats of open requests may take a 16th of the machine's memory. A few are always served.
_SHARE_IN_USE, LEAST_IN_USE = 16, 4
# By how much they may exceed that together, since they grow with their answers, and other memory of the engine counts
# too. Beyond that the answers in one of them fail.
MOST_GROWTH = 2
# How long the requests with a format may take to end, and by how much less a heap is then that the format took.
_ENDING_S, _LEAST_FREED_BYTES = 2.0, 1 << 20
# Processor time for which formats grow to take some megabytes.
_GROWING_CPU_S = 0.05


def most_kept_bytes(memory_bytes: int) -> int:
    """Returns how many bytes a machine with so much memory gives to compiled formats: a 64th part, at most 128 MiB."""
    return min(MOST_BYTES, memory_bytes // _SHARE_OF_MEMORY)


def most_in_use(memory_bytes: int) -> int:
    """Returns how many formats open requests may have at once on a machine with so much memory."""
    return max(LEAST_IN_USE, memory_bytes // _SHARE_IN_USE // FORMAT_BYTES)


class _Shed(NamedTuple):
    """A format that was spoiled for its memory, the growth of the heap then, for how long other formats in use had
    grown, and when that was.
    """

    format: ref[CompiledFormat]
    grown_bytes: int
    others_cpu_s: float
    at_s: float


class KeptFormats:
    """Holds the formats that were used most recently, while this process's heap has grown by at most ``max_bytes``
    since :meth:`measure_from_here`. Beyond that the format that was not used for the longest time is dropped first; the
    most recent one stays, however large it is. A format that open requests use is there as long as they are.
    """

    def __init__(self, max_bytes: int = MOST_BYTES) -> None:
        self._formats: OrderedDict[ResponseFormat, CompiledFormat] = OrderedDict()
        # Those and the ones in use, and beside them spoiled ones.
        self._present: WeakValueDictionary[ResponseFormat, CompiledFormat] = WeakValueDictionary()
        self._all: WeakSet[CompiledFormat] = WeakSet()
        self._max_bytes = max_bytes
        self._first_bytes = 0
        # The format that was spoiled last for its memory, until that is known to have helped.
        self._shed: _Shed | None = None

    def measure_from_here(self) -> None:
        """Notes the size of the heap before anything is compiled."""
        self._first_bytes = heap_bytes()

    def get(self, response_format: ResponseFormat) -> CompiledFormat | None:
        """Returns a format that is kept or in use; if it is kept, it is the most recent one then."""
        found = self._present.get(response_format)
        if found is None or found.is_spoiled:
            return None
        if response_format in self._formats:
            self._formats.move_to_end(response_format)
        return found

    def in_use(self) -> set[ResponseFormat]:
        """Returns the formats of open requests that further ones may share."""
        return {each.response_format for each in self._all if each.users and not each.is_spoiled}

    @property
    def num_spoiled(self) -> int:
        """Returns how many formats of open requests no further ones may share."""
        return sum(bool(each.users) for each in self._all if each.is_spoiled)

    @property
    def grown_bytes(self) -> int:
        """Returns how much the heap has grown since :meth:`measure_from_here`."""
        return heap_bytes() - self._first_bytes

    def shed(self, most_bytes: int) -> CompiledFormat | None:
        """If the heap has grown by more than ``most_bytes``, drops what no request uses. If that is not enough, spoils
        and returns the format in use that has grown for the longest time; the caller ends its requests.

        Once these have ended, the heap must be smaller. If it is not, though no format has grown meanwhile, the memory
        is not that of formats. What is beyond :data:`FORMAT_BYTES` for each then counts no longer.
        """
        in_use = [each for each in self._all if each.users]
        growing_cpu_s = sum(each.growing_cpu_s for each in in_use)
        if self._shed is not None:
            shed = self._shed
            if shed.format() is not None and time.monotonic() - shed.at_s < _ENDING_S:
                return None
            self._shed = None
            is_as_large = self.grown_bytes > shed.grown_bytes - _LEAST_FREED_BYTES
            if is_as_large and growing_cpu_s - shed.others_cpu_s < _GROWING_CPU_S:
                self._first_bytes += max(0, self.grown_bytes - FORMAT_BYTES * len(in_use))
        if self.grown_bytes <= most_bytes:
            return None
        self.drop_unused()
        grown_bytes = self.grown_bytes
        if grown_bytes <= most_bytes or not in_use:
            return None
        largest = max(in_use, key=lambda each: each.growing_cpu_s)
        largest.is_spoiled = True
        if self._formats.get(largest.response_format) is largest:
            del self._formats[largest.response_format]
        self._shed = _Shed(ref(largest), grown_bytes, growing_cpu_s - largest.growing_cpu_s, time.monotonic())
        return largest

    def drop_unused(self) -> None:
        """Keeps no format but those of open requests."""
        for response_format in [each for each, compiled in self._formats.items() if not compiled.users]:
            del self._formats[response_format]

    def keep(self, compiled: CompiledFormat) -> None:
        """Keeps a format as the most recent one, and drops others if they are too many. Those in use are dropped
        without a look at the heap, which they stay in.
        """
        self._all.add(compiled)
        self._present[compiled.response_format] = self._formats[compiled.response_format] = compiled
        self._formats.move_to_end(compiled.response_format)
        while len(self._formats) > MAX_KEPT:
            self._formats.popitem(last=False)
        while len(self._formats) > 1 and self.grown_bytes > self._max_bytes:
            while len(self._formats) > 1 and self._formats.popitem(last=False)[1].users:
                pass


_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallInfo(ctypes.Structure):
    """The C library's ``struct mallinfo2``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


def heap_bytes() -> int:
    """Returns the bytes that this process has allocated from the C library; 0 for one that does not say."""
    mallinfo = _mallinfo()
    if mallinfo is None:
        return 0
    found = mallinfo()
    return int(found.uordblks) + int(found.hblkhd)


@cache
def _mallinfo() -> Callable[[], _MallInfo] | None:
    """Returns the C library's ``mallinfo2``, if it has one."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    mallinfo.restype = _MallInfo
    return mallinfo
