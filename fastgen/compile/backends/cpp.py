"""C++ kernels for one instruction set of CPUs: activations in fp32, weights packed, threads of a pool."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fastgen.compile.backends.backend import Backend
from fastgen.compile.backends.model_ops import Ops
from fastgen.compile.backends.modules import fused
from fastgen.compile.backends.modules.cpp import (
    Embedding,
    Experts,
    Groups,
    Head,
    HeadMaps,
    Linear,
    OverRanks,
    PackedTable,
    PlainTable,
    Positions,
    Router,
    Table,
)
from fastgen.compile.backends.modules.reference import router_correction
from fastgen.compile.backends.modules.stored import NormParameters
from fastgen.compile.backends.ops import AllReduceOp, GatherOp
from fastgen.compile.backends.ops import Table as AnyTable
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
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.capture.tape import tape_spec
from fastgen.compile.host.thread_pool import ThreadPool, load_thread_pool, thread_pool_spec
from fastgen.compile.host.workspace import Workspace
from fastgen.compile.ops.activation.cpp import ActivationKernel, activation_spec
from fastgen.compile.ops.add.cpp import AddKernel, add_spec
from fastgen.compile.ops.attention.cpp import AttentionKernel, AttentionLimits, attention_spec, empty_cache
from fastgen.compile.ops.attention.reference import Alibi
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.embedding.cpp import EmbeddingKernel, embedding_spec
from fastgen.compile.ops.experts.cpp import (
    CombineKernel,
    GroupedLinearKernel,
    RouteKernel,
    SortKernel,
    combine_spec,
    route_spec,
    sort_spec,
)
from fastgen.compile.ops.latent.cpp import LatentKernel, latent_spec
from fastgen.compile.ops.linear.cpp import LinearKernel, linear_spec
from fastgen.compile.ops.next_decodes.cpp import NextDecodesKernel, next_decodes_spec
from fastgen.compile.ops.norm.cpp import NormKernel, norm_spec
from fastgen.compile.ops.qkv.cpp import QkvKernel, qkv_spec
from fastgen.compile.ops.ranks.cpp import (
    AllReduceKernel,
    GatherKernel,
    RowMaximaKernel,
    SumProductsKernel,
    all_reduce_spec,
    gather_columns_spec,
    row_maxima_spec,
    sum_products_spec,
)
from fastgen.compile.ops.ranks.decodes import (
    HearTokensKernel,
    TellTokensKernel,
    hear_tokens_spec,
    tell_tokens_spec,
)
from fastgen.compile.ops.sampling.cpp import SamplingKernel, sampling_spec
from fastgen.compile.ops.softcap.cpp import SoftcapKernel, softcap_spec
from fastgen.compile.spec import KernelSpec, dtype_name
from fastgen.compile.weights.packed import WeightFormat, matrix_format
from fastgen.compile.weights.prepared_rows import row_format

_CPU = torch.device("cpu")
_EVERY_ENGINE = ("every engine",)
_SAMPLER = ("the sampler",)


class CppBackend(Backend):
    """Runs C++ kernels on a CPU. A step has at most ``max_rows`` rows of ``max_num_seqs`` sequences, by default one for
    each row."""

    steps = "taped"
    pads_batches = False

    def __init__(
        self, facts: TargetFacts, loader: KernelLoader | None = None, *, max_rows: int = 0, max_num_seqs: int = 0
    ):
        super().__init__(facts, loader)
        self.max_rows, self.max_num_seqs = max_rows, max_num_seqs or max_rows

    def ops(self, model: ModelShape) -> CppOps:
        """Returns what makes the ops of a model."""
        return CppOps(self, model)

    def all_reduce(self, num_ranks: int, dtype: torch.dtype) -> AllReduceOp:
        """Returns the sum over all ranks, which share memory."""
        return AllReduceKernel(self.kernels.kernel(all_reduce_spec(self.facts.arch)), self.ranks)

    def gather(self, num_ranks: int) -> GatherOp:
        """Returns what gathers columns of all ranks on rank 0."""
        return GatherKernel(self.kernels.kernel(gather_columns_spec()), self.ranks)

    def kv_storage(
        self,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        latent_dim: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Returns room for keys and values, in huge pages, with the layout of :func:`empty_cache`."""
        return empty_cache(num_blocks, block_size, num_heads, head_dim, latent_dim, dtype=dtype, device=device)

    def row_sampling(self, vocab_size: int, *, max_rows: int, device: torch.device = _CPU) -> SamplingKernel:
        """Returns the kernel that samples rows which the host describes in every step."""
        kernel = self.kernels.kernel(sampling_spec(self.facts.arch, needed_by=_SAMPLER))
        return SamplingKernel(
            kernel, vocab_size, max_rows=max_rows, max_threads=self.num_threads(device), device=device
        )

    def num_threads(self, device: torch.device) -> int:
        """Returns the threads that work on ``device``: those of the pool, where there is one."""
        is_described = self.loader is None or device.type == "meta"
        return self.facts.num_threads if is_described else self.thread_pool().num_threads

    def next_decodes(self) -> NextDecodesKernel:
        """Returns the kernel that makes the inputs of a step of decodes of the step before."""
        return NextDecodesKernel(self.kernels.kernel(next_decodes_spec(needed_by=_EVERY_ENGINE)))

    def tell_tokens(self) -> TellTokensKernel:
        """Returns the kernel by which rank 0 tells others the tokens of steady decodes."""
        return TellTokensKernel(self.kernels.kernel(tell_tokens_spec()))

    def hear_tokens(self) -> HearTokensKernel:
        """Returns the kernel by which another rank hears them."""
        return HearTokensKernel(self.kernels.kernel(hear_tokens_spec()))

    def thread_pool(self) -> ThreadPool:
        """Returns the threads on which kernels run."""
        assert self.loader is not None, "the threads come with kernels, which a loader loads"
        return load_thread_pool(self.loader)

    def engine_specs(self, vocab_size: int) -> list[KernelSpec]:
        """Returns the sampler's kernel, and the libraries that run kernels."""
        pool = replace(thread_pool_spec(), needed_by=("every kernel that runs on several threads",))
        sampling = sampling_spec(self.facts.arch, needed_by=_SAMPLER)
        return [sampling, next_decodes_spec(needed_by=_EVERY_ENGINE), pool, tape_spec()]


