"""Derives the shapes by which a backend is asked for ops from the parts of a model spec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fastgen.compile.backends.shapes import (
    ActivationShape,
    ExpertsShape,
    FeatureNorm,
    HeadShape,
    LatentShape,
    LinearShape,
    ModelShape,
    QkNorm,
    RotaryShape,
    RouterShape,
    TableShape,
)
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.spec import DTYPES, dtype_name
from fastgen.compile.weights.formats import QuantizedFormat
from fastgen.layers.kv_cache import KVShape
from fastgen.models.spec import (
    AttentionSpec,
    HeadSpec,
    LatentAttentionSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NodeRef,
    NormSpec,
    QkNormSpec,
    RotarySpec,
    RouterSpec,
    TensorSpec,
)


def unless_one(scale: float) -> float | None:
    """Returns the scale, ``None`` for one that changes nothing."""
    return None if scale == 1.0 else scale


def kv_shape(spec: AttentionSpec | LatentAttentionSpec) -> KVShape:
    """Returns what a token leaves in the cache of an attention."""
    if isinstance(spec, AttentionSpec):
        return KVShape(spec.num_kv_heads, spec.head_dim)
    return KVShape(1, spec.kv_rank + spec.rope_dim, spec.kv_rank)


def attention_shape(spec: AttentionSpec | LatentAttentionSpec, dtype: torch.dtype, block_size: int) -> AttentionShape:
    """Returns the shape of an attention in a model of ``dtype``. Latent attention has one KV head, whose values are the
    first features of its keys."""
    if isinstance(spec, LatentAttentionSpec):
        return AttentionShape(
            spec.num_heads,
            1,
            spec.kv_rank + spec.rope_dim,
            block_size,
            dtype_name(dtype),
            spec.scale,
            v_dim=spec.kv_rank,
            values_in_keys=True,
        )
    alibi = spec.alibi
    return AttentionShape(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        block_size,
        dtype_name(dtype),
        spec.scale,
        sliding_window=spec.sliding_window,
        alibi=None if alibi is None else "scaled" if alibi.scaled else "plain",
        alibi_dtype="fp32" if alibi is None else DTYPES[alibi.rounding],
        softcap=spec.softcap,
    )


def inward_parts(spec: MlpSpec) -> list[LinearSpec]:
    """Returns the layers of a feed-forward part that read its input."""
    return [spec.gate, spec.up] if spec.gate else [spec.up]


def rotary_shape(spec: RotarySpec) -> RotaryShape:
    """Returns how features are rotated."""
    return RotaryShape(spec.dim, spec.kind == "interleaved")


def model_shape(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    max_model_len: int,
    weight_format: QuantizedFormat | None,
) -> ModelShape:
    """Returns all that the ops of a model have in common."""
    return ModelShape(
        dtype,
        device,
        block_size,
        weight_format,
        max_in_features=max(tensor.shape[1] for tensor in spec.tensors() if len(tensor.shape) == 2),
        max_choices=max((part.router.top_k for part in spec.parts() if isinstance(part, MoeSpec)), default=1),
        max_quantized_numel=max(_quantized_numels(spec), default=0),
        max_model_len=max_model_len,
    )


def _quantized_numels(spec: ModelSpec) -> Iterator[int]:
    """Yields the size of each matrix that a GPU's library may multiply and that may be quantized: all but tables and
    experts.
    """
    for project in (spec.embedding.project, spec.head.project):
        if project:
            yield _numel([project])
    for part in spec.parts():
        match part:
            case AttentionSpec():
                yield from (_numel([part.q, part.k, part.v]), _numel([part.output]))
            case LatentAttentionSpec():
                down = [part.q_down] if part.q_down else []
                yield from (_numel([each]) for each in (*down, part.q, part.kv_down, part.output))
            case MlpSpec():
                yield from (_numel(inward_parts(part)), _numel([part.down]))
            case MoeSpec():
                if part.shared:
                    yield from (_numel(inward_parts(part.shared)), _numel([part.shared.down]))
                if part.shared_gate:
                    yield _numel([part.shared_gate])


def _numel(parts: Sequence[LinearSpec]) -> int:
    return sum(part.out_features for part in parts) * parts[0].in_features


class Shapes:
    """Makes the shapes of one model's parts. ``recipe`` is its name, which stands before every recipe node."""

    def __init__(self, recipe: str, dtype: torch.dtype, block_size: int):
        self.recipe, self.dtype, self.block_size = recipe, dtype, block_size

    def needed_by(self, node: NodeRef) -> tuple[str, ...]:
        """Returns the recipe node as generated kernels name it."""
        return (f"{self.recipe}: {node.path}",)

    def table(self, tensor: TensorSpec, *, multiplies: bool) -> TableShape:
        num_rows, size = tensor.shape
        return TableShape(num_rows, size, multiplies=multiplies, needed_by=self.needed_by(tensor.node))

    def linear(self, parts: Sequence[LinearSpec]) -> LinearShape:
        """Returns the shape of linear layers of one input, stacked."""
        return LinearShape(
            parts[0].in_features,
            tuple(part.out_features for part in parts),
            tuple(part.bias is not None for part in parts),
            self.needed_by(parts[0].node),
            parts[0].sum_ranks,
        )

    def norm(self, spec: NormSpec, *, feeds_matrices: bool = False) -> FeatureNorm:
        return FeatureNorm(
            spec.kind,
            spec.weight.shape if spec.weight else (spec.size,),
            spec.eps,
            weight=spec.weight is not None,
            bias=spec.bias is not None,
            offset=spec.offset,
            needed_by=self.needed_by(spec.node),
            feeds_matrices=feeds_matrices,
        )

    def qk_norm(self, spec: QkNormSpec | None) -> QkNorm | None:
        return None if spec is None else QkNorm(self.norm(spec.norm), over_all=spec.over == "all")

    def activation(self, spec: MlpSpec, *, feeds_matrices: bool = False) -> ActivationShape:
        """Returns the shape of an activation, which must be a known one."""
        gated = spec.gate is not None
        return ActivationShape(
            spec.activation, spec.up.out_features, gated, self.needed_by(spec.node), feeds_matrices=feeds_matrices
        )

    def attention(self, spec: AttentionSpec | LatentAttentionSpec) -> AttentionShape:
        return attention_shape(spec, self.dtype, self.block_size)

    def latent_attention(self, spec: LatentAttentionSpec) -> LatentShape:
        return LatentShape(
            self.attention(spec),
            spec.nope_dim,
            spec.rope_dim,
            spec.v_head_dim,
            rotary_shape(spec.rotary),
            self.norm(spec.kv_norm),
            needed_by=self.needed_by(spec.q.node),
            k_up_needed_by=self.needed_by(spec.k_up.node),
            v_up_needed_by=self.needed_by(spec.v_up.node),
        )

    def router(self, spec: RouterSpec) -> RouterShape:
        return RouterShape(
            self.linear([spec.weight]),
            top_k=spec.top_k,
            scoring=spec.scoring,
            normalize=spec.normalize,
            corrected=spec.correction is not None,
            scale=unless_one(spec.scale),
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            needed_by=self.needed_by(spec.node),
        )

    def experts(self, spec: MoeSpec) -> ExpertsShape:
        first = spec.experts[0]
        return ExpertsShape(
            len(spec.experts),
            spec.router.top_k,
            self.linear(inward_parts(first)),
            self.activation(first),
            self.linear([first.down]),
            shared=spec.shared is not None,
            gated=spec.shared_gate is not None,
            needed_by=self.needed_by(spec.router.node),
        )

    def head(self, spec: HeadSpec) -> HeadShape:
        return HeadShape(spec.bias is not None, unless_one(spec.scale), spec.softcap, self.needed_by(spec.node))
