"""Measures this machine's limits next to what is compared with them: read bandwidth, fp32 and int8 rate."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.host.huge_pages import in_huge_pages

_SOURCE = Path(__file__).with_suffix(".cpp")
_BUFFER_BYTES = 256 << 20  # beyond any cache
_READ_BYTES = 16 << 20  # a sample: about a millisecond
_NUM_CHUNKS = 16
_COUNT = 2000
_CLOSE = 0.85


@dataclass(frozen=True)
class Limits:
    """Holds bytes a second from memory, and operations a second (two for a multiply-add) in fp32 and int8.

    They are reached by the pool's threads. ``int8`` is zero where the CPU has no instructions for it.
    """

    read: float
    fp32: float
    int8: float


def is_steady(before: Limits, after: Limits) -> bool:
    """Returns true if no neighbour took much of the machine in between."""
    pairs = ((before.read, after.read), (before.fp32, after.fp32))
    return all(min(pair) >= _CLOSE * max(pair) for pair in pairs)


class Machine:
    """Measures :class:`Limits`. The pool must be loaded and as large as in the measurements that are compared."""

    def __init__(self, arch: str):
        with TemporaryDirectory() as directory:
            library = Path(directory, "limits.so")
            builder = CppBuilder(arch)
            subprocess.run([builder.compiler, *builder.flags, "-ffp-contract=fast", "-o", library, _SOURCE], check=True)
            self._library = ctypes.CDLL(str(library))
        self._library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        for function in (self._library.add_fp32, self._library.add_int8):
            function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_int64], ctypes.c_int64
        self._memory = in_huge_pages(_BUFFER_BYTES).fill_(1)
        self._place = 0

    def measure(self) -> Limits:
        """Returns the better of two samples of each limit, as for the measurements that are compared."""
        return Limits(
            read=_READ_BYTES / min(self._read_once() for _ in range(2)),
            fp32=max(self._add_once(self._library.add_fp32) for _ in range(2)),
            int8=max(self._add_once(self._library.add_int8) for _ in range(2)),
        )

    def _read_once(self) -> float:
        address = self._memory.data_ptr() + self._place
        self._place = (self._place + _READ_BYTES) % _BUFFER_BYTES
        start = time.perf_counter()
        self._library.read_memory(address, _READ_BYTES // _NUM_CHUNKS, _NUM_CHUNKS)
        return time.perf_counter() - start

    def _add_once(self, function: Callable[[int, int], int]) -> float:
        start = time.perf_counter()
        num_operations = function(_COUNT, _NUM_CHUNKS)
        return num_operations / (time.perf_counter() - start)
