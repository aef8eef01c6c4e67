"""The ops of a model, as its layers call them: every backend makes objects of these protocols.

An op that has weights stores them in its backend's own layout, and says where each part of a checkpoint is written.
Shape letters are those of :mod:`fastgen.compile.ops`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from fastgen.compile.backends.paged_view import PagedView
from fastgen.compile.weights.rows import Rows


class Table(Protocol):
    """A table of embeddings, or of a head, or of both."""

    @property
    def slot(self) -> Tensor | Rows:
        """Returns the place of the checkpoint's tensor ``[rows, size]``."""


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
        """Returns the linear layer, which is among the modules of the layer whose output it is."""

    @property
    def norm(self) -> NormWeights: ...

    @property
    def output_norm(self) -> NormWeights | None:
        """Returns the norm of what is added, if there is one. It belongs to the same layer as ``linear``."""

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
        """Returns the place of the checkpoint's tensor ``[N * out, rank]``."""


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
        """Returns the map to logits, whose weights are never quantized."""

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
        """Returns the place of the checkpoint's bias ``[V]``."""

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns logits ``[R, V]`` in fp32 of ``hidden [R, H]``. A kernel writes them to ``out`` if it is given."""
