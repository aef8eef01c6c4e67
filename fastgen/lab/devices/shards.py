"""One device's share of a model under tensor parallelism, as a model spec.

Heads of attention and features of feed-forward layers are split over the devices, as Megatron-LM does (Shoeybi et al.,
2019): the first maps of a part by their outputs, the last one by its inputs, so that each part ends in one sum over the
devices. Where there are fewer KV heads than devices, several devices hold the same head. Latent attention caches one
vector for all heads, and each device holds all of it. The embedding and the head stay whole here: the vocabulary is
split, but a device needs the logits of all of it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fastgen.errors import InvalidArgumentError
from fastgen.models.spec import (
    AttentionSpec,
    LatentAttentionSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    QkNormSpec,
    TensorSpec,
)

Part = AttentionSpec | LatentAttentionSpec | MlpSpec | MoeSpec


def parallel_sizes(spec: ModelSpec, most: int) -> tuple[int, ...]:
    """Returns the numbers of devices, up to ``most``, over which the model can be split."""
    return tuple(size for size in range(1, most + 1) if _obstacle(spec, size) is None)


def shard(spec: ModelSpec, size: int) -> ModelSpec:
    """Returns what one of ``size`` devices holds of the layers.

    :raises InvalidArgumentError: if the model cannot be split so; the message has the sizes that are possible.
    """
    obstacle = _obstacle(spec, size)
    if obstacle is not None:
        known = ", ".join(map(str, parallel_sizes(spec, max(spec.num_heads, 1))))
        raise InvalidArgumentError(
            f"tensor_parallel={size}: {obstacle}; {spec.architecture} can be split over {known} devices"
        )
    if size == 1:
        return spec
    layers = []
    for layer in spec.layers:
        branches = []
        for branch in layer.branches:
            parts = tuple(replace(each, part=_shard_part(each.part, size)) for each in branch.parts)
            branches.append(replace(branch, parts=parts))
        layers.append(replace(layer, branches=tuple(branches)))
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=_kv_heads(spec.num_kv_heads, size),
        layers=tuple(layers),
    )


def num_all_reduces(spec: ModelSpec) -> int:
    """Returns how often a step sums over the devices: once for each branch, whose parts are added first, and once for
    the embedding, of which each device holds some rows."""
    return 1 + sum(len(layer.branches) for layer in spec.layers)


def _obstacle(spec: ModelSpec, size: int) -> str | None:
    """Returns why the model cannot be split over ``size`` devices."""
    if size < 1:
        return "it must be at least 1"
    for part in spec.parts():
        if isinstance(part, AttentionSpec | LatentAttentionSpec) and part.num_heads % size:
            return f"{part.num_heads} heads cannot be split evenly"
        if isinstance(part, AttentionSpec) and part.num_kv_heads % size and size % part.num_kv_heads:
            return f"{part.num_kv_heads} KV heads cannot be split evenly"
        for mlp in _mlps(part):
            if mlp.up.out_features % size:
                return f"{mlp.up.out_features} features of a feed-forward layer cannot be split evenly"
    return None


def _mlps(part: Part) -> tuple[MlpSpec, ...]:
    match part:
        case MlpSpec():
            return (part,)
        case MoeSpec():
            return (part.experts[0], *([part.shared] if part.shared else []))
    return ()


def _kv_heads(num_kv_heads: int, size: int) -> int:
    return max(1, num_kv_heads // size)


def _shard_part(part: Part, size: int) -> Part:
    match part:
        case AttentionSpec():
            return _shard_attention(part, size)
        case LatentAttentionSpec():
            return replace(
                part,
                num_heads=part.num_heads // size,
                q=_by_outputs(part.q, size),
                k_up=_by_outputs(part.k_up, size),
                v_up=_by_outputs(part.v_up, size),
                output=_by_inputs(part.output, size),
            )
        case MlpSpec():
            return _shard_mlp(part, size)
        case MoeSpec():
            return replace(
                part,
                experts=tuple(_shard_mlp(each, size) for each in part.experts),
                shared=None if part.shared is None else _shard_mlp(part.shared, size),
            )


def _shard_attention(part: AttentionSpec, size: int) -> AttentionSpec:
    num_kv_heads = _kv_heads(part.num_kv_heads, size)
    kv_size = part.num_kv_heads // num_kv_heads
    alibi = part.alibi
    return replace(
        part,
        num_heads=part.num_heads // size,
        num_kv_heads=num_kv_heads,
        q=_by_outputs(part.q, size),
        k=_by_outputs(part.k, kv_size),
        v=_by_outputs(part.v, kv_size),
        output=_by_inputs(part.output, size),
        q_norm=_shard_norm(part.q_norm, size),
        k_norm=_shard_norm(part.k_norm, kv_size),
        alibi=None if alibi is None else replace(alibi, slopes=alibi.slopes[: part.num_heads // size]),
    )


def _shard_mlp(part: MlpSpec, size: int) -> MlpSpec:
    return replace(
        part,
        gate=None if part.gate is None else _by_outputs(part.gate, size),
        up=_by_outputs(part.up, size),
        down=_by_inputs(part.down, size),
    )


def _shard_norm(qk_norm: QkNormSpec | None, size: int) -> QkNormSpec | None:
    """Returns the norm of some of the heads. One over all heads together would need a sum over the devices; it is
    small."""
    if qk_norm is None:
        return None
    norm, all_heads = qk_norm.norm, qk_norm.over == "all"

    def split(tensor: TensorSpec | None) -> TensorSpec | None:
        if tensor is None or not (all_heads or len(tensor.shape) == 2):
            return tensor
        return _resized(tensor, (tensor.shape[0] // size, *tensor.shape[1:]))

    features = norm.size // size if all_heads else norm.size
    return replace(qk_norm, norm=replace(norm, size=features, weight=split(norm.weight), bias=split(norm.bias)))


def _by_outputs(linear: LinearSpec, size: int) -> LinearSpec:
    rows = linear.out_features // size
    return replace(
        linear,
        out_features=rows,
        weight=_resized(linear.weight, (rows, linear.in_features)),
        bias=None if linear.bias is None else _resized(linear.bias, (rows,)),
    )


def _by_inputs(linear: LinearSpec, size: int) -> LinearSpec:
    columns = linear.in_features // size
    return replace(linear, in_features=columns, weight=_resized(linear.weight, (linear.out_features, columns)))


def _resized(tensor: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    assert math.prod(shape) > 0
    return replace(tensor, shape=shape, stored_shape=shape, layout=None)
