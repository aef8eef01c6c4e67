"""Causal self-attention over the paged KV cache."""

from __future__ import annotations

from torch import Tensor, nn

from fastgen.compile.backends.modules.collectives import RankNorm
from fastgen.compile.backends.ops import AttentionOp, LinearOp
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.rotary import Rotary


class Attention(nn.Module):
    """``x [T, H] -> [T, H]``: one fused projection to q, k, v; norms; rotation; KV write; attention; output projection.

    ``attend`` computes all between the two projections, but norms over the heads of all ranks, which ``rank_norm``
    does. ``kv_layer`` is the attention's own layer of the KV cache.
    """

    def __init__(
        self,
        qkv: LinearOp,
        attend: AttentionOp,
        output: LinearOp,
        *,
        kv_layer: int,
        rotary: Rotary | None = None,
        rank_norm: RankNorm | None = None,
    ):
        super().__init__()
        self.qkv, self.attend, self.output, self.rank_norm = qkv, attend, output, rank_norm
        self.kv_layer, self.rotary = kv_layer, rotary

    def forward(self, x: Tensor, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        cos_sin = None if self.rotary is None else self.rotary.cos_sin
        qkv, cache = self.qkv(x), kv_cache.layers[self.kv_layer].view(batch)
        if self.rank_norm is not None:
            self.rank_norm(qkv)
        mixed = self.attend(qkv, cos_sin, batch.positions, cache)
        return self.output(mixed.flatten(1))
