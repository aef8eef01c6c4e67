"""Soft caps, which keep scores and logits within bounds (Gemma 2, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, elementwise: near ``x`` where that is small, and never beyond ``±cap``."""
    return cap * torch.tanh(x / cap)
