"""Memory in huge pages, for weights, the KV cache and activations."""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which Python's mmap does not name


def in_huge_pages(size_bytes: int) -> Tensor:
    """Returns zeroed bytes at the start of a huge page, where the system has them; they are freed with their last view.

    A page takes memory once it is written, so a model that is larger than the machine can still be described.
    """
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory_bytes = torch.frombuffer(memory, dtype=torch.uint8)
    start = -memory_bytes.data_ptr() % HUGE_PAGE
    return memory_bytes[start : start + size_bytes]
