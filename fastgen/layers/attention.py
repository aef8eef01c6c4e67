"""Causal self-attention over the paged KV cache."""

from __future__ import annotations

from torch import Tensor, nn

from fastgen.compile.backends.ops import LinearOp, ProjectedAttentionOp
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.rotary import Rotary


class Attention(nn.Module):
    """``x [T, H] -> [T, H]``: one fused projection to q, k, v; norms; rotation; KV write; attention; output projection.

    ``attend`` computes all but the output projection. ``kv_layer`` is the attention's own layer of the KV cache.
    """

    def __init__(self, attend: ProjectedAttentionOp, output: LinearOp, *, kv_layer: int, rotary: Rotary | None = None):
        super().__init__()
        self.attend, self.output = attend, output
        self.kv_layer, self.rotary = kv_layer, rotary

    def forward(self, x: Tensor, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        cos_sin = None if self.rotary is None else self.rotary.cos_sin
        mixed = self.attend(x, cos_sin, batch.positions, kv_cache.layers[self.kv_layer].view(batch))
        return self.output(mixed.flatten(1))
