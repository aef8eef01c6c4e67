"""Triton kernels for GPUs, and beside them the library that torch calls: activations in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fastgen.compile.backends.backend import MAX_LOGPROBS, Backend
from fastgen.compile.backends.model_ops import Ops
from fastgen.compile.backends.modules import fused
from fastgen.compile.backends.modules.collectives import AllReduce
from fastgen.compile.backends.modules.composed import ProjectedAttention as ComposedAttention
from fastgen.compile.backends.modules.reference import router_correction
from fastgen.compile.backends.modules.stored import NormParameters, StoredGroups, StoredTable, empty_parameter
from fastgen.compile.backends.modules.triton import (
    ActivatedLinear,
    Activation,
    Add,
    Embedding,
    ExpertCut,
    Experts,
    Head,
    HeadMaps,
    Linear,
    LinearAddNorm,
    Positions,
    ProjectedAttention,
    Router,
)
from fastgen.compile.backends.ops import Table
from fastgen.compile.backends.rank_sums import RankSums
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
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.backends.triton_linear import LinearKernels
from fastgen.compile.build.builder import Kernel
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.ops.activation.triton import ActivationKernel, activation_spec
from fastgen.compile.ops.attention.reference import Alibi
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tiling import Tiling, chunk_tiling, decode_tiling
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
from fastgen.compile.ops.linear.finish import Activate, AddAndNorm, Finish, RotateAndWrite
from fastgen.compile.ops.linear.tiling import FewRowShape
from fastgen.compile.ops.linear.triton import LinearKernel
from fastgen.compile.ops.norm.triton import NormKernel, norm_spec
from fastgen.compile.ops.overlap import overlapped
from fastgen.compile.ops.qkv.triton import QkvKernel, qkv_spec
from fastgen.compile.ops.sampling.triton import SamplingKernel, SamplingSpecs, sampling_specs
from fastgen.compile.spec import KernelSpec, dtype_name
from fastgen.compile.weights.formats import WeightOnlyFormat


class TritonBackend(Backend):
    """Runs Triton kernels on a GPU, or interpreted on a CPU. A step has at most ``max_rows`` tokens of
    ``max_num_seqs`` sequences."""

    steps = "captured"

    def __init__(
        self, facts: TargetFacts, loader: KernelLoader | None = None, *, max_rows: int = 0, max_num_seqs: int = 0
    ):
        super().__init__(facts, loader)
        self.max_rows, self.max_num_seqs = max_rows, max_num_seqs
        self._sums = RankSums(self.kernels, facts.arch)

    def ops(self, model: ModelShape) -> TritonOps:
        return TritonOps(self, model)

    def all_reduce(self, num_ranks: int, dtype: torch.dtype) -> AllReduce:
        return self._sums.all_reduce(self.ranks, num_ranks, dtype)

    def choose_sums(self, row_counts: Iterable[int], num_features: int, device: torch.device) -> None:
        if self.ranks.symmetric is not None and self.ranks.symmetric.is_measured:
            self._sums.choose(self.ranks, row_counts, num_features, device, self.graph_pool(device))

    def slot_sampling(self, vocab_size: int, *, max_rows: int, sampled_ids: Tensor) -> SamplingKernel:
        return SamplingKernel(
            self._sampling_specs(vocab_size),
            self.kernels.kernel,
            max_rows=max_rows,
            max_slots=len(sampled_ids),
            device=sampled_ids.device,
            sampled_ids=sampled_ids,
        )

    def engine_specs(self, vocab_size: int) -> list[KernelSpec]:
        return list(self._sampling_specs(vocab_size))

    def _sampling_specs(self, vocab_size: int) -> SamplingSpecs:
        num_top = min(MAX_LOGPROBS + 1, vocab_size)
        specs = sampling_specs(vocab_size, num_top=num_top, needed_by=("the sampler",))
        return SamplingSpecs(*(overlapped(each, self.facts.arch) for each in specs))


@dataclass
class TritonOps(Ops):
    """Makes ops of Triton kernels and the library. Attentions of one shape share a plan, and mixtures of as many
    experts the lists of their choices."""

    backend: TritonBackend
    model: ModelShape
    plans: dict[object, AttentionPlan] = field(default_factory=dict)
    _tilings: dict[AttentionShape, tuple[Tiling, Tiling]] = field(default_factory=dict)
    _sorts: dict[tuple[int, int, int], SortKernel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = self.model
        self._arch = self.backend.facts.arch
        self._dtype, self._device, self._dtype_name = model.dtype, model.device, dtype_name(model.dtype)
        self._weight_format = cast(WeightOnlyFormat | None, model.weight_format)
        backend = self.backend
        self._linears = LinearKernels(self._kernel, backend.facts, backend.loader, model)

    def _kernel(self, spec: KernelSpec) -> Kernel:
        return self.backend.kernels.kernel(overlapped(spec, self._arch))

    def workspaces(self) -> list[Tensor]:
        """Returns dequantized weights, parts of split features, attention's plans and lists of experts' choices."""
        plans = [each for plan in self.plans.values() for each in vars(plan).values() if isinstance(each, Tensor)]
        tiles = [sort.tiles for sort in self._sorts.values()]
        choices = [tensor for each in tiles for tensor in (each.order, each.tiles, each.num_tiles)]
        return [*self._linears.workspaces(), *plans, *choices]

    def plan_step(self, cu_seqlens_q: Tensor, seq_lens: Tensor) -> None:
        """Fills the work lists of every plan for a step of these lengths."""
        for plan in self.plans.values():
            plan(cu_seqlens_q, seq_lens)

    def table(self, shape: TableShape) -> StoredTable:
        weight_format = self._weight_format if shape.multiplies else None
        sizes = (shape.num_rows, shape.size)
        return StoredTable(*sizes, dtype=self._dtype, device=self._device, weight_format=weight_format)

    def embedding(
        self,
        tokens: Table,
        *,
        scale: float | None = None,
        positions: Table | None = None,
        offset: int = 0,
        first_id: int | None = None,
        needed_by: tuple[str, ...] = (),
        positions_needed_by: tuple[str, ...] = (),
    ) -> Embedding:
        table = cast(StoredTable, tokens)
        spec = embedding_spec(
            table.size,
            self._dtype_name,
            table_dtype=table.weight_format or "",
            scale=1.0 if scale is None else scale,
            position_offset=None if positions is None else offset,
            rows=None if first_id is None else (first_id, table.num_rows),
            needed_by=needed_by,
        )
        return Embedding(table, EmbeddingKernel(self._kernel(spec)), cast(StoredTable | None, positions))

    def positions(self, table: Table, offset: int, *, needed_by: tuple[str, ...] = ()) -> Positions:
        stored = cast(StoredTable, table)
        gather = row_gather_spec(stored.size, self._dtype_name, needed_by=needed_by)
        return Positions(stored, offset, RowGatherKernel(self._kernel(gather)))

    def linear(self, shape: LinearShape) -> Linear:
        return self._finished_linear(shape, None)

    def linear_add_norm(
        self,
        linear: LinearShape,
        norm: FeatureNorm,
        scale: float | None = None,
        *,
        output_norm: FeatureNorm | None = None,
    ) -> LinearAddNorm:
        rows = norm.of_rows(self._dtype_name, residual=True, scale=1.0 if scale is None else scale)
        finish, inner, needed_by = AddAndNorm(rows), None, norm.needed_by
        if output_norm is not None:
            finish, inner = AddAndNorm(rows, output_norm.of_rows(self._dtype_name)), self.norm(output_norm)
            needed_by = output_norm.needed_by + needed_by
        return LinearAddNorm(self._finished_linear(linear, finish, needed_by), inner, self.add_norm(norm, scale))

    def activated_linear(self, linear: LinearShape, activation: ActivationShape) -> ActivatedLinear:
        finish = Activate(activation.kind, activation.gated)
        project = self._finished_linear(linear, finish, activation.needed_by)
        return ActivatedLinear(project, self.activation(activation))

    def _finished_linear(self, shape: LinearShape, finish: Finish | None, needed_by: tuple[str, ...] = ()) -> Linear:
        """Returns linear layers whose kernels for few rows compute the op that follows, which recipe nodes need."""
        kernel = self._linear_kernel(shape, self._weight_format, finish=finish, finish_needed_by=needed_by)
        return Linear(
            kernel,
            shape.in_features,
            shape.out_features,
            shape.biased,
            dtype=self._dtype,
            device=self._device,
            weight_format=self._weight_format,
            ranks=self.backend.splitting(shape),
        )

    def _linear_kernel(
        self,
        shape: LinearShape,
        weight_format: WeightOnlyFormat | None,
        out_dtype: str = "",
        *,
        finish: Finish | None = None,
        finish_needed_by: tuple[str, ...] = (),
    ) -> LinearKernel:
        sizes = (shape.total, shape.in_features, self._dtype_name, weight_format or "plain")
        few_row = FewRowShape(*sizes, bias=any(shape.biased), out_dtype=out_dtype)
        return self._linears.kernel(few_row, shape.needed_by + finish_needed_by, finish)

    def norm(self, shape: FeatureNorm) -> fused.Norm:
        return fused.Norm(self._norm_kernel(shape), self._norm_weights(shape))

    def add_norm(self, shape: FeatureNorm, scale: float | None = None) -> fused.AddNorm:
        kernel = self._norm_kernel(shape, residual=True, scale=1.0 if scale is None else scale)
        return fused.AddNorm(kernel, self._norm_weights(shape))

    def _norm_kernel(self, norm: FeatureNorm, *, residual: bool = False, scale: float = 1.0) -> NormKernel:
        shape = norm.of_rows(self._dtype_name, residual=residual, scale=scale)
        return NormKernel(self._kernel(norm_spec(shape, needed_by=norm.needed_by)))

    def _norm_weights(self, norm: FeatureNorm) -> NormParameters:
        has = {"weight": norm.weight, "bias": norm.bias}
        return NormParameters(norm.shape, **has, dtype=self._dtype, device=self._device)

    def add(self, scale: float | None = None, *, needed_by: tuple[str, ...] = ()) -> Add:
        return Add(scale)

    def activation(self, shape: ActivationShape) -> Activation:
        spec = activation_spec(
            shape.kind, shape.num_features, self._dtype_name, gated=shape.gated, needed_by=shape.needed_by
        )
        return Activation(ActivationKernel(self._kernel(spec)), shape.num_features)

    def attention(
        self,
        shape: AttentionShape,
        *,
        rotary: RotaryShape | None = None,
        q_norm: QkNorm | None = None,
        k_norm: QkNorm | None = None,
        alibi: Alibi | None = None,
        needed_by: tuple[str, ...] = (),
    ) -> fused.Attention:
        prepare = qkv_spec(
            self._dtype_name,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rotary_dim=rotary.dim if rotary else 0,
            interleaved=rotary is not None and rotary.interleaved,
            q_norm=q_norm.of_heads if q_norm else None,
            k_norm=k_norm.of_heads if k_norm else None,
            needed_by=needed_by,
        )
        token_size = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim  # keys and values lie between queries
        attend = self._attend(replace(shape, q_stride=token_size), needed_by)
        return fused.Attention(
            QkvKernel(self._kernel(prepare)),
            attend if alibi is None else partial(attend, slopes=alibi.slopes),
            num_heads=shape.num_heads,
            head_dim=shape.head_dim,
            q_norm=self._norm_weights(q_norm.norm) if q_norm else None,
            k_norm=self._norm_weights(k_norm.norm) if k_norm else None,
        )

    def projected_attention(
        self,
        qkv: LinearShape,
        shape: AttentionShape,
        *,
        rotary: RotaryShape | None = None,
        q_norm: QkNorm | None = None,
        k_norm: QkNorm | None = None,
        alibi: Alibi | None = None,
        between: Callable[[Tensor], None] | None = None,
        needed_by: tuple[str, ...] = (),
    ) -> ComposedAttention:
        attend = self.attention(shape, rotary=rotary, q_norm=q_norm, k_norm=k_norm, alibi=alibi, needed_by=needed_by)
        # A norm needs whole heads, or what other ranks have, and neighbours are taken in pairs.
        if q_norm or k_norm or between or shape.head_dim % 2:
            return ComposedAttention(self.linear(qkv), attend, between)
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        finish = RotateAndWrite(*sizes) if rotary is None else RotateAndWrite(*sizes, rotary.dim, rotary.interleaved)
        return ProjectedAttention(self._finished_linear(qkv, finish, needed_by), attend)

    def _attend(self, shape: AttentionShape, needed_by: tuple[str, ...]) -> AttentionKernel:
        max_num_seqs = self.backend.max_num_seqs
        chunk, decode = self._attention_tilings(shape)
        specs = attention_specs(
            shape, max_num_seqs=max_num_seqs, arch=self._arch, chunk=chunk, decode=decode, needed_by=needed_by
        )
        # All that a plan depends on; what else distinguishes attentions does not show in it.
        key = (specs.plan, shape.num_kv_heads, shape.v_dim, specs.decode)
        if key not in self.plans:
            self.plans[key] = AttentionPlan(
                specs,
                self._kernel,
                token_budget=self.backend.max_rows,
                max_num_seqs=max_num_seqs,
                num_sms=self.backend.facts.num_sms,
                device=self._device,
            )
        return AttentionKernel(specs, self._kernel, self.plans[key])

    def _attention_tilings(self, shape: AttentionShape) -> tuple[Tiling, Tiling]:
        """Returns the tiles of chunks and of decodes; each shape is tuned once."""
        backend, loader = self.backend, self.backend.loader
        if shape not in self._tilings:
            self._tilings[shape] = (
                (chunk_tiling(shape, self._arch), decode_tiling(shape, self._arch))
                if loader is None
                else tuned_tilings(shape, backend.max_num_seqs, backend.facts.num_sms, loader, self._device)
            )
        return self._tilings[shape]

    def latent_attention(self, shape: LatentShape) -> fused.LatentAttention:
        num_heads = shape.attention.num_heads
        prepare = latent_spec(
            self._dtype_name,
            shape.kv_norm.of_heads(),
            num_heads=num_heads,
            latent_dim=shape.kv_rank,
            nope_dim=shape.nope_dim,
            rotary_dim=shape.rotary.dim,
            interleaved=shape.rotary.interleaved,
            needed_by=shape.needed_by,
        )
        return fused.LatentAttention(
            LatentKernel(self._kernel(prepare)),
            self._attend(shape.attention, shape.needed_by),
            self._norm_weights(shape.kv_norm),
            self._head_maps(shape, shape.nope_dim, transposed=True),
            self._head_maps(shape, shape.v_head_dim, transposed=False),
            nope_dim=shape.nope_dim,
            rank=shape.kv_rank,
        )

    def _head_maps(self, shape: LatentShape, out_features: int, *, transposed: bool) -> HeadMaps:
        num_heads = shape.attention.num_heads
        sizes = (num_heads * out_features, shape.kv_rank)
        return HeadMaps(num_heads, sizes, transposed=transposed, dtype=self._dtype, device=self._device)

    def router(self, shape: RouterShape) -> Router:
        linear = Linear(
            self._linear_kernel(shape.linear, None, "fp32"),
            shape.linear.in_features,
            shape.linear.out_features,
            shape.linear.biased,
            dtype=self._dtype,
            device=self._device,
            out_dtype=torch.float32,
        )
        spec = route_spec(
            shape.num_experts,
            top_k=shape.top_k,
            scoring=shape.scoring,
            normalize=shape.normalize,
            corrected=shape.corrected,
            scale=shape.scale,
            num_groups=shape.num_groups,
            top_groups=shape.top_groups,
            needed_by=shape.needed_by,
        )
        correction = router_correction(shape.num_experts, self._device) if shape.corrected else None
        return Router(linear, RouteKernel(self._kernel(spec)), shape.top_k, correction)

    def experts(self, shape: ExpertsShape) -> Experts:
        cuts = {
            rows: ExpertCut(
                self._sort(shape, tiling.block_m),
                self._product(shape.inward, tiling, top_k=shape.top_k),
                self._product(shape.down, tiling, scatters=True),
            )
            for rows, tiling in grouped_tilings(self._dtype_name, self._arch).items()
        }
        combine = combine_spec(shape.down.total, shape.top_k, self._dtype_name, needed_by=shape.needed_by)
        return Experts(
            self._groups(shape.num_experts, shape.inward),
            self.activation(shape.activation),
            self._groups(shape.num_experts, shape.down),
            cuts,
            CombineKernel(self._kernel(combine)),
        )

    def _groups(self, num_experts: int, shape: LinearShape) -> StoredGroups:
        sizes = (shape.in_features, shape.out_features, shape.biased)
        return StoredGroups(num_experts, *sizes, dtype=self._dtype, device=self._device)

    def _product(
        self, shape: LinearShape, tiling: GroupedTiling, *, top_k: int | None = None, scatters: bool = False
    ) -> GroupedLinearKernel:
        spec = grouped_linear_spec(
            shape.in_features,
            shape.total,
            self._dtype_name,
            tiling,
            top_k=top_k,
            scatters=scatters,
            bias=any(shape.biased),
            needed_by=shape.needed_by,
        )
        return GroupedLinearKernel(self._kernel(spec))

    def _sort(self, shape: ExpertsShape, block_m: int) -> SortKernel:
        kernel = self._kernel(sort_spec(shape.num_experts, block_m, needed_by=shape.needed_by))
        key = (shape.num_experts, block_m, shape.top_k)
        if key not in self._sorts:
            max_choices = self.backend.max_rows * shape.top_k
            self._sorts[key] = SortKernel(kernel, max_choices=max_choices, device=self._device)
        return self._sorts[key]

    def head(self, table: Table, shape: HeadShape) -> Head:
        stored = cast(StoredTable, table)
        sizes = (stored.num_rows, stored.size, self._dtype_name, stored.weight_format or "plain")
        kernel = self._linears.kernel(FewRowShape(*sizes, out_dtype="fp32"), shape.needed_by)
        bias = empty_parameter(stored.num_rows, dtype=torch.float32, device=self._device) if shape.biased else None
        return Head(stored, kernel, bias=bias, scale=shape.scale, softcap=shape.softcap)
