"""The spec of a whole model, and what follows from it: tensors, parameters, KV bytes and FLOPs per token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fastgen.models.spec.layer import AttentionSpec, LatentAttentionSpec, LayerSpec, MlpSpec, MoeSpec, NormSpec
from fastgen.models.spec.tensors import LinearSpec, NodeRef, TensorSpec, linears_of, tensors_of


@dataclass(frozen=True)
class PositionsSpec:
    """Learned positions: row ``position + offset`` of ``weight [num_rows, H]`` is added to the token's embedding."""

    weight: TensorSpec
    offset: int
    node: NodeRef


@dataclass(frozen=True)
class EmbeddingSpec:
    """Token embedding ``[V, E]`` times ``scale`` (rounded to the model's dtype).

    An optional projection ``E -> H`` follows, then optional learned positions are added, then an optional norm applies.
    With ``sum_ranks`` a rank holds some rows of the table, and the rows found are summed over the ranks before the
    projection.
    """

    tokens: TensorSpec
    project: LinearSpec | None
    positions: PositionsSpec | None
    node: NodeRef
    scale: float = 1.0
    norm: NormSpec | None = None
    sum_ranks: bool = False


@dataclass(frozen=True)
class HeadSpec:
    """The output head: ``logits = softcap(scale * (hidden Wᵀ + bias))``.

    ``weight`` is ``None`` if the head is the token embedding (tied). With ``gather_ranks`` a rank computes the logits
    of some tokens of the vocabulary, and rank 0 gets all of them.
    """

    weight: TensorSpec | None
    project: LinearSpec | None
    node: NodeRef
    bias: TensorSpec | None = None
    scale: float = 1.0
    softcap: float | None = None
    gather_ranks: bool = False


@dataclass(frozen=True)
class Rank:
    """One of ``count`` processes that share a model by tensor parallelism: number ``index``, from 0."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class ModelSpec:
    """A whole model, or what one ``rank`` holds of it. ``max_positions`` is ``None`` for architectures without a limit.

    ``vocab_size`` and ``hidden_size`` are those of the whole model. Numbers of heads are those that the rank has.
    """

    recipe: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int | None
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    head: HeadSpec
    # Glob patterns of checkpoint tensors that the model does not need.
    ignored_tensors: tuple[str, ...]
    rank: Rank = Rank()

    @property
    def tied(self) -> bool:
        return self.head.weight is None

    def tensors(self) -> Iterator[TensorSpec]:
        """Yields the tensor of every parameter, in load order: embedding, layers, final norm, head.

        A tensor of the checkpoint that several parameters share is yielded once for each of them.
        """
        return tensors_of((self.embedding, self.layers, self.final_norm, self.head))

    @property
    def num_parameters(self) -> int:
        """Returns the number of learned parameters; a tied head counts once."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors())

    def parts(self) -> Iterator[AttentionSpec | LatentAttentionSpec | MlpSpec | MoeSpec]:
        """Yields the parts of all layers, in order."""
        return (each.part for layer in self.layers for branch in layer.branches for each in branch.parts)

    def attentions(self) -> Iterator[AttentionSpec | LatentAttentionSpec]:
        """Yields the attentions of all layers, in order."""
        return (part for part in self.parts() if isinstance(part, AttentionSpec | LatentAttentionSpec))

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Returns the bytes that one token takes in the cache, summed over all layers."""
        return dtype_bytes * sum(part.cached_features for part in self.attentions())

    def flops_per_token(self, context: int) -> int:
        """Returns the floating-point operations of the forward pass of one token that sees ``context`` tokens.

        ``context`` includes the token itself. Only matrix products count, with two operations per multiply-add: all
        linear maps (in a mixture those of the chosen experts), the head, and q·k and p·v over the context (or over the
        window, if that is shorter). Embedding lookups, norms, activations and softmax do not count. A latent attention
        computes on the cached latent vectors: ``k_up`` is applied to each query instead of each key, and ``v_up`` to
        each output.
        """
        operations = 2 * math.prod((self.head.weight or self.embedding.tokens).shape)
        for linear in linears_of((self.embedding, self.layers, self.head)):
            operations += 2 * linear.in_features * linear.out_features
        for part in self.parts():
            if isinstance(part, MoeSpec):
                idle = part.experts[part.router.top_k :]  # any of them: all have the same size
                operations -= sum(2 * linear.in_features * linear.out_features for linear in linears_of(idle))
            elif isinstance(part, LatentAttentionSpec):
                operations += 2 * part.num_heads * (2 * part.kv_rank + part.rope_dim) * context
            elif isinstance(part, AttentionSpec):
                seen = context if part.sliding_window is None else min(context, part.sliding_window)
                operations += 4 * part.num_heads * part.head_dim * seen
        return operations
