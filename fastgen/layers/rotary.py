"""Rotary position embedding: a table of cosines and sines, shared by the layers that rotate alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastgen.compile.ops.rotary.reference import apply_rotary


class Rotary(nn.Module):
    """Rotates the first ``2 * len(inv_freq)`` features of each head, in pairs.

    ``inv_freq [R/2]`` fp32, radians per position; ``attention_factor`` multiplies cosines and sines (YaRN);
    ``max_positions`` rows are tabulated. ``interleaved`` pairs neighbours, otherwise the two halves are paired.
    """

    cos_sin: Tensor

    def __init__(
        self,
        inv_freq: Tensor,
        *,
        attention_factor: float,
        max_positions: int,
        device: torch.device,
        interleaved: bool = False,
    ):
        super().__init__()
        self.interleaved = interleaved
        # Computed on the host, so that all devices have the same bits.
        at = device if device.type == "meta" else torch.device("cpu")
        positions = torch.arange(max_positions, dtype=torch.float32, device=at)
        angles = torch.outer(positions, inv_freq.to(at, torch.float32))
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor
        self.register_buffer("cos_sin", table.to(device), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x [T, heads, D]``, ``positions [T]`` -> the same shape and dtype."""
        return apply_rotary(x, positions, self.cos_sin, interleaved=self.interleaved)
