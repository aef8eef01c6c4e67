"""The table of cosines and sines by which rotary position embedding turns, shared by layers that rotate alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """``cos_sin [max_positions, R]`` fp32: for each position ``R / 2`` cosines, then as many sines.

    ``inv_freq [R/2]`` fp32, radians per position; ``attention_factor`` multiplies cosines and sines (YaRN).
    """

    cos_sin: Tensor

    def __init__(self, inv_freq: Tensor, *, attention_factor: float, max_positions: int, device: torch.device):
        super().__init__()
        # Computed on the host, so that all devices have the same bits. On ``meta`` there is nothing to compute.
        table = torch.empty(max_positions, 2 * len(inv_freq), device=device)
        if device.type != "meta":
            angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq.float())
            table = torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor
        self.register_buffer("cos_sin", table.to(device), persistent=False)
