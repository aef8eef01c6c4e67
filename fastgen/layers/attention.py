"""Causal self-attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fastgen.compile.ops.attention.reference import Alibi, paged_attention
from fastgen.compile.ops.kv_write.reference import write_kv
from fastgen.layers.kv_cache import LayerKVCache, PagedKVCache
from fastgen.layers.linear import Linear
from fastgen.layers.norm import QkNorm
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.rotary import Rotary

# Norms, rotates and writes to the cache: see :class:`fastgen.compile.ops.qkv.cpp.QkvKernel`, and for latent attention
# :class:`fastgen.compile.ops.latent.cpp.LatentKernel`.
Prepare = Callable[..., None]
# Attends, given ``q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, out``.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


class Attention(nn.Module):
    """``x [T, H] -> [T, H]``: one fused projection to q, k, v; norms; rotation; KV write; attention; output projection.

    ``kv_layer`` is the attention's own layer of the KV cache. ``kernels`` compute all between the two projections,
    where there are some.
    """

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        *,
        kv_layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        rotary: Rotary | None = None,
        sliding_window: int | None = None,
        q_norm: QkNorm | None = None,
        k_norm: QkNorm | None = None,
        alibi: Alibi | None = None,
        softcap: float | None = None,
        kernels: tuple[Prepare, Attend] | None = None,
    ):
        super().__init__()
        self.qkv, self.output, self.kv_layer = qkv, output, kv_layer
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.sliding_window, self.softcap = scale, sliding_window, softcap
        self.q_norm, self.k_norm, self.rotary, self.alibi = q_norm, k_norm, rotary, alibi
        self.kernels = kernels

    def forward(self, x: Tensor, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        cache = kv_cache.layers[self.kv_layer]
        qkv = self.qkv(x)
        mix = self._mix if self.kernels is None else self._mix_by_kernels
        out: Tensor = self.output(mix(qkv, batch, cache).flatten(1))
        return out

    def _mix(self, qkv: Tensor, batch: RaggedBatch, cache: LayerKVCache) -> Tensor:
        heads = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = heads.split_with_sizes([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, batch.positions), self.rotary(k, batch.positions)
        write_kv(k, v, cache.k, cache.v, batch.slot_mapping[cache.group])
        return paged_attention(
            q,
            cache.k,
            cache.v,
            batch.block_tables[cache.group],
            batch.cu_seqlens_q,
            batch.seq_lens,
            scale=self.scale,
            sliding_window=self.sliding_window,
            alibi=self.alibi,
            softcap=self.softcap,
        )

    def _mix_by_kernels(self, qkv: Tensor, batch: RaggedBatch, cache: LayerKVCache) -> Tensor:
        assert self.kernels is not None
        prepare, attend = self.kernels
        given = {} if self.rotary is None else {"cos_sin": self.rotary.cos_sin}
        for prefix, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            parameters = {} if norm is None else dict(norm.norm.named_parameters())
            given |= {f"{prefix}_{name}": parameter for name, parameter in parameters.items()}
        prepare(qkv, batch.positions, cache.k, cache.v, batch.slot_mapping[cache.group], **given)
        q = qkv.view(len(qkv), -1, self.head_dim)[:, : self.num_heads]
        mixed = q.new_empty(q.shape)
        tables = batch.block_tables[cache.group]
        attend(q, cache.k, cache.v, tables, batch.cu_seqlens_q, batch.seq_lens, mixed)
        return mixed
