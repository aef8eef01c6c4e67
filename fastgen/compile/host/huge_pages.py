"""Memory in huge pages, for weights, the KV cache and activations."""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which Python's mmap does not name
_CPU = torch.device("cpu")


def in_huge_pages(size_bytes: int, device: torch.device = _CPU) -> Tensor:
    """Returns zeroed bytes ``[size_bytes]`` that begin at a huge page where the system has huge pages; the memory is
    freed with its last view. On ``meta`` the bytes are described only.

    A page counts when it is written, so a model that is larger than the machine can still be described. What lies
    behind the last whole huge page is in small pages, so no more than ``size_bytes`` is ever taken; a size of
    :func:`whole_huge_pages` has no such rest.
    """
    if device.type == "meta":
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        end = start + size_bytes - size_bytes % HUGE_PAGE
        memory.madvise(mmap.MADV_NOHUGEPAGE, end)
        if end > start:
            memory.madvise(mmap.MADV_HUGEPAGE, start, end - start)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=size_bytes)


def whole_huge_pages(size_bytes: int) -> int:
    """Returns the bytes of the huge pages that ``size_bytes`` lie in."""
    return -(-size_bytes // HUGE_PAGE) * HUGE_PAGE
