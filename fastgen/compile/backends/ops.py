"""The ops of a model, as its layers call them: every backend makes objects of these protocols.

An op that has weights stores them in its backend's own layout, and says where each part of a checkpoint is written.
Shape letters are those of :mod:`fastgen.compile.ops`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from fastgen.compile.backends.modules.composed import ActivatedLinear, LinearAddNorm, ProjectedAttention
from fastgen.compile.backends.modules.paged_view import PagedView
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
from fastgen.compile.weights.rows import Rows


class Table(Protocol):
    """A table of embeddings, or of a head, or of both."""

    @property
    def slot(self) -> Tensor | Rows:
        """The place of the checkpoint's tensor ``[rows, size]``."""


class EmbeddingOp(Protocol):
    def __call__(self, input_ids: Tensor, token_source: Tensor, sampled_ids: Tensor, positions: Tensor) -> Tensor:
        """Returns ``scale * tokens[id] (+ positions[position + offset])``: ``[T, E]``.

        ``input_ids``, ``token_source``, ``positions`` are ``[T]`` i32, ``sampled_ids [S]`` i32; see
        :func:`fastgen.compile.ops.embedding.reference.resolve_token_ids`.
        """


class PositionsOp(Protocol):
    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Returns ``x + table[position + offset]``, which may be ``x`` itself: ``x [T, H]``, ``positions [T]`` i32."""


class LinearOp(Protocol):
    def part(self, index: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of part ``index``: of its weight rows ``[out, in]`` and of its bias ``[out]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns ``x Wᵀ + b`` of all parts side by side: ``[T, in] -> [T, sum of out]``, in the dtype of ``x``."""


class NormWeights(Protocol):
    """The weights of a norm, where it has them, in the dtype of activations."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None


class NormOp(NormWeights, Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """Returns the norm of each row: ``[T, H]`` to the same."""


class AddOp(Protocol):
    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns ``x + scale * y``, which may be ``x`` itself: both ``[T, H]``."""


class AddNormOp(Protocol):
    @property
    def norm(self) -> NormWeights: ...

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``x + scale * y``, which may be ``x`` itself, and the norm of the sum: all ``[T, H]``."""


class LinearAddNormOp(Protocol):
    @property
    def linear(self) -> LinearOp:
        """The linear layer; the layer whose output it is counts it among its modules."""

    @property
    def norm(self) -> NormWeights: ...

    @property
    def output_norm(self) -> NormWeights | None:
        """The norm of what is added, if there is one; it belongs to the same layer as ``linear``."""

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``x + scale * output_norm(linear(y))``, which may be ``x`` itself, and the norm of the sum: ``x`` and
        both ``[T, H]``, ``y [T, in]``."""


class AllReduceOp(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks, in ``x [T, H]`` itself: that of rank 0, plus that of rank 1, and so on."""


class GatherOp(Protocol):
    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes the columns ``x [R, n]`` of all ranks side by side into ``out [R, V]`` of rank 0."""


class ActivationOp(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """Returns ``act(x)``, or if it is gated ``act(gate) * up`` of ``x [T, 2F]``, the gate in the first half."""


class AttentionOp(Protocol):
    """All between the projection to queries, keys and values and the output projection."""

    @property
    def q_norm(self) -> NormWeights | None: ...

    @property
    def k_norm(self) -> NormWeights | None: ...

    def __call__(self, qkv: Tensor, cos_sin: Tensor | None, positions: Tensor, cache: PagedView) -> Tensor:
        """Norms and rotates queries and keys, writes keys and values to the cache, attends: ``[T, N, Dv]``.

        ``qkv [T, (N + 2K) D]`` may be changed; ``cos_sin [max_positions, R]`` fp32; ``positions [T]`` i32.
        """


class ProjectedAttentionOp(Protocol):
    """All of attention but the output projection."""

    @property
    def qkv(self) -> LinearOp: ...

    @property
    def q_norm(self) -> NormWeights | None: ...

    @property
    def k_norm(self) -> NormWeights | None: ...

    def __call__(self, x: Tensor, cos_sin: Tensor | None, positions: Tensor, cache: PagedView) -> Tensor:
        """Projects ``x [T, H]`` to queries, keys and values and computes :class:`AttentionOp`: ``[T, N, Dv]``."""


class HeadMaps(Protocol):
    """A linear map of its own for each head."""

    @property
    def slot(self) -> Tensor | Rows:
        """The place of the checkpoint's tensor ``[N * out, rank]``."""


class LatentAttentionOp(Protocol):
    """All between the projections of latent attention, in its absorbed form: see
    :class:`fastgen.layers.latent_attention.LatentAttention`."""

    @property
    def kv_norm(self) -> NormWeights: ...

    @property
    def k_up(self) -> HeadMaps: ...

    @property
    def v_up(self) -> HeadMaps: ...

    def __call__(self, q: Tensor, kv: Tensor, cos_sin: Tensor, positions: Tensor, cache: PagedView) -> Tensor:
        """Writes the normed latent and the rotated key of ``kv [T, rank + rope]`` to the cache and attends.

        ``q [T, N, nope + rope]``, ``cos_sin [max_positions, R]`` fp32, ``positions [T]`` i32; returns ``[T, N, v]``.
        """


class RouterOp(Protocol):
    @property
    def linear(self) -> LinearOp:
        """The map to logits; its weights are never quantized."""

    # ``[E]`` fp32, where the router has a correction.
    correction: nn.Parameter | None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the experts of each token and their weights: ``x [T, H]`` to ``[T, k]`` integers and ``[T, k]`` fp32.
        Logits are computed in fp32."""


class ExpertsOp(Protocol):
    def inward_part(self, expert: int, index: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of part ``index`` of an expert's first layer, as :meth:`LinearOp.part` does."""

    def down_part(self, expert: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of an expert's second layer."""

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """Returns the weighted sum of each token's experts, and the shared expert's output added: ``[T, H]``.

        ``x [T, H]``; ``experts`` and ``weights`` are the router's; ``shared [T, H]`` is weighed by the sigmoid of its
        ``gate [T, 1]``. Both may be changed.
        """


class HeadOp(Protocol):
    @property
    def bias_slot(self) -> Tensor | None:
        """The place of the checkpoint's bias ``[V]``."""

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns logits ``[R, V]`` in fp32 of ``hidden [R, H]``. A kernel writes them to ``out`` if it is given."""


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
