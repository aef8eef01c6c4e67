"""Soft caps, which bound scores and logits (Gemma 2, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Computes ``cap * tanh(x / cap)``, elementwise: close to small ``x``, and never beyond ``±cap``."""
    return cap * torch.tanh(x / cap)
