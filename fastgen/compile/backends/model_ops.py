"""Makes the ops of a model; each backend does it in its own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from fastgen.compile.backends.modules.composed import ActivatedLinear, LinearAddNorm, ProjectedAttention
from fastgen.compile.backends.ops import (
    ActivationOp,
    AddNormOp,
    AddOp,
    AttentionOp,
    EmbeddingOp,
    ExpertsOp,
    HeadOp,
    LatentAttentionOp,
    LinearAddNormOp,
    LinearOp,
    NormOp,
    PositionsOp,
    ProjectedAttentionOp,
    RouterOp,
    Table,
)
from fastgen.compile.backends.shapes import (
    ActivationShape,
    ExpertsShape,
    FeatureNorm,
    HeadShape,
    LatentShape,
    LinearShape,
    QkNorm,
    RotaryShape,
    RouterShape,
    TableShape,
)
from fastgen.compile.ops.attention.reference import Alibi
from fastgen.compile.ops.attention.shape import AttentionShape


class Ops(ABC):
    """Makes the ops of one model. A backend gives one for a :class:`~fastgen.compile.backends.shapes.ModelShape`."""

    @abstractmethod
    def table(self, shape: TableShape) -> Table:
        """Makes an empty table."""

    @abstractmethod
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
    ) -> EmbeddingOp:
        """Makes the look-up of ``tokens``, and of ``positions`` where they are added to it directly.

        With a ``first_id`` the table has the rows of that id and those behind it; other ids give zeros.
        """

    @abstractmethod
    def positions(self, table: Table, offset: int, *, needed_by: tuple[str, ...] = ()) -> PositionsOp:
        """Makes the addition of learned positions to what was projected from an embedding."""

    @abstractmethod
    def linear(self, shape: LinearShape) -> LinearOp:
        """Makes linear layers of one input. Their weights may be quantized."""

    @abstractmethod
    def norm(self, shape: FeatureNorm) -> NormOp:
        """Makes a norm of rows."""

    @abstractmethod
    def add(self, scale: float | None = None, *, needed_by: tuple[str, ...] = ()) -> AddOp:
        """Makes the sum of the residual stream and ``scale`` times a branch."""

    @abstractmethod
    def add_norm(self, shape: FeatureNorm, scale: float | None = None) -> AddNormOp:
        """Makes that sum and the norm that follows it."""

    @abstractmethod
    def activation(self, shape: ActivationShape) -> ActivationOp:
        """Makes the activation of a feed-forward part."""

    def linear_add_norm(
        self,
        linear: LinearShape,
        norm: FeatureNorm,
        scale: float | None = None,
        *,
        output_norm: FeatureNorm | None = None,
    ) -> LinearAddNormOp:
        """Makes a linear layer whose output, through an ``output_norm`` if there is one, is added to the residual
        stream, and the norm that follows."""
        inner = None if output_norm is None else self.norm(output_norm)
        return LinearAddNorm(self.linear(linear), inner, self.add_norm(norm, scale))

    def activated_linear(self, linear: LinearShape, activation: ActivationShape) -> LinearOp:
        """Makes linear layers of one input, and the activation of their outputs."""
        return ActivatedLinear(self.linear(linear), self.activation(activation))

    @abstractmethod
    def attention(
        self,
        shape: AttentionShape,
        *,
        rotary: RotaryShape | None = None,
        q_norm: QkNorm | None = None,
        k_norm: QkNorm | None = None,
        alibi: Alibi | None = None,
        needed_by: tuple[str, ...] = (),
    ) -> AttentionOp:
        """Makes causal attention over the paged KV cache. ``rotary`` and ``alibi`` say how positions count."""

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
    ) -> ProjectedAttentionOp:
        """Makes :meth:`attention` and the projection to its queries, keys and values, which ``between`` may change."""
        project = self.linear(qkv)
        attend = self.attention(shape, rotary=rotary, q_norm=q_norm, k_norm=k_norm, alibi=alibi, needed_by=needed_by)
        return ProjectedAttention(project, attend, between)

    @abstractmethod
    def latent_attention(self, shape: LatentShape) -> LatentAttentionOp:
        """Makes latent attention."""

    @abstractmethod
    def router(self, shape: RouterShape) -> RouterOp:
        """Makes the router of a mixture."""

    @abstractmethod
    def experts(self, shape: ExpertsShape) -> ExpertsOp:
        """Makes the experts of a mixture."""

    @abstractmethod
    def head(self, table: Table, shape: HeadShape) -> HeadOp:
        """Makes the head that multiplies by ``table``."""

    def workspaces(self) -> list[Tensor]:
        """Returns what kernels work in beside the results of a step; attention's parts aside."""
        return []

    def attention_parts(self) -> list[Tensor]:
        """Returns what C++ kernels of attention work in: each thread's part, and parts of sequences to be joined."""
        return []

    def plan_step(self, cu_seqlens_q: Tensor, seq_lens: Tensor) -> None:
        """Prepares attention for a step of these lengths, ``[S+1]`` and ``[S]`` i32; called before its layers."""
        return
