"""The ragged-batch model a spec is built into."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from fastgen.layers.attention import Attention
from fastgen.layers.embedding import Embedding
from fastgen.layers.head import Head
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.latent_attention import LatentAttention
from fastgen.layers.mlp import GatedMlp, Mlp
from fastgen.layers.moe import Moe
from fastgen.layers.norm import Norm
from fastgen.layers.ragged_batch import RaggedBatch

Module = Attention | LatentAttention | Mlp | GatedMlp | Moe


class Part(nn.Module):
    """``module(norm(x))``; the norm may be absent."""

    def __init__(self, norm: Norm | None, module: Module):
        super().__init__()
        self.norm, self.module = norm, module

    def forward(self, x: Tensor, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        if self.norm is not None:
            x = self.norm(x)
        attends = isinstance(self.module, Attention | LatentAttention)
        out: Tensor = self.module(x, batch, kv_cache) if attends else self.module(x)
        return out


class Branch(nn.Module):
    """``sum_norm(x + scale * output_norm(part1(norm(x)) + part2(norm(x)) …))``; norms and scale may be absent."""

    def __init__(
        self,
        norm: Norm | None,
        parts: Iterable[Part],
        *,
        output_norm: Norm | None = None,
        scale: float | None = None,
        sum_norm: Norm | None = None,
    ):
        super().__init__()
        self.norm, self.parts, self.output_norm = norm, nn.ModuleList(parts), output_norm
        self.scale, self.sum_norm = scale, sum_norm

    def forward(self, x: Tensor, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        inner = x if self.norm is None else self.norm(x)
        first, *parallel = self.parts
        out: Tensor = first(inner, batch, kv_cache)
        for part in parallel:
            out = out + part(inner, batch, kv_cache)
        if self.output_norm is not None:
            out = self.output_norm(out)
        if self.scale is not None:
            out = out * self.scale
        x = x + out
        return x if self.sum_norm is None else self.sum_norm(x)


class Layer(nn.Module):
    """The branches of one layer, in order."""

    def __init__(self, branches: Iterable[Branch]):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        for branch in self.branches:
            x = branch(x, batch, kv_cache)
        return x


class CausalLM(nn.Module):
    """Embedding, layers, final norm; :meth:`logits` is apart, for only some rows reach the head."""

    def __init__(self, embedding: Embedding, layers: Iterable[Layer], final_norm: Norm | None, head: Head):
        super().__init__()
        self.embedding, self.layers, self.final_norm, self.head = embedding, nn.ModuleList(layers), final_norm, head

    def forward(self, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        """Hidden states ``[T, H]`` of the batch; writes its keys and values into ``kv_cache``."""
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x, batch, kv_cache)
        hidden: Tensor = x if self.final_norm is None else self.final_norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [R, H] -> [R, V]`` in fp32."""
        out: Tensor = self.head(hidden)
        return out
