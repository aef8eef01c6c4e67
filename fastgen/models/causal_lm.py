"""The ragged-batch model a spec is built into."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from fastgen.compile.ops.add.reference import scaled_add
from fastgen.compile.ops.attention.triton import AttentionPlan
from fastgen.layers.attention import Attention
from fastgen.layers.embedding import Embedding
from fastgen.layers.head import Head
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.latent_attention import LatentAttention
from fastgen.layers.mlp import GatedMlp, Mlp
from fastgen.layers.moe import Moe
from fastgen.layers.norm import Norm
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.residual import Add, Stream, settled

Module = Attention | LatentAttention | Mlp | GatedMlp | Moe


class Part(nn.Module):
    """``module(norm(x))``; the norm may be absent."""

    def __init__(self, norm: Norm | None, module: Module):
        super().__init__()
        self.norm, self.module = norm, module

    def forward(self, stream: Stream, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        x = settled(stream) if self.norm is None else self.norm(stream)
        attends = isinstance(self.module, Attention | LatentAttention)
        out: Tensor = self.module(x, batch, kv_cache) if attends else self.module(x)
        return out


class Branch(nn.Module):
    """``sum_norm(x + scale * output_norm(part1(norm(x)) + part2(norm(x)) …))``; norms and scale may be absent.

    ``add(x, out)`` is ``x + scale * out``, now or later, and ``add_part`` the sum of two parts.
    """

    def __init__(
        self,
        norm: Norm | None,
        parts: Iterable[Part],
        *,
        output_norm: Norm | None = None,
        sum_norm: Norm | None = None,
        add: Callable[[Tensor, Tensor], Stream] = scaled_add,
        add_part: Add = scaled_add,
    ):
        super().__init__()
        self.norm, self.parts, self.output_norm = norm, nn.ModuleList(parts), output_norm
        self.sum_norm, self.add, self.add_part = sum_norm, add, add_part

    def forward(self, stream: Stream, batch: RaggedBatch, kv_cache: PagedKVCache) -> Stream:
        inner = stream if self.norm is None else self.norm(stream)
        first, *parallel = self.parts
        out: Tensor = first(inner, batch, kv_cache)
        for part in parallel:
            out = self.add_part(out, part(inner, batch, kv_cache))
        if self.output_norm is not None:
            out = self.output_norm(out)
        stream = self.add(settled(stream), out)
        return stream if self.sum_norm is None else self.sum_norm(stream)


class Layer(nn.Module):
    """The branches of one layer, in order."""

    def __init__(self, branches: Iterable[Branch]):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, stream: Stream, batch: RaggedBatch, kv_cache: PagedKVCache) -> Stream:
        for branch in self.branches:
            stream = branch(stream, batch, kv_cache)
        return stream


class CausalLM(nn.Module):
    """Embedding, layers, final norm; :meth:`logits` is apart, for only some rows reach the head.

    ``plans`` look at a step's lengths before its layers do.
    """

    def __init__(
        self,
        embedding: Embedding,
        layers: Iterable[Layer],
        final_norm: Norm | None,
        head: Head,
        plans: Iterable[AttentionPlan] = (),
    ):
        super().__init__()
        self.plans = list(plans)
        self.embedding, self.layers, self.final_norm, self.head = embedding, nn.ModuleList(layers), final_norm, head

    def forward(self, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        """Hidden states ``[T, H]`` of the batch; writes its keys and values into ``kv_cache``."""
        for plan in self.plans:
            plan(batch.cu_seqlens_q, batch.seq_lens)
        stream: Stream = self.embedding(batch)
        for layer in self.layers:
            stream = layer(stream, batch, kv_cache)
        return settled(stream) if self.final_norm is None else self.final_norm(stream)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``hidden [R, H] -> [R, V]`` in fp32; where kernels compute it in ``out``, if that is given."""
        logits: Tensor = self.head(hidden, out)
        return logits
