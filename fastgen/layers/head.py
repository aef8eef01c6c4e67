"""From final hidden states to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastgen.compile.ops.linear import logits
from fastgen.compile.ops.softcap import SoftcapKernel, soft_cap
from fastgen.layers.embedding import EmbeddingTable
from fastgen.layers.linear import Linear


class Head(nn.Module):
    """``hidden [R, H] -> softcap(scale * (project(hidden) Wᵀ + bias)) [R, V]`` in fp32.

    ``table`` is the token embedding itself where the head is tied. A ``softcap_kernel`` caps, where there is one.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        *,
        project: Linear | None = None,
        biased: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        softcap_kernel: SoftcapKernel | None = None,
        device: torch.device,
    ):
        super().__init__()
        self.table, self.project, self.scale, self.softcap = table, project, scale, softcap
        self.softcap_kernel = softcap_kernel
        # In fp32, as the logits are.
        self.bias = nn.Parameter(torch.empty(table.num_rows, device=device), requires_grad=False) if biased else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.project is not None:
            hidden = self.project(hidden)
        if self.table.kernel is None:
            out = logits(hidden, self.table.weight, self.bias)
        else:
            out = hidden.new_empty(len(hidden), self.table.num_rows)
            self.table.kernel(hidden, self.table.packed, out)
            out = out if self.bias is None else out.add_(self.bias)
        if self.scale is not None:
            out = out * self.scale
        if self.softcap_kernel is not None:
            return self.softcap_kernel(out)
        return out if self.softcap is None else soft_cap(out, self.softcap)
