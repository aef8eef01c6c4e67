"""How many bytes a model's weights take, told before any is read: what :mod:`fastgen.models.builder` will allocate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch

from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.host.huge_pages import HUGE_PAGE
from fastgen.compile.spec import dtype_name
from fastgen.compile.weights.formats import QuantizedFormat, WeightOnlyFormat
from fastgen.compile.weights.packed import WeightFormat, matrix_format, packed_bytes
from fastgen.compile.weights.quantized import quantized_bytes
from fastgen.models.spec import (
    AttentionSpec,
    BranchSpec,
    LatentAttentionSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    QkNormSpec,
    TensorSpec,
)


@dataclass(frozen=True)
class ModelBuild:
    """A model as it is going to be built: for which ``target``, in which ``dtype``, and what matrices are kept in where
    that is another ``weight_format``."""

    spec: ModelSpec
    dtype: torch.dtype
    target: TargetFacts
    weight_format: QuantizedFormat | None = None

    @property
    def activation_bytes(self) -> int:
        """Of a number between the weights."""
        return self.target.activation_dtype(self.dtype).itemsize

    @cached_property
    def plain_format(self) -> WeightFormat:
        return cast(WeightFormat, dtype_name(self.dtype))

    @property
    def matrix_format(self) -> WeightFormat | QuantizedFormat:
        return self.weight_format or matrix_format(self.plain_format, self.target.arch)

    @property
    def packed_format(self) -> WeightFormat | None:
        """What C++ kernels have their matrices packed in."""
        return cast(WeightFormat, self.matrix_format) if self.target.name == "cpp" else None

    @property
    def weight_only(self) -> WeightOnlyFormat | None:
        """What other targets keep matrices in, where not in ``dtype``."""
        return None if self.target.name == "cpp" else cast(WeightOnlyFormat | None, self.weight_format)


@dataclass(frozen=True)
class WeightSizes:
    """In bytes. ``tables`` are the embedding, learned positions and the head, a tied one once; ``matrices`` the layers'
    with their biases, scales and padding; ``vectors`` norms and the like. ``rotary`` is what a position takes in the
    tables of cosines and sines. ``page_rests`` is what matrices leave of their last huge pages, where they lie in such.
    """

    tables: int
    matrices: int
    vectors: int
    rotary: int
    page_rests: int
    # The largest of the checkpoint, in the model's dtype: loading holds one beside the weights.
    largest_tensor: int


@dataclass(frozen=True)
class StackedLinear:
    """Linear layers of the recipe that the model keeps as one matrix, for they read the same input; of experts one for
    each of ``num_groups``. ``exact`` ones are never quantised."""

    parts: tuple[LinearSpec, ...]
    num_groups: int = 1
    exact: bool = False

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def biased(self) -> bool:
        return any(part.bias is not None for part in self.parts)


def stacked_linears(spec: ModelSpec) -> Iterator[StackedLinear]:
    """All matrices of a model, but its tables and the maps of latent attention's heads."""
    for project in (spec.embedding.project, spec.head.project):
        if project:
            yield StackedLinear((project,))
    for part in spec.parts():
        yield from _linears_of(part)


def whole_numel(spec: ModelSpec) -> int:
    """Of the largest matrix that a model may keep in few bits and a GPU's library multiply."""
    found = (each for each in stacked_linears(spec) if each.num_groups == 1 and not each.exact)
    return max((each.out_features * each.in_features for each in found), default=0)


def _linears_of(part: AttentionSpec | LatentAttentionSpec | MlpSpec | MoeSpec) -> Iterator[StackedLinear]:
    match part:
        case AttentionSpec():
            yield from (StackedLinear((part.q, part.k, part.v)), StackedLinear((part.output,)))
        case LatentAttentionSpec():
            down = (part.q_down,) if part.q_down else ()
            yield from (StackedLinear((each,)) for each in (*down, part.q, part.kv_down, part.output))
        case MlpSpec():
            yield from (StackedLinear(_entering(part)), StackedLinear((part.down,)))
        case MoeSpec():
            expert, num_experts = part.experts[0], len(part.experts)
            yield StackedLinear((part.router.weight,), exact=True)
            yield StackedLinear(_entering(expert), num_experts)
            yield StackedLinear((expert.down,), num_experts)
            if part.shared:
                yield from _linears_of(part.shared)
            if part.shared_gate:
                yield StackedLinear((part.shared_gate,))


def _entering(spec: MlpSpec) -> tuple[LinearSpec, ...]:
    return (spec.gate, spec.up) if spec.gate else (spec.up,)


