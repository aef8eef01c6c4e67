"""Shapes by which layers ask a backend for ops: plain values, nothing of recipes.

``needed_by`` names the recipe nodes that an op is for; generated kernels say it in their heading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.experts.reference import Scoring
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.qkv.head_norm import HeadNorm
from fastgen.compile.weights.formats import QuantizedFormat


@dataclass(frozen=True)
class ModelShape:
    """Holds the facts that all ops of a model share: the ``dtype`` of its weights and KV cache, where they lie, tokens
    of a KV block, the format of its matrices where that is another one, and the sizes of shared workspaces."""

    dtype: torch.dtype
    device: torch.device
    block_size: int = 16
    weight_format: QuantizedFormat | None = None
    # Most features that any matrix reads.
    max_in_features: int = 0
    # Most experts that a token goes to.
    max_choices: int = 1
    # Numbers of the largest matrix that may be quantized.
    max_quantized_numel: int = 0
    # Tokens of the longest sequence.
    max_model_len: int = 1


@dataclass(frozen=True)
class TableShape:
    """A table ``[num_rows, size]``; a head multiplies by one that ``multiplies``."""

    num_rows: int
    size: int
    multiplies: bool = False
    needed_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinearShape:
    """Linear layers of one input, stacked: part ``i`` has ``out_features[i]`` outputs, and a bias if ``biased[i]``.

    Where ranks split the inputs, ``sum_ranks`` says what is summed over them: the results, by the layer's caller, or
    integer products, by the layer itself.
    """

    in_features: int
    out_features: tuple[int, ...]
    biased: tuple[bool, ...]
    needed_by: tuple[str, ...] = ()
    sum_ranks: Literal["results", "products"] | None = None

    @property
    def total(self) -> int:
        """Returns the outputs of all parts."""
        return sum(self.out_features)


@dataclass(frozen=True)
class FeatureNorm:
    """A norm over the last axis of ``shape``; weight and bias, where it has them, are of this shape.

    If it ``feeds_matrices``, nothing reads the results but linear layers whose weights may be quantized, so they may be
    written in these layers' own format.
    """

    kind: Literal["rms", "layer"]
    shape: tuple[int, ...]
    eps: float
    weight: bool = True
    bias: bool = False
    offset: float = 0.0
    needed_by: tuple[str, ...] = ()
    feeds_matrices: bool = False

    @property
    def size(self) -> int:
        """Returns how many features are normed together."""
        return self.shape[-1]

    def of_rows(self, dtype: str, *, residual: bool = False, scale: float = 1.0) -> NormShape:
        """Returns the norm as kernels compute it of rows of ``dtype`` (a short name), with a ``residual`` after ``scale
        * x`` was added to that."""
        sizes = (self.kind, self.size, dtype, self.eps)
        return NormShape(*sizes, self.weight, self.bias, self.offset, residual=residual, scale=scale)

    def of_heads(self, *, over_all: bool = False) -> HeadNorm:
        """Returns the norm as kernels of attention compute it, of each head or ``over_all`` heads together."""
        per_head = self.weight and len(self.shape) > 1
        return HeadNorm(self.kind, self.eps, self.offset, over_all, per_head, self.weight, self.bias)


@dataclass(frozen=True)
class QkNorm:
    """A norm of queries or keys: of each head by itself, or ``over_all`` heads laid together."""

    norm: FeatureNorm
    over_all: bool = False

    @property
    def of_heads(self) -> HeadNorm:
        """Returns the norm as kernels of attention compute it."""
        return self.norm.of_heads(over_all=self.over_all)


@dataclass(frozen=True)
class RotaryShape:
    """The first ``dim`` features of a head are rotated: neighbours in pairs if ``interleaved``, else the two halves."""

    dim: int
    interleaved: bool = False


@dataclass(frozen=True)
class ActivationShape:
    """An activation to ``num_features`` outputs. ``kind`` is a key of
    :data:`fastgen.compile.ops.activation.reference.ACTIVATIONS`; a ``gated`` one reads twice as many features.
    ``feeds_matrices`` is that of :class:`FeatureNorm`."""

    kind: str
    num_features: int
    gated: bool
    needed_by: tuple[str, ...] = ()
    feeds_matrices: bool = False


@dataclass(frozen=True)
class LatentShape:
    """Latent attention: a head's query has ``nope_dim`` features that are not rotated and ``rope_dim`` that are; the
    cache holds ``attention.v_dim`` features of the latent and ``rope_dim`` of the shared key."""

    attention: AttentionShape
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    rotary: RotaryShape
    kv_norm: FeatureNorm
    needed_by: tuple[str, ...] = ()
    # Recipe nodes of the heads' maps of the latent to keys, and to values.
    k_up_needed_by: tuple[str, ...] = ()
    v_up_needed_by: tuple[str, ...] = ()

    @property
    def kv_rank(self) -> int:
        """Returns how many features the latent has."""
        return self.attention.v_dim


@dataclass(frozen=True)
class RouterShape:
    """A router of tokens to experts; see :func:`fastgen.compile.ops.experts.reference.route`."""

    linear: LinearShape
    top_k: int
    scoring: Scoring
    normalize: bool
    corrected: bool = False
    scale: float | None = None
    num_groups: int = 1
    top_groups: int = 1
    needed_by: tuple[str, ...] = ()

    @property
    def num_experts(self) -> int:
        return self.linear.total


@dataclass(frozen=True)
class ExpertsShape:
    """``num_experts`` alike, of which a token goes to ``top_k``: ``inward``, ``activation``, ``down``. Their sum may
    have a ``shared`` expert added, weighed by a gate if ``gated``."""

    num_experts: int
    top_k: int
    inward: LinearShape
    activation: ActivationShape
    down: LinearShape
    shared: bool = False
    gated: bool = False
    needed_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeadShape:
    """A head's ``softcap(scale * (hidden Wᵀ + bias))``; bias, scale and cap may be absent."""

    biased: bool = False
    scale: float | None = None
    softcap: float | None = None
    needed_by: tuple[str, ...] = ()
