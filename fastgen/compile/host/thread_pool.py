"""The process's one pool of threads, which every kernel of the ``cpp`` target shares.

It is a library of its own, built like a kernel (``templates/thread_pool.h`` says how it works) and loaded so that the
libraries of kernels find it. Between kernels its threads look for work for a moment and then sleep. Torch has
a pool of its own, whose threads do the same: whoever runs kernels keeps torch to one thread.
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
    """What builds the pool: :class:`fastgen.compile.build.loader.KernelLoader`, which belongs to a room above this."""

    def build(self, specs: Iterable[KernelSpec]) -> Sequence[Built]: ...


class ThreadPool:
    """How many threads kernels run on, the calling one included. After a fork the child begins with one."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        library.fastgen_start_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.fastgen_end_run.argtypes = [ctypes.c_int64]
        library.fastgen_start_run.restype = library.fastgen_end_run.restype = ctypes.c_int64

    @property
    def num_threads(self) -> int:
        return int(self._library.fastgen_num_threads())

    def resize(self, num_threads: int) -> int:
        """Makes it ``num_threads`` large, or as large as the system allows; returns its size.

        Waits for a kernel that runs. Raises :class:`InvalidArgumentError` for a number that is not 1 to 256.
        """
        if not 1 <= num_threads <= MAX_THREADS:
            raise InvalidArgumentError(f"num_threads={num_threads}: expected 1 to {MAX_THREADS}")
        return int(self._library.fastgen_set_num_threads(num_threads))

    def start(self, entry_point: int, slots: Tensor) -> int:
        """Have the kernel at ``entry_point`` run on threads of the pool's own, with arguments as it takes them from
        ``slots``, and return at once with a number for this. 0, with nothing done, where there is no such thread, or
        what was started last, by whomever, goes on.
        """
        return int(self._library.fastgen_start_run(entry_point, slots.data_ptr()))

    def end(self, number: int) -> float:
        """Help what was started under that ``number`` until it has ended. Returns at which second of
        :func:`time.perf_counter` the pool last ended something that was started so.
        """
        return int(self._library.fastgen_end_run(number)) / 1e9


def thread_pool_spec() -> KernelSpec:
    return KernelSpec(
        op="thread_pool", target="cpp", parameters={"spin_us": _SPIN_US, "max_threads": MAX_THREADS}, arguments=()
    )


def load_thread_pool(loader: Builds) -> ThreadPool:
    """The pool, built with ``loader`` and loaded by the first call; must come before kernels that use it are loaded."""
    global _pool
    with _lock:
        if _pool is None:
            (entry,) = loader.build([thread_pool_spec()])
            _pool = ThreadPool(ctypes.CDLL(str(entry.source.with_suffix(".so")), mode=ctypes.RTLD_GLOBAL))
        return _pool