def weight_sizes(build: ModelBuild) -> WeightSizes:
    """Of the model that is built so. A few hundred bytes a layer (slopes of ALiBi) are left out."""
    return _Sizes(build).all()


class _Sizes:
    def __init__(self, build: ModelBuild):
        self.build, self.spec = build, build.spec
        self.packed_format, self.weight_only = build.packed_format, build.weight_only
        self.page_rests = 0

    def all(self) -> WeightSizes:
        spec, embedding, head = self.spec, self.spec.embedding, self.spec.head
        tables = self.table(embedding.tokens, multiplies=head.weight is None)
        tables += self.table(embedding.positions.weight) if embedding.positions else 0
        tables += self.table(head.weight, multiplies=True) if head.weight else 0
        branches = [branch for layer in spec.layers for branch in layer.branches]
        vectors = self.norms(embedding.norm, spec.final_norm) + sum(map(self.branch_norms, branches))
        vectors += 4 * math.prod(head.bias.shape) if head.bias and not self.packed_format else 0
        matrices = sum(map(self.linear, stacked_linears(spec)))
        for part in spec.parts():
            match part:
                case AttentionSpec():
                    vectors += self.qk_norms(part.q_norm, part.k_norm)
                case LatentAttentionSpec():
                    matrices += self.head_maps(part)
                    vectors += self.norms(part.q_norm, part.kv_norm)
                case MoeSpec():
                    vectors += 4 * math.prod(part.router.correction.shape) if part.router.correction else 0
        rotaries = {_rotary_key(part): part.rotary.dim for part in spec.attentions() if part.rotary}
        largest = max(math.prod(tensor.stored_shape) for tensor in spec.tensors())
        return WeightSizes(
            tables=tables,
            matrices=matrices,
            vectors=vectors,
            rotary=sum(8 * -(-dim // 2) for dim in rotaries.values()),
            page_rests=self.page_rests,
            largest_tensor=largest * self.build.dtype.itemsize,
        )

    def table(self, tensor: TensorSpec, *, multiplies: bool = False) -> int:
        """One that ``multiplies`` is a matrix to kernels."""
        rows, size = tensor.shape
        if multiplies and self.packed_format:
            return self.packed(self.packed_format, rows, size)
        if multiplies and self.weight_only:
            return quantized_bytes(self.weight_only, rows, size)
        return rows * size * self.build.dtype.itemsize

    def linear(self, linear: StackedLinear) -> int:
        rows, size = linear.out_features, linear.in_features
        if self.packed_format:
            weight_format = self.build.plain_format if linear.exact else self.packed_format
            return self.packed(weight_format, rows, size, num_groups=linear.num_groups)
        if self.weight_only and linear.num_groups == 1 and not linear.exact:
            bias = rows * linear.biased * self.build.dtype.itemsize
            return quantized_bytes(self.weight_only, rows, size) + bias
        return linear.num_groups * rows * (size + linear.biased) * self.build.dtype.itemsize

    def packed(self, weight_format: WeightFormat, rows: int, size: int, *, num_groups: int = 1) -> int:
        panels, vectors = packed_bytes(weight_format, rows, size, self.build.target.arch, num_groups=num_groups)
        self.page_rests += -panels % HUGE_PAGE
        return panels + vectors

    def head_maps(self, spec: LatentAttentionSpec) -> int:
        """A matrix for each head; the keys' are kept transposed."""
        plain, heads = self.build.plain_format, spec.num_heads
        if self.packed_format:
            keys = self.packed(plain, spec.kv_rank, spec.nope_dim, num_groups=heads)
            return keys + self.packed(plain, spec.v_head_dim, spec.kv_rank, num_groups=heads)
        return heads * (spec.nope_dim + spec.v_head_dim) * spec.kv_rank * self.build.dtype.itemsize

    def branch_norms(self, branch: BranchSpec) -> int:
        own = [part.norm for part in branch.parts]
        return self.norms(branch.norm, branch.output_norm, branch.sum_norm, *own)

    def qk_norms(self, *norms: QkNormSpec | None) -> int:
        return self.norms(*(each.norm if each else None for each in norms))

    def norms(self, *norms: NormSpec | None) -> int:
        """A bias has the weight's shape."""
        count = 0
        for norm in norms:
            if norm is not None:
                size = math.prod(norm.weight.shape) if norm.weight else norm.size
                count += size * ((norm.weight is not None) + (norm.bias is not None))
        return count * self.build.activation_bytes


def _rotary_key(part: AttentionSpec | LatentAttentionSpec) -> tuple[object, ...]:
    """Layers that rotate alike share a table."""
    rotary = part.rotary
    assert rotary is not None
    return (rotary.theta, rotary.dim, rotary.scaling, rotary.kind)
