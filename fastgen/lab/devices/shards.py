"""One device's share of a model under tensor parallelism, as the lab counts it."""

from __future__ import annotations

from dataclasses import replace

from fastgen.models.shard.shard import shard as shard_of_rank
from fastgen.models.spec import ModelSpec, Rank


def shard(spec: ModelSpec, size: int) -> ModelSpec:
    """Returns what one of ``size`` devices holds of the layers. The embedding and the head stay whole here: a device
    holds a part of the vocabulary, but one of them needs the logits of all of it.

    :raises InvalidArgumentError: if the model cannot be split so; the message has the sizes that are possible.
    """
    own = shard_of_rank(spec, Rank(0, size))
    return own if size == 1 else replace(own, embedding=spec.embedding, head=spec.head)


def num_all_reduces(spec: ModelSpec) -> int:
    """Returns how often a step sums over the devices: once for each branch, whose parts are added first, and once for
    the embedding, of which each device holds some rows."""
    return 1 + sum(len(layer.branches) for layer in spec.layers)
