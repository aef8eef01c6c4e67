"""The C library's heap in a server: what is freed goes back to the system."""

from __future__ import annotations

import ctypes
import platform

# Parameters of glibc's ``mallopt``, by their numbers in ``malloc.h``.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# Blocks from this size have memory of their own, which goes back to the system when they are freed.
_LARGE_BYTES = 1 << 20
# A heap with more free bytes at its end gives them back.
_FREE_BYTES = 4 << 20
_MAX_HEAPS = 2


def return_what_is_freed() -> None:
    """Makes glibc return freed memory to the system. Other C libraries are left as they are. To be called before there
    are other threads.

    By default glibc has a heap for each of many threads. After a large block was freed it takes blocks of that size
    from these heaps, too, up to 32 MiB. So a server that has read many large bodies would keep their memory for good.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
    libc.mallopt(_TRIM_THRESHOLD, _FREE_BYTES)
    libc.mallopt(_ARENA_MAX, _MAX_HEAPS)
