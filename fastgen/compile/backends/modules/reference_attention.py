"""Attention by torch alone, plain and latent: norms of heads, rotation, the cache write, scores and sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastgen.compile.backends.modules.reference import HeadMaps, Norm
from fastgen.compile.backends.paged_view import PagedView
from fastgen.compile.ops.attention.reference import Alibi, paged_attention
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.kv_write.reference import write, write_kv
from fastgen.compile.ops.rotary.reference import apply_rotary


class Attention(nn.Module):
    """Norms, rotation, KV write and attention, one after the other.

    ``q_norm`` and ``k_norm`` norm each head by itself; those in ``over_all`` all heads laid together.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        interleaved: bool = False,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        over_all: tuple[bool, bool] = (False, False),
        alibi: Alibi | None = None,
    ):
        super().__init__()
        self.shape, self.interleaved, self.alibi = shape, interleaved, alibi
        self.q_norm, self.k_norm, self.over_all = q_norm, k_norm, over_all

    def forward(self, qkv: Tensor, cos_sin: Tensor | None, positions: Tensor, cache: PagedView) -> Tensor:
        shape = self.shape
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        q, k, v = heads.split_with_sizes([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if self.q_norm is not None:
            q = _normed(q, self.q_norm, over_all=self.over_all[0])
        if self.k_norm is not None:
            k = _normed(k, self.k_norm, over_all=self.over_all[1])
        if cos_sin is not None:
            q = apply_rotary(q, positions, cos_sin, interleaved=self.interleaved)
            k = apply_rotary(k, positions, cos_sin, interleaved=self.interleaved)
        write_kv(k, v, cache.k, cache.v, cache.slots)
        return paged_attention(
            q,
            cache.k,
            cache.v,
            cache.block_tables,
            cache.cu_seqlens_q,
            cache.seq_lens,
            scale=shape.scale,
            sliding_window=shape.sliding_window,
            alibi=self.alibi,
            softcap=shape.softcap,
        )


def _normed(x: Tensor, norm: Norm, *, over_all: bool) -> Tensor:
    """Norms queries or keys ``x [T, heads, D]``."""
    normed: Tensor = norm(x.flatten(1)).view_as(x) if over_all else norm(x)
    return normed


class LatentAttention(nn.Module):
    """Latent attention in its absorbed form: each head's maps of the latent move to its query and its output."""

    def __init__(
        self,
        kv_norm: Norm,
        k_up: HeadMaps,
        v_up: HeadMaps,
        *,
        nope_dim: int,
        rope_dim: int,
        scale: float,
        interleaved: bool,
    ):
        super().__init__()
        self.kv_norm, self.k_up, self.v_up = kv_norm, k_up, v_up
        self.nope_dim, self.rope_dim, self.scale, self.interleaved = nope_dim, rope_dim, scale, interleaved

    def forward(self, q: Tensor, kv: Tensor, cos_sin: Tensor, positions: Tensor, cache: PagedView) -> Tensor:
        latent, shared_key = kv.split_with_sizes([kv.shape[1] - self.rope_dim, self.rope_dim], dim=1)
        shared_key = self._rotated(shared_key.unsqueeze(1), positions, cos_sin)
        cached = torch.cat([self.kv_norm(latent).unsqueeze(1), shared_key], dim=-1)
        write(cached, cache.k, cache.slots)

        q_nope, q_rope = q.split_with_sizes([self.nope_dim, self.rope_dim], dim=-1)
        mapped = torch.cat([self.k_up(q_nope), self._rotated(q_rope, positions, cos_sin)], dim=-1)
        seen = (cache.k, cache.v, cache.block_tables, cache.cu_seqlens_q, cache.seq_lens)
        mixed: Tensor = self.v_up(paged_attention(mapped, *seen, scale=self.scale, sliding_window=None))
        return mixed

    def _rotated(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        return apply_rotary(x, positions, cos_sin, interleaved=self.interleaved)
