"""Describes how a model is split over ranks, in words and bytes, before a weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fastgen.compile.weights.formats import QuantizedFormat
from fastgen.models.shard.obstacles import Part, by_inputs, parallel_sizes
from fastgen.models.shard.shard import shards
from fastgen.models.spec import AttentionSpec, LatentAttentionSpec, MlpSpec, ModelSpec, MoeSpec


@dataclass(frozen=True)
class ShardPlan:
    """The split of a ``whole`` model. ``ranks`` has the model spec of each rank.

    ``parts`` says what a rank has of each kind of part, ``num_sums`` how often a step sums over the ranks,
    ``weight_bytes`` what the weights of each rank take in the checkpoint's own format.
    """

    whole: ModelSpec
    ranks: tuple[ModelSpec, ...]
    parts: tuple[str, ...]
    num_sums: int
    weight_bytes: tuple[int, ...]
    kv_bytes_per_token: int
    # The numbers of ranks that the model can be split over.
    possible: tuple[int, ...]


def plan_shards(
    whole: ModelSpec, count: int, dtype_bytes: int, weight_format: QuantizedFormat | None = None
) -> ShardPlan:
    """Returns the plan for ``count`` ranks of numbers of ``dtype_bytes``.

    :raises InvalidArgumentError: if the model cannot be split over so many.
    """
    ranks = tuple(shards(whole, count, weight_format))
    own = ranks[0]
    kinds = Counter(_described(before, after, count) for before, after in zip(whole.parts(), own.parts(), strict=True))
    tables = f"vocabulary: {own.embedding.tokens.shape[0]} of {whole.embedding.tokens.shape[0]} tokens"
    branches = [branch for layer in own.layers for branch in layer.branches]
    num_sums = 1 + sum(branch.sum_ranks for branch in branches) + sum(map(_num_sums, own.parts()))
    return ShardPlan(
        whole,
        ranks,
        (tables, *(f"{times} x {kind}" for kind, times in kinds.items())),
        num_sums if count > 1 else 0,
        tuple(dtype_bytes * sum(math.prod(each.shape) for each in rank.tensors()) for rank in ranks),
        own.kv_bytes_per_token(dtype_bytes),
        parallel_sizes(whole, max(whole.num_heads, 1), weight_format),
    )


def _num_sums(part: Part) -> int:
    """Returns the sums within a part: of a norm over the heads of all ranks, and of integer products. Experts share
    one."""
    norms = (part.q_norm, part.k_norm) if isinstance(part, AttentionSpec) else ()
    over_norms = any(norm is not None and norm.over == "ranks" for norm in norms)
    return over_norms + sum(linear.sum_ranks == "products" for linear in by_inputs(part))


def _described(before: Part, after: Part, count: int) -> str:
    match before, after:
        case AttentionSpec(), AttentionSpec():
            kv_heads = f"{after.num_kv_heads} of {before.num_kv_heads} KV heads"
            if before.num_kv_heads < count:
                kv_heads += f", each held by {count // before.num_kv_heads} ranks"
            return f"attention: {after.num_heads} of {before.num_heads} heads, {kv_heads}"
        case LatentAttentionSpec(), LatentAttentionSpec():
            return f"latent attention: {after.num_heads} of {before.num_heads} heads, the whole cache"
        case MlpSpec(), MlpSpec():
            return f"feed-forward: {_features(before, after)}"
        case MoeSpec(), MoeSpec():
            return ", ".join(["experts: " + each for each in _of_experts(before, after)])
    raise AssertionError("a share of a part is of its kind")


def _of_experts(before: MoeSpec, after: MoeSpec) -> Iterator[str]:
    yield f"all {len(before.experts)}, of each {_features(before.experts[0], after.experts[0])}"
    if before.shared is not None and after.shared is not None:
        yield f"the shared one, of it {_features(before.shared, after.shared)}"


def _features(before: MlpSpec, after: MlpSpec) -> str:
    return f"{after.up.out_features} of {before.up.out_features} features"
