"""The kernels that layers of a model ask the ``cpp`` target for, by their part of the spec."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastgen.compile.ops.alibi import Alibi
from fastgen.compile.ops.attention_cpp import CppAttention, cpp_attention_spec
from fastgen.compile.ops.attention_specs import AttentionShape
from fastgen.compile.ops.moe_cpp import CombineKernel, RouteKernel, combine_spec, route_spec
from fastgen.compile.ops.norm import NormKernel, norm_spec
from fastgen.compile.ops.qkv import HeadNorm, QkvKernel, qkv_spec
from fastgen.compile.ops.softcap import SoftcapKernel, softcap_spec
from fastgen.compile.spec import dtype_name
from fastgen.compile.target import Target
from fastgen.models.spec import (
    AttentionSpec,
    HeadSpec,
    LatentAttentionSpec,
    MoeSpec,
    NodeRef,
    NormSpec,
    QkNormSpec,
    RouterSpec,
)


def unless_one(scale: float) -> float | None:
    return None if scale == 1.0 else scale


def _head_norm(spec: QkNormSpec | None) -> HeadNorm | None:
    if spec is None:
        return None
    norm = spec.norm
    return HeadNorm(
        norm.kind,
        norm.eps,
        norm.offset,
        over_all=spec.over == "all",
        per_head=norm.weight is not None and len(norm.weight.shape) > 1,
        weight=norm.weight is not None,
        bias=norm.bias is not None,
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

    def attention_kernels(self, spec: AttentionSpec, alibi: Alibi | None) -> tuple[QkvKernel, CppAttention]:
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
            q_norm=_head_norm(spec.q_norm),
            k_norm=_head_norm(spec.k_norm),
            needed_by=asking,
        )
        shape = AttentionShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self.block_size,
            dtype_name(self.dtype),
            spec.scale,
            sliding_window=spec.sliding_window,
            alibi=None if alibi is None else "scaled" if alibi.scaled else "plain",
            alibi_dtype="fp32" if alibi is None else dtype_name(alibi.slopes.dtype),
            softcap=spec.softcap,
        )
        attend = cpp_attention_spec(shape, self.target.arch, asking)
        slopes = None if alibi is None else alibi.slopes
        return QkvKernel(self.target.kernel(prepare)), CppAttention(self.target.kernel(attend), slopes)

    def latent_kernel(self, spec: LatentAttentionSpec) -> CppAttention:
        shape = AttentionShape(
            spec.num_heads,
            1,
            spec.kv_rank + spec.rope_dim,
            self.block_size,
            dtype_name(self.dtype),
            spec.scale,
            v_dim=spec.kv_rank,
            values_in_keys=True,
        )
        return CppAttention(self.target.kernel(cpp_attention_spec(shape, self.target.arch, self.asking(spec.q.node))))

    def softcap_kernel(self, spec: HeadSpec) -> SoftcapKernel:
        assert spec.softcap is not None
        kernel = softcap_spec(spec.softcap, self.target.arch, needed_by=self.asking(spec.node))
        return SoftcapKernel(self.target.kernel(kernel))

    def combine_kernel(self, spec: MoeSpec) -> CombineKernel:
        kernel = combine_spec(
            self.target.arch,
            top_k=spec.router.top_k,
            shared=spec.shared is not None,
            gated=spec.shared_gate is not None,
            needed_by=self.asking(spec.router.node),
        )
        return CombineKernel(self.target.kernel(kernel))

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

    def norm_kernel(self, spec: NormSpec) -> NormKernel:
        kernel = norm_spec(
            "cpp",
            spec.kind,
            spec.size,
            "fp32",
            spec.eps,
            weight=spec.weight is not None,
            bias=spec.bias is not None,
            offset=spec.offset,
            needed_by=self.asking(spec.node),
        )
        return NormKernel(self.target.kernel(kernel))
