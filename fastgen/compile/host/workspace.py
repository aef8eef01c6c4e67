"""Memory that kernels work in: made once, as large as the kernel needs that needs most of it."""

from __future__ import annotations

import torch

_CPU = torch.device("cpu")


class Workspace:
    """Holds ``memory`` for kernels that run one after the other. On ``meta`` it is described only."""

    def __init__(self, device: torch.device = _CPU):
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def require(self, size_bytes: int) -> None:
        """Makes the memory as large as that, unless it is larger; what was in it is lost."""
        if size_bytes > self.memory.numel():
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=self.memory.device)