class CppOps(Ops):
    """Makes ops of C++ kernels. Linear layers of a weight format share a kernel and its workspace."""

    def __init__(self, backend: CppBackend, model: ModelShape):
        self._backend, self._model = backend, model
        self._arch, self._max_rows = backend.facts.arch, backend.max_rows
        self._kernel = backend.kernels.kernel
        self._dtype_name = dtype_name(model.dtype)
        self._plain_format = cast(WeightFormat, self._dtype_name)
        chosen = model.weight_format or matrix_format(self._plain_format, self._arch)
        self._matrix_format = cast(WeightFormat, chosen)
        # How what feeds nothing but matrices is written.
        self._rows = row_format(self._matrix_format, self._arch)
        # By the format of weights, and whether ranks sum products.
        self._linear_kernels: dict[tuple[WeightFormat, bool], LinearKernel] = {}
        # The launchers of heads' maps, by the number of heads and the most features of one.
        self._head_kernels: dict[tuple[int, int], LinearKernel] = {}
        self._grouped_kernels: dict[bool, GroupedLinearKernel] = {}
        num_threads = backend.num_threads(model.device)
        self._limits = AttentionLimits(backend.max_rows, backend.max_num_seqs, model.max_model_len, num_threads)
        self._attention_workspace = Workspace(model.device)

    def workspaces(self) -> list[Tensor]:
        """Returns what linear layers round or quantize rows in."""
        kernels = (*self._linear_kernels.values(), *self._head_kernels.values(), *self._grouped_kernels.values())
        return list(dict.fromkeys(kernel.workspace for kernel in kernels))

    def attention_parts(self) -> list[Tensor]:
        """Returns what all attentions work in."""
        return [self._attention_workspace.memory]

    def table(self, shape: TableShape) -> Table:
        if shape.multiplies:
            return PackedTable(self._linear_kernel(self._matrix_format, shape.needed_by), shape.num_rows, shape.size)
        return PlainTable(shape.num_rows, shape.size, dtype=self._model.dtype, device=self._model.device)

    def _linear_kernel(
        self, weight_format: WeightFormat, needed_by: tuple[str, ...], *, over_ranks: bool = False
    ) -> LinearKernel:
        kernel = self._kernel(linear_spec(weight_format, self._arch, over_ranks=over_ranks, needed_by=needed_by))
        if (weight_format, over_ranks) not in self._linear_kernels:
            other = self._linear_kernels.get((weight_format, not over_ranks))
            self._linear_kernels[weight_format, over_ranks] = LinearKernel(
                kernel,
                self._max_rows,
                self._model.max_in_features,
                self._model.device,
                None if other is None else other.workspace,
            )
        return self._linear_kernels[weight_format, over_ranks]

    def embedding(
        self,
        tokens: AnyTable,
        *,
        scale: float | None = None,
        positions: AnyTable | None = None,
        offset: int = 0,
        first_id: int | None = None,
        needed_by: tuple[str, ...] = (),
        positions_needed_by: tuple[str, ...] = (),
    ) -> Embedding:
        table = cast(Table, tokens)
        packed = isinstance(table, PackedTable)
        table_format = str(table.packed.format) if isinstance(table, PackedTable) else self._dtype_name
        rows = None if first_id is None else (first_id, table.num_rows)
        spec = embedding_spec(self._arch, table_format, packed=packed, scale=scale, rows=rows, needed_by=needed_by)
        kernel = EmbeddingKernel(self._kernel(spec))
        added = None if positions is None else self.positions(positions, offset, needed_by=positions_needed_by)
        return Embedding(table, kernel, added)

    def positions(self, table: AnyTable, offset: int, *, needed_by: tuple[str, ...] = ()) -> Positions:
        spec = embedding_spec(self._arch, self._dtype_name, packed=False, offset=offset, needed_by=needed_by)
        return Positions(cast(PlainTable, table), EmbeddingKernel(self._kernel(spec)))

    def linear(self, shape: LinearShape) -> Linear:
        return self._linear(shape, self._matrix_format)

    def _linear(self, shape: LinearShape, weight_format: WeightFormat) -> Linear:
        over_ranks = self._over_ranks(shape)
        return Linear(
            self._linear_kernel(weight_format, shape.needed_by, over_ranks=over_ranks is not None),
            shape.in_features,
            shape.out_features,
            ranks=self._backend.splitting(shape),
            over_ranks=over_ranks,
        )

    def _over_ranks(self, shape: LinearShape, *, routed: bool = False) -> OverRanks | None:
        """Returns what surrounds the products of a layer, where ranks sum them."""
        if shape.sum_ranks != "products":
            return None
        row_maxima = RowMaximaKernel(self._kernel(row_maxima_spec(self._arch)), self._backend.ranks)
        sums = self._kernel(sum_products_spec(self._arch, routed=routed))
        return OverRanks(row_maxima, SumProductsKernel(sums, self._backend.ranks))

    def norm(self, shape: FeatureNorm) -> fused.Norm:
        return fused.Norm(self._norm_kernel(shape), self._norm_weights(shape))

    def add_norm(self, shape: FeatureNorm, scale: float | None = None) -> fused.AddNorm:
        kernel = self._norm_kernel(shape, residual=True, scale=1.0 if scale is None else scale)
        return fused.AddNorm(kernel, self._norm_weights(shape))

    def _norm_kernel(self, norm: FeatureNorm, *, residual: bool = False, scale: float = 1.0) -> NormKernel:
        shape = norm.of_rows("fp32", residual=residual, scale=scale)
        rows = self._rows if norm.feeds_matrices else None
        return NormKernel(self._kernel(norm_spec(shape, rows, needed_by=norm.needed_by)), rows)

    def _norm_weights(self, norm: FeatureNorm) -> NormParameters:
        device = self._model.device
        return NormParameters(norm.shape, weight=norm.weight, bias=norm.bias, dtype=torch.float32, device=device)

    def add(self, scale: float | None = None, *, needed_by: tuple[str, ...] = ()) -> AddKernel:
        return AddKernel(self._kernel(add_spec(self._arch, scale, needed_by=needed_by)))

    def activation(self, shape: ActivationShape) -> ActivationKernel:
        rows = self._rows if shape.feeds_matrices else None
        spec = activation_spec(
            shape.kind,
            self._arch,
            gated=shape.gated,
            rows=rows,
            num_features=shape.num_features,
            needed_by=shape.needed_by,
        )
        return ActivationKernel(self._kernel(spec), rows)

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
            self._arch,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            cache_dtype=shape.dtype,
            rotary_dim=rotary.dim if rotary else 0,
            interleaved=rotary is not None and rotary.interleaved,
            q_norm=q_norm.of_heads if q_norm else None,
            k_norm=k_norm.of_heads if k_norm else None,
            needed_by=needed_by,
        )
        return fused.Attention(
            QkvKernel(self._kernel(prepare)),
            self._attend(shape, needed_by, alibi),
            num_heads=shape.num_heads,
            head_dim=shape.head_dim,
            q_norm=self._norm_weights(q_norm.norm) if q_norm else None,
            k_norm=self._norm_weights(k_norm.norm) if k_norm else None,
        )

    def _attend(self, shape: AttentionShape, needed_by: tuple[str, ...], alibi: Alibi | None = None) -> AttentionKernel:
        kernel = self._kernel(attention_spec(shape, self._arch, needed_by))
        slopes = None if alibi is None else alibi.slopes
        return AttentionKernel(kernel, self._limits, self._attention_workspace, slopes)

    def latent_attention(self, shape: LatentShape) -> fused.LatentAttention:
        attention = shape.attention
        k_up = self._head_maps(shape, shape.nope_dim, shape.k_up_needed_by, transposed=True)
        v_up = self._head_maps(shape, shape.v_head_dim, shape.v_up_needed_by, transposed=False)
        prepare = latent_spec(
            self._arch,
            num_heads=attention.num_heads,
            nope_dim=shape.nope_dim,
            rope_dim=shape.rope_dim,
            kv_rank=shape.kv_rank,
            block_size=attention.block_size,
            cache_dtype=attention.dtype,
            rotary_dim=shape.rotary.dim,
            interleaved=shape.rotary.interleaved,
            norm=shape.kv_norm.of_heads(),
            needed_by=shape.needed_by,
        )
        return fused.LatentAttention(
            LatentKernel(self._kernel(prepare)),
            self._attend(attention, shape.needed_by),
            self._norm_weights(shape.kv_norm),
            k_up,
            v_up,
            nope_dim=shape.nope_dim,
            rank=shape.kv_rank,
        )

    def _head_maps(
        self, shape: LatentShape, out_features: int, needed_by: tuple[str, ...], *, transposed: bool
    ) -> HeadMaps:
        num_heads = shape.attention.num_heads
        sizes = (num_heads, max(shape.kv_rank, shape.nope_dim))
        built = self._kernel(linear_spec(self._plain_format, self._arch, needed_by=needed_by))
        if sizes not in self._head_kernels:
            max_rows = self._max_rows * num_heads
            self._head_kernels[sizes] = LinearKernel(built, max_rows, sizes[1], self._model.device)
        kernel = self._head_kernels[sizes]
        return HeadMaps(kernel, num_heads, (num_heads * out_features, shape.kv_rank), transposed=transposed)

    def router(self, shape: RouterShape) -> Router:
        linear = self._linear(shape.linear, self._plain_format)
        spec = route_spec(
            self._arch,
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
        correction = router_correction(shape.num_experts, self._model.device) if shape.corrected else None
        return Router(linear, RouteKernel(self._kernel(spec)), correction)

    def experts(self, shape: ExpertsShape) -> Experts:
        sort = sort_spec(shape.num_experts, needed_by=shape.needed_by)
        combine = combine_spec(
            self._arch, top_k=shape.top_k, shared=shape.shared, gated=shape.gated, needed_by=shape.needed_by
        )
        return Experts(
            self._groups(shape.num_experts, shape.inward),
            self.activation(shape.activation),
            self._groups(shape.num_experts, shape.down),
            SortKernel(self._kernel(sort)),
            CombineKernel(self._kernel(combine)),
        )

    def _groups(self, num_experts: int, shape: LinearShape) -> Groups:
        ranks, over_ranks = self._backend.splitting(shape), self._over_ranks(shape, routed=True)
        sums = over_ranks is not None
        spec = linear_spec(self._matrix_format, self._arch, routed=True, over_ranks=sums, needed_by=shape.needed_by)
        kernel = self._kernel(spec)
        if sums not in self._grouped_kernels:
            other = self._grouped_kernels.get(not sums)
            self._grouped_kernels[sums] = GroupedLinearKernel(
                kernel,
                self._max_rows * self._model.max_choices,
                self._model.max_in_features,
                self._model.device,
                None if other is None else other.workspace,
            )
        return Groups(
            self._grouped_kernels[sums],
            num_experts,
            shape.in_features,
            shape.out_features,
            ranks=ranks,
            over_ranks=over_ranks,
        )

    def head(self, table: AnyTable, shape: HeadShape) -> Head:
        softcap = None
        if shape.softcap is not None:
            spec = softcap_spec(shape.softcap, self._arch, needed_by=shape.needed_by)
            softcap = SoftcapKernel(self._kernel(spec))
        return Head(cast(PackedTable, table), scale=shape.scale, softcap=softcap)
