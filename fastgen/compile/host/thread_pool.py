"""The thread pool of the process, which all C++ kernels share.

It is a library of its own, built like a kernel (``templates/thread_pool.h`` says how it works) and loaded so that the
libraries of kernels find it. Between kernels its threads spin for a moment and then sleep. Torch has
its own pool, whose threads do the same, so an engine keeps torch to one thread.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fastgen.compile.spec import KernelSpec
from fastgen.errors import InvalidArgumentError

MAX_THREADS = 256
_SPIN_US = 50

_lock = threading.Lock()
_pool: ThreadPool | None = None


class Built(Protocol):
    """A built library; its shared object lies beside its ``source``."""

    @property
    def source(self) -> Path: ...


class Builds(Protocol):
    """Builds the pool; it is a :class:`fastgen.compile.build.loader.KernelLoader`, which this folder does
    not import.
    """

    def build(self, specs: Iterable[KernelSpec]) -> Sequence[Built]: ...


class ThreadPool:
    """The threads that kernels run on, including the calling one. After a fork the child has one."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        library.fastgen_start_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.fastgen_end_run.argtypes = [ctypes.c_int64]
        library.fastgen_start_run.restype = library.fastgen_end_run.restype = ctypes.c_int64

    @property
    def num_threads(self) -> int:
        return int(self._library.fastgen_num_threads())

    def resize(self, num_threads: int) -> int:
        """Resizes the pool to ``num_threads``, or to as many as the system allows; returns its size.

        Waits for a running kernel. Raises :class:`InvalidArgumentError` for a number that is not 1 to 256.
        """
        if not 1 <= num_threads <= MAX_THREADS:
            raise InvalidArgumentError(f"num_threads={num_threads}: expected 1 to {MAX_THREADS}")
        return int(self._library.fastgen_set_num_threads(num_threads))

    def start(self, entry_point: int, slots: Tensor) -> int:
        """Starts the kernel at ``entry_point`` on the pool's own threads, with arguments from ``slots``, and returns a
        number for this run at once. Returns 0 and does nothing where the pool has no other thread, or the run that was
        started last has not ended.
        """
        return int(self._library.fastgen_start_run(entry_point, slots.data_ptr()))

    def end(self, number: int) -> float:
        """Works on the run of that ``number`` until it has ended. Returns the time, in seconds of
        :func:`time.perf_counter`, at which the pool's last run ended.
        """
        return int(self._library.fastgen_end_run(number)) / 1e9


def thread_pool_spec() -> KernelSpec:
    return KernelSpec(
        op="thread_pool", target="cpp", parameters={"spin_us": _SPIN_US, "max_threads": MAX_THREADS}, arguments=()
    )


def load_thread_pool(loader: Builds) -> ThreadPool:
    """Returns the pool. The first call builds it with ``loader`` and loads it; kernels that use it are loaded later."""
    global _pool
    with _lock:
        if _pool is None:
            (entry,) = loader.build([thread_pool_spec()])
            _pool = ThreadPool(ctypes.CDLL(str(entry.source.with_suffix(".so")), mode=ctypes.RTLD_GLOBAL))
        return _pool
