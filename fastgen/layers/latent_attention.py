"""Multi-head latent attention (DeepSeek-V2, 2024) in its absorbed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastgen.compile.ops.attention import paged_attention
from fastgen.compile.ops.attention_cpp import CppAttention
from fastgen.compile.ops.kv_write import write
from fastgen.compile.ops.linear import LinearKernel, per_head_linear
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.linear import Linear, PackedHeads
from fastgen.layers.norm import Norm
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.rotary import Rotary


class QueryDown(nn.Module):
    """``x [T, H] -> [T, q_rank]``: the way to queries through a narrow normed vector."""

    def __init__(self, down: Linear, norm: Norm | None):
        super().__init__()
        self.down, self.norm = down, norm

    def forward(self, x: Tensor) -> Tensor:
        narrow: Tensor = self.down(x)
        return narrow if self.norm is None else self.norm(narrow)


class HeadLinear(nn.Module):
    """The checkpoint's ``[N * out, rank]``, a map of its own for each head: ``x [T, N, rank] -> [T, N, out]``, or
    ``turned`` ``x [T, N, out] -> [T, N, rank]``. With a ``kernel`` each head's is packed for it.
    """

    def __init__(
        self,
        num_heads: int,
        shape: tuple[int, int],
        *,
        turned: bool,
        dtype: torch.dtype,
        device: torch.device,
        kernel: LinearKernel | None = None,
    ):
        super().__init__()
        self.num_heads, self.turned, self.kernel = num_heads, turned, kernel
        if kernel is None:
            self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
            return
        sizes = (shape[0] // num_heads, shape[1])
        self.packed = [kernel.pack(*(sizes[::-1] if turned else sizes)) for _ in range(num_heads)]

    @property
    def slot(self) -> Tensor | PackedHeads:
        """Where the checkpoint's tensor goes."""
        return self.weight.data if self.kernel is None else PackedHeads(self.packed, self.turned)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is None:
            weight = self.weight.view(self.num_heads, -1, self.weight.shape[1])
            return per_head_linear(x, weight.transpose(1, 2) if self.turned else weight)
        out = x.new_empty(*x.shape[:2], self.packed[0].out_features)
        for head, packed in enumerate(self.packed):
            self.kernel(x[:, head], packed, out[:, head])
        return out


class LatentAttention(nn.Module):
    """``x [T, H] -> [T, H]``. The cache holds one vector a token: the normed latent ``c`` and the rotated shared key.

    Keys and values are linear in the latent, so instead of expanding it for every cached token, each head's map of it
    moves to the query and to the output: ``q·(Wk c) = (Wkᵀ q)·c`` and ``sum p (Wv c) = Wv (sum p c)``. That is
    attention with one KV head, whose keys are the cached vectors and whose values are their first ``kv_rank`` features.
    A ``kernel`` computes it, where there is one.
    """

    def __init__(
        self,
        q_down: QueryDown | None,
        q: Linear,
        kv_down: Linear,
        kv_norm: Norm,
        k_up: HeadLinear,
        v_up: HeadLinear,
        output: Linear,
        rotary: Rotary,
        *,
        kv_layer: int,
        num_heads: int,
        nope_dim: int,
        rope_dim: int,
        scale: float,
        kernel: CppAttention | None = None,
    ):
        super().__init__()
        self.kernel = kernel
        self.q_down, self.q, self.kv_down, self.kv_norm = q_down, q, kv_down, kv_norm
        self.k_up, self.v_up, self.output, self.rotary = k_up, v_up, output, rotary
        self.kv_layer, self.num_heads, self.scale = kv_layer, num_heads, scale
        self.nope_dim, self.rope_dim = nope_dim, rope_dim

    def forward(self, x: Tensor, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        cache = kv_cache.layers[self.kv_layer]
        latent, shared_key = self.kv_down(x).split([self.kv_down.out_features[0] - self.rope_dim, self.rope_dim], dim=1)
        shared_key = self.rotary(shared_key.unsqueeze(1), batch.positions)
        cached = torch.cat([self.kv_norm(latent).unsqueeze(1), shared_key], dim=-1)
        write(cached, cache.k, batch.slot_mapping[cache.group])

        narrow = x if self.q_down is None else self.q_down(x)
        q = self.q(narrow).view(len(x), self.num_heads, -1)
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        q = torch.cat([self.k_up(q_nope), self.rotary(q_rope, batch.positions)], dim=-1)
        seen = (cache.k, cache.v, batch.block_tables[cache.group], batch.cu_seqlens_q, batch.seq_lens)
        if self.kernel is None:
            mixed = paged_attention(q, *seen, scale=self.scale, sliding_window=None)
        else:
            mixed = q.new_empty(*q.shape[:2], cache.v.shape[-1])
            self.kernel(q, *seen, mixed)
        out: Tensor = self.output(self.v_up(mixed).flatten(1))
        return out
