"""Multi-head latent attention (DeepSeek-V2, 2024) in its absorbed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastgen.compile.capture.recording import library_call
from fastgen.compile.ops.attention.reference import paged_attention
from fastgen.compile.ops.kv_write.reference import write
from fastgen.compile.ops.linear.cpp import LinearKernel
from fastgen.compile.ops.linear.reference import per_head_linear
from fastgen.layers.attention import Attend, Prepare
from fastgen.layers.kv_cache import LayerKVCache, PagedKVCache
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
    ``turned`` ``x [T, N, out] -> [T, N, rank]``. With a ``kernel`` all are packed for it.
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
        self.out_features = shape[1] if turned else shape[0] // num_heads
        if kernel is None:
            self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
            return
        sizes = (shape[0] // num_heads, shape[1])
        self.packed = kernel.pack(*(sizes[::-1] if turned else sizes), num_groups=num_heads)

    @property
    def slot(self) -> Tensor | PackedHeads:
        """Where the checkpoint's tensor goes."""
        if self.kernel is None:
            return self.weight.data
        return PackedHeads([self.packed.group(head) for head in range(self.num_heads)], self.turned)

    def forward(self, x: Tensor) -> Tensor:
        return per_head_linear(x, self._maps())

    def into(self, x: Tensor, out: Tensor) -> None:
        """The same by the kernel, or else the library; each row of ``out [T, N, …]`` may lie apart."""
        if self.kernel is not None:
            self.kernel(x, self.packed, out)
        else:
            library_call(torch.bmm, x.transpose(0, 1), self._maps().transpose(1, 2), out=out.transpose(0, 1))

    def _maps(self) -> Tensor:
        """``[N, out, in]``."""
        weight = self.weight.view(self.num_heads, -1, self.weight.shape[1])
        return weight.transpose(1, 2) if self.turned else weight


class LatentAttention(nn.Module):
    """``x [T, H] -> [T, H]``. The cache holds one vector a token: the normed latent ``c`` and the rotated shared key.

    Keys and values are linear in the latent, so instead of expanding it for every cached token, each head's map of it
    moves to the query and to the output: ``q·(Wk c) = (Wkᵀ q)·c`` and ``sum p (Wv c) = Wv (sum p c)``. That is
    attention with one KV head, whose keys are the cached vectors and whose values are their first ``kv_rank`` features.
    ``kernels`` compute all between the projections, where there are some.
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
        kernels: tuple[Prepare, Attend] | None = None,
    ):
        super().__init__()
        self.kernels = kernels
        self.q_down, self.q, self.kv_down, self.kv_norm = q_down, q, kv_down, kv_norm
        self.k_up, self.v_up, self.output, self.rotary = k_up, v_up, output, rotary
        self.kv_layer, self.num_heads, self.scale = kv_layer, num_heads, scale
        self.nope_dim, self.rope_dim = nope_dim, rope_dim

    def forward(self, x: Tensor, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        narrow = x if self.q_down is None else self.q_down(x)
        q, kv = self.q(narrow).view(len(x), self.num_heads, -1), self.kv_down(x)
        mix = self._mix if self.kernels is None else self._mix_by_kernels
        out: Tensor = self.output(mix(q, kv, batch, kv_cache.layers[self.kv_layer]).flatten(1))
        return out

    def _mix(self, q: Tensor, kv: Tensor, batch: RaggedBatch, cache: LayerKVCache) -> Tensor:
        latent, shared_key = kv.split_with_sizes([kv.shape[1] - self.rope_dim, self.rope_dim], dim=1)
        shared_key = self.rotary(shared_key.unsqueeze(1), batch.positions)
        cached = torch.cat([self.kv_norm(latent).unsqueeze(1), shared_key], dim=-1)
        write(cached, cache.k, batch.slot_mapping[cache.group])

        q_nope, q_rope = q.split_with_sizes([self.nope_dim, self.rope_dim], dim=-1)
        mapped = torch.cat([self.k_up(q_nope), self.rotary(q_rope, batch.positions)], dim=-1)
        seen = (cache.k, cache.v, batch.block_tables[cache.group], batch.cu_seqlens_q, batch.seq_lens)
        mixed: Tensor = self.v_up(paged_attention(mapped, *seen, scale=self.scale, sliding_window=None))
        return mixed

    def _mix_by_kernels(self, q: Tensor, kv: Tensor, batch: RaggedBatch, cache: LayerKVCache) -> Tensor:
        assert self.kernels is not None
        prepare, attend = self.kernels
        rank = kv.shape[1] - self.rope_dim
        mapped = q.new_empty(*q.shape[:2], kv.shape[1])
        given = {"cos_sin": self.rotary.cos_sin}
        given |= {f"kv_norm_{name}": parameter for name, parameter in self.kv_norm.named_parameters()}
        prepare(kv, q, mapped, batch.positions, cache.k, batch.slot_mapping[cache.group], **given)
        self.k_up.into(q[..., : self.nope_dim], mapped[..., :rank])
        seen = (cache.k, cache.v, batch.block_tables[cache.group], batch.cu_seqlens_q, batch.seq_lens)
        mixed = q.new_empty(*q.shape[:2], rank)
        attend(mapped, *seen, mixed)
        out = q.new_empty(*q.shape[:2], self.v_up.out_features)
        self.v_up.into(mixed, out)
        return out
