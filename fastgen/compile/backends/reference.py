"""The reference: torch alone, the executable definition of every op."""

from __future__ import annotations

from functools import partial
from typing import cast

from fastgen.compile.backends.backend import Backend
from fastgen.compile.backends.model_ops import Ops
from fastgen.compile.backends.modules.reference import (
    Activation,
    AddNorm,
    Embedding,
    Experts,
    Head,
    HeadMaps,
    Linear,
    Norm,
    Positions,
    Router,
    Table,
)
from fastgen.compile.backends.modules.reference_attention import Attention, LatentAttention
from fastgen.compile.backends.modules.stored import StoredGroups
from fastgen.compile.backends.ops import AddOp
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
from fastgen.compile.ops.add.reference import scaled_add
from fastgen.compile.ops.attention.reference import Alibi
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.weights.formats import WeightOnlyFormat


class ReferenceBackend(Backend):
    """Computes by torch on any device, and has no kernels."""

    steps = "called"

    def __init__(self, facts: TargetFacts | None = None):
        super().__init__(facts or TargetFacts())

    def ops(self, model: ModelShape) -> ReferenceOps:
        """Returns what makes the ops of a model."""
        return ReferenceOps(self, model)


class ReferenceOps(Ops):
    """Makes ops that torch computes. Activations are in the model's dtype."""

    def __init__(self, backend: ReferenceBackend, model: ModelShape):
        self._splitting = backend.splitting
        self._dtype, self._device = model.dtype, model.device
        self._weight_format = cast(WeightOnlyFormat | None, model.weight_format)

    def table(self, shape: TableShape) -> Table:
        weight_format = self._weight_format if shape.multiplies else None
        return Table(shape.num_rows, shape.size, dtype=self._dtype, device=self._device, weight_format=weight_format)

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
        added = None if positions is None else self.positions(positions, offset)
        return Embedding(cast(Table, tokens), scale, added, first_id)

    def positions(self, table: AnyTable, offset: int, *, needed_by: tuple[str, ...] = ()) -> Positions:
        return Positions(cast(Table, table), offset)

    def linear(self, shape: LinearShape) -> Linear:
        return self._linear(shape, self._weight_format)

    def _linear(self, shape: LinearShape, weight_format: WeightOnlyFormat | None) -> Linear:
        return Linear(
            shape.in_features,
            shape.out_features,
            shape.biased,
            dtype=self._dtype,
            device=self._device,
            weight_format=weight_format,
            ranks=self._splitting(shape),
        )

    def norm(self, shape: FeatureNorm) -> Norm:
        return Norm(
            shape.kind,
            shape.shape,
            shape.eps,
            weight=shape.weight,
            bias=shape.bias,
            offset=shape.offset,
            dtype=self._dtype,
            device=self._device,
        )

    def add(self, scale: float | None = None, *, needed_by: tuple[str, ...] = ()) -> AddOp:
        return partial(scaled_add, scale=scale)

    def add_norm(self, shape: FeatureNorm, scale: float | None = None) -> AddNorm:
        return AddNorm(self.norm(shape), scale)

    def activation(self, shape: ActivationShape) -> Activation:
        return Activation(shape.kind, gated=shape.gated)

    def attention(
        self,
        shape: AttentionShape,
        *,
        rotary: RotaryShape | None = None,
        q_norm: QkNorm | None = None,
        k_norm: QkNorm | None = None,
        alibi: Alibi | None = None,
        needed_by: tuple[str, ...] = (),
    ) -> Attention:
        return Attention(
            shape,
            interleaved=rotary is not None and rotary.interleaved,
            q_norm=None if q_norm is None else self.norm(q_norm.norm),
            k_norm=None if k_norm is None else self.norm(k_norm.norm),
            over_all=(q_norm is not None and q_norm.over_all, k_norm is not None and k_norm.over_all),
            alibi=alibi,
        )

    def latent_attention(self, shape: LatentShape) -> LatentAttention:
        return LatentAttention(
            self.norm(shape.kv_norm),
            self._head_maps(shape, shape.nope_dim, transposed=True),
            self._head_maps(shape, shape.v_head_dim, transposed=False),
            nope_dim=shape.nope_dim,
            rope_dim=shape.rope_dim,
            scale=shape.attention.scale,
            interleaved=shape.rotary.interleaved,
        )

    def _head_maps(self, shape: LatentShape, out_features: int, *, transposed: bool) -> HeadMaps:
        num_heads = shape.attention.num_heads
        sizes = (num_heads * out_features, shape.kv_rank)
        return HeadMaps(num_heads, sizes, transposed=transposed, dtype=self._dtype, device=self._device)

    def router(self, shape: RouterShape) -> Router:
        return Router(
            self._linear(shape.linear, None),
            top_k=shape.top_k,
            scoring=shape.scoring,
            normalize=shape.normalize,
            corrected=shape.corrected,
            scale=shape.scale,
            num_groups=shape.num_groups,
            top_groups=shape.top_groups,
            device=self._device,
        )

    def experts(self, shape: ExpertsShape) -> Experts:
        return Experts(
            self._groups(shape.num_experts, shape.inward),
            self.activation(shape.activation),
            self._groups(shape.num_experts, shape.down),
        )

    def _groups(self, num_experts: int, shape: LinearShape) -> StoredGroups:
        sizes = (shape.in_features, shape.out_features, shape.biased)
        return StoredGroups(num_experts, *sizes, dtype=self._dtype, device=self._device)

    def head(self, table: AnyTable, shape: HeadShape) -> Head:
        return Head(
            cast(Table, table),
            biased=shape.biased,
            scale=shape.scale,
            softcap=shape.softcap,
            device=self._device,
        )


# The reference is the same for every model.
REFERENCE = ReferenceBackend()
