"""The model that is built from a model spec. It computes ragged batches."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from fastgen.compile.backends.model_ops import Ops
from fastgen.compile.backends.ops import AddOp, AllReduceOp, NormOp
from fastgen.layers.attention import Attention
from fastgen.layers.embedding import Embedding
from fastgen.layers.head import Head
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.latent_attention import LatentAttention
from fastgen.layers.mlp import Mlp
from fastgen.layers.moe import Moe
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.residual import Reader, Stream

Module = Attention | LatentAttention | Mlp | Moe


class Part(nn.Module):
    """Applies ``module`` to what ``read`` returns."""

    def __init__(self, read: Reader, module: Module):
        super().__init__()
        self.read, self.module = read, module

    def forward(self, stream: Stream, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        x = self.read(stream)
        attends = isinstance(self.module, Attention | LatentAttention)
        out: Tensor = self.module(x, batch, kv_cache) if attends else self.module(x)
        return out


class Branch(nn.Module):
    """``sum_norm(x + scale * output_norm(part1(norm(x)) + part2(norm(x)) …))``; norms and scale may be absent.

    ``read`` reads the stream for all parts; without it each part reads the stream itself. The sum stays pending on the
    stream; ``read_sum``, if there is one, adds and norms it at once, and the stream continues with the result.
    ``add_part`` sums the results of two parts, ``sum_ranks`` adds the parts of all ranks.
    """

    def __init__(
        self,
        read: Reader | None,
        parts: Iterable[Part],
        *,
        add_part: AddOp | None = None,
        sum_ranks: AllReduceOp | None = None,
        output_norm: NormOp | None = None,
        read_sum: Reader | None = None,
    ):
        super().__init__()
        self.read, self.parts = read, nn.ModuleList(parts)
        self.add_part, self.sum_ranks, self.output_norm, self.read_sum = add_part, sum_ranks, output_norm, read_sum

    def forward(self, stream: Stream, batch: RaggedBatch, kv_cache: PagedKVCache) -> None:
        inner = stream if self.read is None else Stream(self.read(stream))
        first, *parallel = self.parts
        out: Tensor = first(inner, batch, kv_cache)
        for part in parallel:
            assert self.add_part is not None
            out = self.add_part(out, part(inner, batch, kv_cache))
        if self.sum_ranks is not None:
            out = self.sum_ranks(out)
        stream.pending = out if self.output_norm is None else self.output_norm(out)
        if self.read_sum is not None:
            stream.x = self.read_sum(stream)


class Layer(nn.Module):
    """The branches of one layer, in order."""

    def __init__(self, branches: Iterable[Branch]):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, stream: Stream, batch: RaggedBatch, kv_cache: PagedKVCache) -> None:
        for branch in self.branches:
            branch(stream, batch, kv_cache)


class CausalLM(nn.Module):
    """Embedding, layers, final norm. The head runs separately in :meth:`logits`, because only some rows need it.

    ``ops`` are those of all layers, and hold what they share; ``read_last`` reads the stream behind the layers.
    """

    def __init__(
        self,
        embedding: Embedding,
        layers: Iterable[Layer],
        read_last: Reader,
        head: Head,
        ops: Ops,
    ):
        super().__init__()
        self.embedding, self.layers, self.read_last, self.head = embedding, nn.ModuleList(layers), read_last, head
        self.ops = ops

    def forward(self, batch: RaggedBatch, kv_cache: PagedKVCache) -> Tensor:
        """Returns hidden states ``[T, H]`` of the batch; writes its keys and values into ``kv_cache``."""
        self.ops.plan_step(batch.cu_seqlens_q, batch.seq_lens)
        stream = Stream(self.embedding(batch))
        for layer in self.layers:
            layer(stream, batch, kv_cache)
        hidden: Tensor = self.read_last(stream)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the fp32 logits ``[R, V]`` of ``hidden [R, H]``; generated kernels write them to ``out`` if given."""
        logits: Tensor = self.head(hidden, out)
        return logits
