"""Results of a step on their way to the host, so that nobody waits for them before they are needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopies:
    """Copies of ``tensors`` as they are behind what was launched so far. Off the GPU they are here at once."""

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
        """The copies, when they are here; what was launched behind them is not waited for."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
