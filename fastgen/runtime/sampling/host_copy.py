"""Copies of a step's results to the host, which are waited for only when they are needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopies:
    """Copies of ``tensors`` as they are after everything launched so far. On a CPU they are complete at once."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._event: torch.cuda.Event | None = None
        self._copies = [
            torch.empty(each.shape, dtype=each.dtype, pin_memory=each.is_cuda).copy_(each, non_blocking=True)
            for each in tensors
        ]
        if any(each.is_cuda for each in tensors):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """Waits for the copies, and returns them. Does not wait for anything launched after them."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
