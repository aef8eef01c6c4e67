"""The kernels that layers of a model ask the ``cpp`` target for, by their part of the spec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.compile.backends.target import Target
from fastgen.compile.ops.activation.cpp import ActivationKernel, activation_spec
from fastgen.compile.ops.add.cpp import AddKernel, add_spec
from fastgen.compile.ops.attention.cpp import AttentionKernel, attention_spec
from fastgen.compile.ops.attention.reference import Alibi
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.embedding.cpp import EmbeddingKernel, embedding_spec
from fastgen.compile.ops.experts.cpp import (
    CombineKernel,
    RouteKernel,
    SortedChoices,
    SortKernel,
    combine_spec,
    route_spec,
    sort_spec,
)
from fastgen.compile.ops.latent.cpp import LatentKernel, latent_spec
from fastgen.compile.ops.norm.cpp import NormKernel, norm_spec
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.qkv.cpp import QkvKernel, qkv_spec
from fastgen.compile.ops.qkv.head_norm import HeadNorm
from fastgen.compile.ops.softcap.cpp import SoftcapKernel, softcap_spec
from fastgen.compile.spec import DTYPES, dtype_name
from fastgen.compile.weights.packed import PackedWeight
from fastgen.compile.weights.quantized import QuantizedWeight
from fastgen.layers.embedding import EmbeddingTable, Stored
from fastgen.layers.mlp import Activation
from fastgen.layers.moe import GroupedLinear
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.residual import DeferredAdd
from fastgen.models.spec import (
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LatentAttentionSpec,
    MlpSpec,
    MoeSpec,
    NodeRef,
    NormSpec,
    QkNormSpec,
    RouterSpec,
)


def unless_one(scale: float) -> float | None:
    return None if scale == 1.0 else scale


def qk_norm(spec: QkNormSpec | None) -> HeadNorm | None:
    """As kernels are told of it."""
    return None if spec is None else head_norm(spec.norm, over_all=spec.over == "all")


def head_norm(norm: NormSpec, *, over_all: bool) -> HeadNorm:
    """As kernels are told of it."""
    return HeadNorm(
        norm.kind,
        norm.eps,
        norm.offset,
        over_all=over_all,
        per_head=norm.weight is not None and len(norm.weight.shape) > 1,
        weight=norm.weight is not None,
        bias=norm.bias is not None,
    )


def attention_shape(spec: AttentionSpec | LatentAttentionSpec, dtype: torch.dtype, block_size: int) -> AttentionShape:
    """As kernels are told of it, of a model of ``dtype``."""
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


@dataclass(frozen=True)
class LayerKernels:
    """``dtype`` is the model's, and so the cache's; ``recipe`` its name."""

    target: Target
    dtype: torch.dtype
    block_size: int
    recipe: str

    def asking(self, node: NodeRef) -> tuple[str, ...]:
        """What generated kernels say about who asked for them."""
        return (f"{self.recipe}: {node.path}",)

    def embedding_kernels(self, spec: EmbeddingSpec, tokens: EmbeddingTable, scale: float | None) -> CppEmbedding:
        plain, arch = dtype_name(self.dtype), self.target.arch
        packed = isinstance(tokens.stored, PackedWeight)
        table_format = str(tokens.stored.format) if isinstance(tokens.stored, PackedWeight) else plain
        look_up = embedding_spec(arch, table_format, packed=packed, scale=scale, needed_by=self.asking(spec.node))
        if spec.positions is None:
            return CppEmbedding(EmbeddingKernel(self.target.kernel(look_up)))
        asking, offset = self.asking(spec.positions.node), spec.positions.offset
        add = embedding_spec(arch, plain, packed=False, offset=offset, needed_by=asking)
        return CppEmbedding(EmbeddingKernel(self.target.kernel(look_up)), EmbeddingKernel(self.target.kernel(add)))

    def add_kernel(self, scale: float | None, node: NodeRef) -> AddKernel:
        return AddKernel(self.target.kernel(add_spec(self.target.arch, scale, needed_by=self.asking(node))))

    def attention_kernels(self, spec: AttentionSpec, alibi: Alibi | None) -> tuple[QkvKernel, AttentionKernel]:
        """What computes all between the projections."""
        asking = self.asking(spec.q.node)
        prepare = qkv_spec(
            self.target.arch,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self.block_size,
            cache_dtype=dtype_name(self.dtype),
            rotary_dim=spec.rotary.dim if spec.rotary else 0,
            interleaved=spec.rotary is not None and spec.rotary.kind == "interleaved",
            q_norm=qk_norm(spec.q_norm),
            k_norm=qk_norm(spec.k_norm),
            needed_by=asking,
        )
        shape = attention_shape(spec, self.dtype, self.block_size)
        attend = attention_spec(shape, self.target.arch, asking)
        slopes = None if alibi is None else alibi.slopes
        return QkvKernel(self.target.kernel(prepare)), AttentionKernel(self.target.kernel(attend), slopes)

    def latent_kernels(self, spec: LatentAttentionSpec) -> tuple[LatentKernel, AttentionKernel]:
        """What computes all between the projections but the maps of the heads."""
        asking = self.asking(spec.q.node)
        prepare = latent_spec(
            self.target.arch,
            num_heads=spec.num_heads,
            nope_dim=spec.nope_dim,
            rope_dim=spec.rope_dim,
            kv_rank=spec.kv_rank,
            block_size=self.block_size,
            cache_dtype=dtype_name(self.dtype),
            rotary_dim=spec.rotary.dim,
            interleaved=spec.rotary.kind == "interleaved",
            norm=head_norm(spec.kv_norm, over_all=False),
            needed_by=asking,
        )
        shape = attention_shape(spec, self.dtype, self.block_size)
        attend = attention_spec(shape, self.target.arch, asking)
        return LatentKernel(self.target.kernel(prepare)), AttentionKernel(self.target.kernel(attend))

    def softcap_kernel(self, spec: HeadSpec) -> SoftcapKernel:
        assert spec.softcap is not None
        kernel = softcap_spec(spec.softcap, self.target.arch, needed_by=self.asking(spec.node))
        return SoftcapKernel(self.target.kernel(kernel))

    def moe_kernels(self, spec: MoeSpec) -> CppMoe:
        asking = self.asking(spec.router.node)
        sort = sort_spec(len(spec.experts), needed_by=asking)
        add_up = combine_spec(
            self.target.arch,
            top_k=spec.router.top_k,
            shared=spec.shared is not None,
            gated=spec.shared_gate is not None,
            needed_by=asking,
        )
        return CppMoe(SortKernel(self.target.kernel(sort)), CombineKernel(self.target.kernel(add_up)))

    def route_kernel(self, spec: RouterSpec) -> RouteKernel:
        kernel = route_spec(
            self.target.arch,
            spec.weight.out_features,
            top_k=spec.top_k,
            scoring=spec.scoring,
            normalize=spec.normalize,
            corrected=spec.correction is not None,
            scale=unless_one(spec.scale),
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            needed_by=self.asking(spec.node),
        )
        return RouteKernel(self.target.kernel(kernel))

    def activation_kernel(self, spec: MlpSpec) -> ActivationKernel:
        kernel = activation_spec(
            spec.activation, self.target.arch, gated=spec.gate is not None, needed_by=self.asking(spec.node)
        )
        return ActivationKernel(self.target.kernel(kernel))

    def norm_kernel(self, spec: NormSpec, added: DeferredAdd | None = None) -> NormKernel:
        """With what is ``added`` to the stream that it reads."""
        shape = NormShape(
            spec.kind,
            spec.size,
            "fp32",
            spec.eps,
            weight=spec.weight is not None,
            bias=spec.bias is not None,
            offset=spec.offset,
            residual=added is not None,
            scale=1.0 if added is None or added.scale is None else added.scale,
        )
        return NormKernel(self.target.kernel(norm_spec(shape, needed_by=self.asking(spec.node))))


class CppEmbedding:
    """A model's :class:`fastgen.layers.embedding.EmbeddingKernels`: one looks up tokens, one adds positions."""

    dtype = torch.float32

    def __init__(self, tokens: EmbeddingKernel, positions: EmbeddingKernel | None = None):
        self._tokens, self._positions = tokens, positions

    def look_up(self, batch: RaggedBatch, tokens: Stored, positions: Stored | None, out: Tensor) -> None:
        assert not isinstance(tokens, QuantizedWeight)
        self._tokens(tokens, out, batch.input_ids, batch.token_source, batch.sampled_ids)
        if positions is not None:
            self.add_positions(batch, positions, out)

    def add_positions(self, batch: RaggedBatch, positions: Stored, x: Tensor) -> None:
        assert self._positions is not None
        assert not isinstance(positions, QuantizedWeight)
        self._positions(positions, x, batch.positions)


class CppMoe:
    """A mixture's :class:`fastgen.layers.moe.MoeKernels`: choices are sorted by expert, rows stay where they are."""

    def __init__(self, sort: SortKernel, combine: CombineKernel):
        self._sort, self._combine = sort, combine

    def expert_outputs(
        self, x: Tensor, experts: Tensor, inward: GroupedLinear, activation: Activation, down: GroupedLinear
    ) -> Tensor:
        choices = self._sort(experts)
        inner = activation(_multiply(x, choices, inward))
        return _multiply(inner, choices, down)

    def combine(self, outputs: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        return self._combine(outputs, weights, shared, gate)


def _multiply(x: Tensor, choices: SortedChoices, layer: GroupedLinear) -> Tensor:
    assert layer.kernel is not None
    return layer.kernel.route(x, choices, layer.packed)
