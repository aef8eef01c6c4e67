"""Multi-head latent attention (DeepSeek-V2, 2024) in its absorbed form."""

from __future__ import annotations

from torch import Tensor, nn

from fastgen.compile.backends.ops import LatentAttentionOp, LinearOp, NormOp
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.rotary import Rotary


class QueryDown(nn.Module):
    """``x [T, H] -> [T, q_rank]``: the way to queries through a narrow normed vector."""

    def __init__(self, down: LinearOp, norm: NormOp | None):
        super().__init__()
        self.down, self.norm = down, norm

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.down(x)
        return narrow if self.norm is None else self.norm(narrow)


class LatentAttention(nn.Module):
    """``x [T, H] -> [T, H]``. The cache holds one vector a token: the normed latent ``c`` and the rotated shared key.

    Keys and values are linear in the latent, so instead of expanding it for every cached token, each head's map of it
    moves to the query and to the output: ``q·(Wk c) = (Wkᵀ q)·c`` and ``sum p (Wv c) = Wv (sum p c)``. That is
    attention with one KV head, whose keys are the cached vectors and whose values are their first ``kv_rank`` features.
    ``attend`` computes it, maps of heads included: all between the projections.
    """

    def __init__(
        self,
        q_down: QueryDown | None,
        q: LinearOp,
        kv_down: LinearOp,
        attend: LatentAttentionOp,
        output: LinearOp,
        rotary: Rotary,
        *,
        kv_layer: int,
        num_heads: int,
    ):
        super().__init__()
        self.q_down, self.q, self.kv_down, self.attend, self.output = q_down, q, kv_down, attend, output
        self.rotary, self.kv_layer, self.num_heads = rotary, kv_layer, num_heads

    def forward(self, x: Tensor, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        narrow = x if self.q_down is None else self.q_down(x)
        q, kv = self.q(narrow).view(len(x), self.num_heads, -1), self.kv_down(x)
        cache = kv_cache.layers[self.kv_layer].view(batch)
        mixed = self.attend(q, kv, self.rotary.cos_sin, batch.positions, cache)
        return self.output(mixed.flatten(1))
