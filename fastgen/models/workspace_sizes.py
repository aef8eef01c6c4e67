"""How many bytes kernels hold beside weights and activations, told before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from fastgen.compile.backends.kernels import KernelSet
from fastgen.compile.ops.attention.cpp import scratch_bytes
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.triton import AttentionPlan, attention_specs
from fastgen.compile.ops.experts.tiling import grouped_tilings
from fastgen.compile.ops.linear.cpp import linear_workspace_bytes
from fastgen.compile.ops.linear.tiling import FewRowFormat, FewRowShape
from fastgen.compile.ops.linear.triton import few_row_specs, row_tiles
from fastgen.compile.spec import dtype_name
from fastgen.models.shapes import attention_shape
from fastgen.models.spec import MoeSpec
from fastgen.models.weight_sizes import ModelBuild, stacked_linears, whole_numel


class WorkspaceSizes:
    """Of the kernels of a model that is built so; the reference has none."""

    def __init__(self, build: ModelBuild):
        self._build, self._spec, self._target = build, build.spec, build.target

    def size_bytes(self, *, max_rows: int, max_num_seqs: int, block_size: int) -> int:
        """Of tensors, for steps of ``max_rows`` rows of ``max_num_seqs`` sequences, in blocks of ``block_size``."""
        if self._target.name == "cpp":
            return self._cpp_linear(max_rows)
        if self._target.name == "triton":
            plans = self._triton_plans(max_rows, max_num_seqs, block_size)
            return plans + self._split_linear + self._whole_weight + self._experts(max_rows)
        return 0

    def _cpp_linear(self, max_rows: int) -> int:
        """Rows quantised or rounded: one room for all plain matrices, and one for all experts'."""
        choices = max((top_k for _, top_k in self._mixtures), default=0)
        weight_format, most = self._build.packed_format, self._most_features
        assert weight_format is not None
        return sum(linear_workspace_bytes(weight_format, max_rows * rows, most) for rows in (1, choices))

    def scratch_bytes(self, *, max_rows: int, length: int, block_size: int) -> int:
        """What C++ kernels hold by themselves, at most, for sequences of up to ``length`` tokens."""
        if self._target.name != "cpp":
            return 0
        sizes = {"num_tokens": max_rows, "length": length, "num_threads": self._target.num_threads}
        return sum(scratch_bytes(shape, self._target.arch, **sizes) for shape in self._shapes(block_size))

    def _triton_plans(self, max_rows: int, max_num_seqs: int, block_size: int) -> int:
        """Described, not made. Attentions of one shape share a plan, whatever else they differ in."""
        plans = {}
        for shape in self._shapes(block_size):
            specs = attention_specs(shape, max_num_seqs=max_num_seqs, arch=self._target.arch)
            plans[(specs.plan, shape.num_kv_heads, shape.v_dim, specs.decode)] = AttentionPlan(
                specs,
                KernelSet(None).kernel,
                token_budget=max_rows,
                max_num_seqs=max_num_seqs,
                num_sms=self._target.num_sms,
                device=torch.device("meta"),
            )
        return sum(each.nbytes for plan in plans.values() for each in vars(plan).values() if isinstance(each, Tensor))

    @cached_property
    def _split_linear(self) -> int:
        """Parts of features that are split. Layers that need rooms of one size share it."""
        numels = {
            few_row_specs(shape, rows, split).workspace_numel(rows)
            for shape in set(self._few_row_shapes())
            for rows, split in row_tiles(shape, self._target.arch)
        }
        return 4 * sum(numels)

    @property
    def _whole_weight(self) -> int:
        """Where weights in few bits are laid out for the library."""
        return whole_numel(self._spec) * self._build.dtype.itemsize if self._build.weight_only else 0

    def _few_row_shapes(self) -> Iterator[FewRowShape]:
        dtype, head = dtype_name(self._build.dtype), self._spec.head.weight or self._spec.embedding.tokens
        weight: FewRowFormat = self._build.weight_only or "plain"
        num_rows, size = head.shape
        yield FewRowShape(num_rows, size, dtype, weight, out_dtype="fp32")
        for linear in stacked_linears(self._spec):
            if linear.num_groups == 1:
                shape = FewRowShape(linear.out_features, linear.in_features, dtype, weight, bias=linear.biased)
                yield replace(shape, weight="plain", out_dtype="fp32") if linear.exact else shape

    def _experts(self, max_rows: int) -> int:
        """Lists of choices sorted by expert: their order, and tiles of three numbers, for each height of tiles."""
        tilings = grouped_tilings(dtype_name(self._build.dtype), self._target.arch).values()
        size = 0
        for num_experts, top_k in self._mixtures:
            choices = max_rows * top_k
            for height in {tiling.block_m for tiling in tilings}:
                size += 4 * (choices + 3 * (choices // height + min(num_experts, choices)) + 1)
        return size

    @cached_property
    def _most_features(self) -> int:
        return max(tensor.shape[1] for tensor in self._spec.tensors() if len(tensor.shape) == 2)

    @cached_property
    def _mixtures(self) -> set[tuple[int, int]]:
        return {(len(part.experts), part.router.top_k) for part in self._spec.parts() if isinstance(part, MoeSpec)}

    def _shapes(self, block_size: int) -> set[AttentionShape]:
        return {attention_shape(each, self._build.dtype, block_size) for each in self._spec.attentions()}
