"""The kernels that layers of a model ask the ``triton`` target for, by their part of the spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastgen.compile.backends.target import Target
from fastgen.compile.capture.recording import library_call
from fastgen.compile.ops.activation.triton import ActivationKernel, activation_spec
from fastgen.compile.ops.attention.reference import Alibi
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tiling import Tiling
from fastgen.compile.ops.attention.triton import AttentionKernel, AttentionPlan, attention_specs
from fastgen.compile.ops.attention.tuning import tuned_tilings
from fastgen.compile.ops.embedding.triton import EmbeddingKernel, RowGatherKernel, embedding_spec, row_gather_spec
from fastgen.compile.ops.experts.tiling import GroupedTiling, grouped_tilings
from fastgen.compile.ops.experts.triton import (
    CombineKernel,
    GroupedLinearKernel,
    RouteKernel,
    SortKernel,
    combine_spec,
    grouped_linear_spec,
    route_spec,
    sort_spec,
)
from fastgen.compile.ops.latent.triton import LatentKernel, latent_spec
from fastgen.compile.ops.linear.tiling import FewRowShape, SplitK
from fastgen.compile.ops.linear.triton import LinearKernel
from fastgen.compile.ops.linear.tuning import tuned_split
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.norm.triton import NormKernel, norm_spec
from fastgen.compile.ops.qkv.triton import QkvKernel, qkv_spec
from fastgen.compile.spec import dtype_name
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.compile.weights.quantized import QuantizedWeight
from fastgen.layers.attention import Attend, Prepare
from fastgen.layers.embedding import EmbeddingTable, Stored
from fastgen.layers.head import Cap
from fastgen.layers.mlp import Activate
from fastgen.layers.moe import Choose
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.residual import Add, DeferredAdd
from fastgen.models.layer_kernels import attention_shape, head_norm, qk_norm, unless_one
from fastgen.models.moe_kernels_triton import GroupedKernels, TritonMoe
from fastgen.models.spec import (
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LatentAttentionSpec,
    LinearSpec,
    MlpSpec,
    MoeSpec,
    NodeRef,
    NormSpec,
    RouterSpec,
)


@dataclass
class TritonLayerKernels:
    """``dtype`` is the model's; ``recipe`` its name. Attentions of one shape share a plan, and mixtures of as many
    experts the lists of their choices. In ``whole`` weights in few bits are laid out for the library, one layer's after
    the other's: of :func:`fastgen.models.weight_sizes.whole_numel` numbers.
    """

    target: Target
    dtype: torch.dtype
    device: torch.device
    block_size: int
    recipe: str
    whole: Tensor
    plans: dict[object, AttentionPlan] = field(default_factory=dict)
    _workspaces: dict[int, Tensor] = field(default_factory=dict)
    _splits: dict[tuple[FewRowShape, int], SplitK | None] = field(default_factory=dict)
    _tilings: dict[AttentionShape, tuple[Tiling, Tiling]] = field(default_factory=dict)
    _sorts: dict[tuple[int, int, int], SortKernel] = field(default_factory=dict)

    def asking(self, node: NodeRef) -> tuple[str, ...]:
        """What generated kernels say about who asked for them."""
        return (f"{self.recipe}: {node.path}",)

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    def embedding_kernels(self, spec: EmbeddingSpec, tokens: EmbeddingTable, scale: float | None) -> TritonEmbedding:
        size, asking = tokens.size, self.asking(spec.node)
        positions, offset = spec.positions, None
        if positions is not None and spec.project is None:
            offset = positions.offset
        look_up = embedding_spec(
            size,
            self.dtype_name,
            table_dtype=_weight_format(tokens) or "",
            scale=1.0 if scale is None else scale,
            position_offset=offset,
            needed_by=asking,
        )
        gather = None
        if positions is not None and offset is None:
            gather = row_gather_spec(positions.weight.shape[1], self.dtype_name, needed_by=self.asking(positions.node))
        return TritonEmbedding(
            self.dtype,
            EmbeddingKernel(self.target.kernel(look_up)),
            None if gather is None else RowGatherKernel(self.target.kernel(gather)),
            positions.offset if positions else 0,
        )

    def add_kernel(self, scale: float | None, node: NodeRef) -> Add:
        """By the library: a sum is all it is."""

        def add(x: Tensor, y: Tensor) -> Tensor:
            library_call(torch.add, x, y, alpha=1 if scale is None else scale, out=x)
            return x

        return add

    def linear_kernel(
        self, parts: Sequence[LinearSpec], weight_format: WeightOnlyFormat | None, out_dtype: str = ""
    ) -> LinearKernel:
        """For parts stacked into one matrix; to the model's dtype unless another is named."""
        out_features, biased = sum(part.out_features for part in parts), any(part.bias for part in parts)
        sizes = (out_features, parts[0].in_features, self.dtype_name, weight_format or "plain")
        return self._linear(FewRowShape(*sizes, bias=biased, out_dtype=out_dtype), parts[0].node)

    def head_kernel(self, table: EmbeddingTable, node: NodeRef) -> LinearKernel:
        """To logits, without their bias."""
        sizes = (table.num_rows, table.size, self.dtype_name, _weight_format(table) or "plain")
        return self._linear(FewRowShape(*sizes, out_dtype="fp32"), node)

    def _linear(self, shape: FewRowShape, node: NodeRef) -> LinearKernel:
        return LinearKernel(
            shape,
            self.target.kernel,
            self._workspace,
            lambda rows: self._split(shape, rows),
            whole=self.whole,
            needed_by=self.asking(node),
        )

    def _split(self, shape: FewRowShape, num_rows: int) -> SplitK | None:
        """Layers are alike, so each is asked for many times."""
        key = (shape, num_rows)
        if key not in self._splits:
            self._splits[key] = tuned_split(shape, num_rows, self.target.kernel_loader, self.device)
        return self._splits[key]

    def _workspace(self, numel: int) -> Tensor:
        if numel not in self._workspaces:
            self._workspaces[numel] = torch.empty(numel, dtype=torch.float32, device=self.device)
        return self._workspaces[numel]

    def norm_kernel(self, spec: NormSpec, added: DeferredAdd | None = None) -> NormKernel:
        """With what is ``added`` to the stream that it reads."""
        shape = NormShape(
            spec.kind,
            spec.size,
            self.dtype_name,
            spec.eps,
            weight=spec.weight is not None,
            bias=spec.bias is not None,
            offset=spec.offset,
            residual=added is not None,
            scale=1.0 if added is None or added.scale is None else added.scale,
        )
        return NormKernel(self.target.kernel(norm_spec(shape, needed_by=self.asking(spec.node))))

    def activation_kernel(self, spec: MlpSpec) -> Activate:
        num_features, gated = spec.up.out_features, spec.gate is not None
        kernel = activation_spec(
            spec.activation, num_features, self.dtype_name, gated=gated, needed_by=self.asking(spec.node)
        )
        activation = ActivationKernel(self.target.kernel(kernel))

        def activate(x: Tensor) -> Tensor:
            out = x.new_empty(len(x), num_features)
            activation(x, out)
            return out

        return activate

    def attention_kernels(self, spec: AttentionSpec, alibi: Alibi | None) -> tuple[Prepare, Attend]:
        """What computes all between the projections."""
        asking = self.asking(spec.q.node)
        prepare = qkv_spec(
            self.dtype_name,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rotary.dim if spec.rotary else 0,
            interleaved=spec.rotary is not None and spec.rotary.kind == "interleaved",
            q_norm=qk_norm(spec.q_norm),
            k_norm=qk_norm(spec.k_norm),
            needed_by=asking,
        )
        token_size = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim  # its keys and values lie between
        shape = replace(attention_shape(spec, self.dtype, self.block_size), q_stride=token_size)
        attend = self._attend(shape, asking)
        slopes = None if alibi is None else alibi.slopes

        def with_slopes(*given: Tensor) -> None:
            attend(*given, slopes=slopes)

        return QkvKernel(self.target.kernel(prepare)), with_slopes

    def latent_kernels(self, spec: LatentAttentionSpec) -> tuple[Prepare, Attend]:
        """What computes all between the projections but the maps of the heads."""
        asking = self.asking(spec.q.node)
        prepare = latent_spec(
            self.dtype_name,
            head_norm(spec.kv_norm, over_all=False),
            num_heads=spec.num_heads,
            latent_dim=spec.kv_rank,
            nope_dim=spec.nope_dim,
            rotary_dim=spec.rotary.dim,
            interleaved=spec.rotary.kind == "interleaved",
            needed_by=asking,
        )
        shape = attention_shape(spec, self.dtype, self.block_size)
        return LatentKernel(self.target.kernel(prepare)), self._attend(shape, asking)

    def _attend(self, shape: AttentionShape, asking: tuple[str, ...]) -> AttentionKernel:
        loader, max_num_seqs = self.target.kernel_loader, self.target.max_num_seqs
        if shape not in self._tilings:
            tilings = tuned_tilings(shape, max_num_seqs, self.target.num_sms, loader, self.device)
            self._tilings[shape] = tilings
        chunk, decode = self._tilings[shape]
        specs = attention_specs(
            shape, max_num_seqs=max_num_seqs, arch=self.target.arch, chunk=chunk, decode=decode, needed_by=asking
        )
        # All that a plan depends on; what else distinguishes attentions does not show in it.
        key = (specs.plan, shape.num_kv_heads, shape.v_dim, specs.decode)
        if key not in self.plans:
            self.plans[key] = AttentionPlan(
                specs,
                self.target.kernel,
                token_budget=self.target.max_rows,
                max_num_seqs=self.target.max_num_seqs,
                num_sms=self.target.num_sms,
                device=self.device,
            )
        return AttentionKernel(specs, self.target.kernel, self.plans[key])

    def route_kernel(self, spec: RouterSpec) -> Choose:
        kernel = route_spec(
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
        route = RouteKernel(self.target.kernel(kernel))

        def choose(logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
            weights = logits.new_empty(len(logits), spec.top_k)
            experts = torch.empty_like(weights, dtype=torch.int32)
            route(logits, correction, experts, weights)
            return experts, weights

        return choose

    def moe_kernels(self, spec: MoeSpec) -> TritonMoe:
        asking, first, top_k = self.asking(spec.router.node), spec.experts[0], spec.router.top_k
        inward = [first.gate, first.up] if first.gate else [first.up]

        def product(parts: Sequence[LinearSpec], tiling: GroupedTiling, **rows: Any) -> GroupedLinearKernel:
            kernel = grouped_linear_spec(
                parts[0].in_features,
                sum(part.out_features for part in parts),
                self.dtype_name,
                tiling,
                bias=any(part.bias for part in parts),
                needed_by=self.asking(parts[0].node),
                **rows,
            )
            return GroupedLinearKernel(self.target.kernel(kernel))

        add_up = combine_spec(first.down.out_features, top_k, self.dtype_name, needed_by=asking)
        cuts = {
            rows: GroupedKernels(
                self._sort(len(spec.experts), tiling.block_m, top_k, asking),
                product(inward, tiling, top_k=top_k),
                product([first.down], tiling, scatters=True),
            )
            for rows, tiling in grouped_tilings(self.dtype_name, self.target.arch).items()
        }
        return TritonMoe(cuts, CombineKernel(self.target.kernel(add_up)))

    def _sort(self, num_experts: int, block_m: int, top_k: int, asking: tuple[str, ...]) -> SortKernel:
        kernel = self.target.kernel(sort_spec(num_experts, block_m, needed_by=asking))
        key = (num_experts, block_m, top_k)
        if key not in self._sorts:
            max_choices = self.target.max_rows * top_k
            self._sorts[key] = SortKernel(kernel, max_choices=max_choices, device=self.device)
        return self._sorts[key]

    def softcap_kernel(self, spec: HeadSpec) -> Cap:
        """By the library: it is a small part of a head's work."""
        cap = spec.softcap
        assert cap is not None

        def apply(x: Tensor) -> Tensor:
            library_call(torch.div, x, cap, out=x)
            library_call(torch.tanh, x, out=x)
            library_call(torch.mul, x, cap, out=x)
            return x

        return apply


def _weight_format(table: EmbeddingTable) -> WeightOnlyFormat | None:
    return table.stored.format if isinstance(table.stored, QuantizedWeight) else None


class TritonEmbedding:
    """A model's :class:`fastgen.layers.embedding.EmbeddingKernels`.

    ``look_up`` adds positions, except where a projection comes between: then ``gather`` finds them.
    """

    def __init__(
        self, dtype: torch.dtype, look_up: EmbeddingKernel, gather: RowGatherKernel | None, position_offset: int
    ):
        self.dtype = dtype
        self._look_up, self._gather, self._offset = look_up, gather, position_offset

    def look_up(self, batch: RaggedBatch, tokens: Stored, positions: Stored | None, out: Tensor) -> None:
        assert isinstance(tokens, Tensor | QuantizedWeight)
        assert positions is None or isinstance(positions, Tensor)
        ids = (batch.input_ids, batch.token_source, batch.sampled_ids)
        self._look_up(*ids, tokens, out, batch.positions, positions)

    def add_positions(self, batch: RaggedBatch, positions: Stored, x: Tensor) -> None:
        assert self._gather is not None
        assert isinstance(positions, Tensor)
        rows = torch.empty_like(x)
        self._gather(batch.positions, positions[self._offset :], rows)
        library_call(torch.add, x, rows, out=x)
