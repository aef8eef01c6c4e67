"""Memory in huge pages, for what kernels read from end to end or here and there: weights, the KV cache, activations."""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which Python's mmap does not name


def in_huge_pages(size_bytes: int) -> Tensor:
    """Zeroed bytes, at the start of a huge page where the system has them; they go when all views of them have.

    A page counts when it is written, so a model that is larger than the machine can still be described.
    """
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + size_bytes]
