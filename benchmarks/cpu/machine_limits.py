"""What this machine can do at most, measured where and when it is compared with: read bandwidth and fp32 rate."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fastgen.compile.build_cpp import CppBuilder

_SOURCE = Path(__file__).with_suffix(".cpp")
_BUFFER_BYTES = 256 << 20  # beyond any cache
_READ_BYTES = 16 << 20  # a sample: about a millisecond
_NUM_CHUNKS = 16
_FP32_COUNT = 2000
_CHAINS, _LANES = 24, 16  # as in the source


@dataclass(frozen=True)
class Limits:
    """Bytes a second from memory and operations (two for a multiply-add) a second in fp32, on the pool's threads."""

    read: float
    fp32: float


class Machine:
    """Measures :class:`Limits`; the pool is loaded, and as large as what is compared with them uses."""

    def __init__(self, arch: str):
        with TemporaryDirectory() as directory:
            library = Path(directory, "limits.so")
            builder = CppBuilder(arch)
            subprocess.run([builder.compiler, *builder.flags, "-ffp-contract=fast", "-o", library, _SOURCE], check=True)
            self._library = ctypes.CDLL(str(library))
        self._library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._library.add_fp32.argtypes = [ctypes.c_int64, ctypes.c_int64]
        self._memory = mmap.mmap(-1, _BUFFER_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, _BUFFER_BYTES, mmap.PAGESIZE):
            self._memory[start] = 1
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._place = 0

    def measure(self) -> Limits:
        """The better of two samples each, as what is compared with them is measured."""
        return Limits(
            read=_READ_BYTES / min(self._read_once() for _ in range(2)),
            fp32=2 * _LANES * _CHAINS * _FP32_COUNT * _NUM_CHUNKS / min(self._fp32_once() for _ in range(2)),
        )

    def _read_once(self) -> float:
        address = self._start + self._place
        self._place = (self._place + _READ_BYTES) % _BUFFER_BYTES
        start = time.perf_counter()
        self._library.read_memory(address, _READ_BYTES // _NUM_CHUNKS, _NUM_CHUNKS)
        return time.perf_counter() - start

    def _fp32_once(self) -> float:
        start = time.perf_counter()
        self._library.add_fp32(_FP32_COUNT, _NUM_CHUNKS)
        return time.perf_counter() - start
