"""From final hidden states to logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastgen.compile.capture.recording import library_call
from fastgen.compile.ops.linear.reference import logits
from fastgen.compile.ops.softcap.reference import soft_cap
from fastgen.layers.embedding import EmbeddingTable
from fastgen.layers.linear import Linear, PlainLinear

# Caps in place.
Cap = Callable[[Tensor], Tensor]


class Head(nn.Module):
    """``hidden [R, H] -> softcap(scale * (project(hidden) Wᵀ + bias)) [R, V]`` in fp32.

    ``table`` is the token embedding itself where the head is tied. A ``softcap_kernel`` caps, where there is one, and a
    ``plain_kernel`` multiplies with a table that is not packed.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        *,
        project: Linear | None = None,
        biased: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        softcap_kernel: Cap | None = None,
        plain_kernel: PlainLinear | None = None,
        device: torch.device,
    ):
        super().__init__()
        self.table, self.project, self.scale, self.softcap = table, project, scale, softcap
        self.softcap_kernel, self.plain_kernel = softcap_kernel, plain_kernel
        # In fp32, as the logits are. A kernel adds the one that it finds with its weight.
        self.bias = (
            nn.Parameter(torch.empty(table.num_rows, device=device), requires_grad=False)
            if biased and table.kernel is None
            else None
        )

    @property
    def bias_slot(self) -> Tensor | None:
        """Where the checkpoint's bias goes."""
        return self.bias if self.table.kernel is None else self.table.packed.bias[: self.table.num_rows]

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if self.project is not None:
            hidden = self.project(hidden)
        if self.table.kernel is None and self.plain_kernel is None:
            out = logits(hidden, self.table.weight, self.bias)
        else:
            if out is None:
                out = hidden.new_empty(len(hidden), self.table.num_rows, dtype=torch.float32)
            self._multiply(hidden, out)
        if self.scale is not None:
            library_call(torch.mul, out, self.scale, out=out)
        if self.softcap_kernel is not None:
            return self.softcap_kernel(out)
        return out if self.softcap is None else soft_cap(out, self.softcap)

    def _multiply(self, hidden: Tensor, out: Tensor) -> None:
        if self.table.kernel is not None:
            self.table.kernel(hidden, self.table.packed, out)
        elif self.plain_kernel is not None:
            self.plain_kernel(hidden, self.table.weight, None, out)
            if self.bias is not None:
                library_call(torch.add, out, self.bias, out=out)
