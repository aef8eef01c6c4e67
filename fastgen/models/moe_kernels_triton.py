"""How a mixture of experts runs on the ``triton`` target: which kernels, cut for how many rows an expert gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.compile.capture.recording import library_call
from fastgen.compile.ops.experts.triton import CombineKernel, GroupedLinearKernel, SortKernel
from fastgen.layers.mlp import Activation
from fastgen.layers.moe import GroupedLinear


@dataclass(frozen=True)
class GroupedKernels:
    """A mixture cut into tiles of one height: what sorts its choices, and the products of its experts."""

    sort: SortKernel
    inward: GroupedLinearKernel
    down: GroupedLinearKernel


class TritonMoe:
    """A mixture's :class:`fastgen.layers.moe.MoeKernels`: the first product gathers rows by expert, the second puts
    them back. ``cuts`` are by the rows that an expert gets on average, up to which each holds.
    """

    def __init__(self, cuts: dict[int, GroupedKernels], combine: CombineKernel):
        self._cuts, self._combine = cuts, combine

    def expert_outputs(
        self, x: Tensor, experts: Tensor, inward: GroupedLinear, activation: Activation, down: GroupedLinear
    ) -> Tensor:
        num_choices = experts.numel()
        cut = self._cuts[min(rows for rows in self._cuts if rows * inward.num_experts >= num_choices)]
        tiles = cut.sort(experts)
        inner = x.new_empty(num_choices, sum(inward.out_features))
        cut.inward(x, inward.weight, inward.bias, tiles, num_choices, inner)
        inner = activation(inner)  # the outputs take the place of what it was made from
        outputs = x.new_empty(num_choices, sum(down.out_features))
        cut.down(inner, down.weight, down.bias, tiles, num_choices, outputs)
        return outputs

    def combine(self, outputs: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        out = outputs.new_empty(len(weights), outputs.shape[1])
        self._combine(outputs, weights, out)
        if shared is None:
            return out
        if gate is not None:
            library_call(torch.sigmoid, gate, out=gate)
            library_call(torch.mul, shared, gate, out=shared)
        library_call(torch.add, out, shared, out=out)
        return out
