"""Mixture of experts: a router, the experts' weights stacked, and sometimes an expert that all tokens share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fastgen.compile.ops.experts.cpp import GroupedLinearKernel
from fastgen.compile.ops.experts.reference import Scoring, combine, route, sort_by_expert
from fastgen.compile.ops.linear.reference import grouped_linear
from fastgen.layers.linear import Linear, PackedRows
from fastgen.layers.mlp import Activation, GatedMlp, Mlp

# Chooses experts, given the router's logits and what corrects them: see
# :func:`fastgen.compile.ops.experts.reference.route`.
Choose = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


class Router(nn.Module):
    """``x [T, H]`` to expert ids and weights ``[T, k]``, in fp32; see
    :func:`fastgen.compile.ops.experts.reference.route`.

    A ``kernel`` computes it, where there is one.
    """

    def __init__(
        self,
        linear: Linear,
        *,
        top_k: int,
        scoring: Scoring,
        normalize: bool,
        corrected: bool = False,
        scale: float | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        device: torch.device,
        kernel: Choose | None = None,
    ):
        super().__init__()
        self.kernel = kernel
        self.linear, self.top_k, self.scoring, self.normalize, self.scale = linear, top_k, scoring, normalize, scale
        self.num_groups, self.top_groups = num_groups, top_groups
        (num_experts,) = linear.out_features
        # In fp32 whatever the model's dtype: a choice between experts must not be made by rounding.
        self.correction = (
            nn.Parameter(torch.empty(num_experts, dtype=torch.float32, device=device), requires_grad=False)
            if corrected
            else None
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.linear.logits(x)
        if self.kernel is not None:
            return self.kernel(logits, self.correction)
        return route(
            logits,
            self.correction,
            top_k=self.top_k,
            scoring=self.scoring,
            normalize=self.normalize,
            scale=self.scale,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
        )


class GroupedLinear(nn.Module):
    """A linear layer for each expert, several of the checkpoint's stacked where they read the same input.

    ``x [M, in]`` sorted by expert to ``[M, sum(out_features)]``. With a ``kernel`` the weights are packed for it.
    :class:`MoeKernels` multiply by them in their own way.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: Sequence[int],
        biased: Sequence[bool],
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernel: GroupedLinearKernel | None = None,
    ):
        super().__init__()
        self.num_experts, self.out_features, self.kernel = num_experts, list(out_features), kernel
        shape = (num_experts, sum(out_features))
        if kernel is not None:
            self.packed = kernel.pack(sum(out_features), in_features, num_groups=num_experts)
            return
        self.weight = nn.Parameter(torch.empty(*shape, in_features, dtype=dtype, device=device), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False) if any(biased) else None
        )

    def part(self, expert: int, index: int) -> tuple[Tensor | PackedRows, Tensor | None]:
        """Where part ``index`` of one expert goes: its weight rows ``[out, in]`` and its bias ``[out]``."""
        start = sum(self.out_features[:index])
        rows = slice(start, start + self.out_features[index])
        if self.kernel is not None:
            packed = self.packed.group(expert)
            return PackedRows(packed, start, (self.out_features[index], packed.in_features)), packed.bias[rows]
        return self.weight.data[expert, rows], None if self.bias is None else self.bias.data[expert, rows]

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return grouped_linear(x, self.weight, self.bias, counts)


class MoeKernels(Protocol):
    """What computes a mixture behind its router. Choices are numbered ``token * k + place``."""

    def expert_outputs(
        self, x: Tensor, experts: Tensor, inward: GroupedLinear, activation: Activation, down: GroupedLinear
    ) -> Tensor:
        """``[T * k, H]`` in the order of choices, of ``x [T, H]`` and the ``experts [T, k]`` that the router chose."""

    def combine(self, outputs: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        """``[T, H]``: these outputs weighed ``[T, k]`` and summed, and what is ``shared [T, H]`` added, weighed by the
        sigmoid of its ``gate [T, 1]``. May change both."""


class Moe(nn.Module):
    """``x [T, H] -> [T, H]``: the weighted sum of each token's experts, plus the shared expert where there is one.

    ``inward`` is the experts' up, or gate and up stacked where the activation is gated. ``shared_gate`` ``H -> 1``
    weighs the shared expert by a sigmoid. ``kernels`` compute what the experts do, where there are some.
    """

    def __init__(
        self,
        router: Router,
        inward: GroupedLinear,
        down: GroupedLinear,
        activation: Activation,
        *,
        shared: Mlp | GatedMlp | None = None,
        shared_gate: Linear | None = None,
        kernels: MoeKernels | None = None,
    ):
        super().__init__()
        self.kernels = kernels
        self.router, self.inward, self.down = router, inward, down
        self.activation, self.shared, self.shared_gate = activation, shared, shared_gate

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.router(x)
        shared: Tensor | None = None if self.shared is None else self.shared(x)
        gate: Tensor | None = None if self.shared_gate is None else self.shared_gate(x)
        if self.kernels is not None:
            outputs = self.kernels.expert_outputs(x, experts, self.inward, self.activation, self.down)
            return self.kernels.combine(outputs, weights, shared, gate)
        order, counts = sort_by_expert(experts, self.inward.num_experts)
        inner = self.activation(self.inward(x[order // experts.shape[1]], counts))
        out = combine(self.down(inner, counts), order, weights)
        if shared is None:
            return out
        return out + (shared if gate is None else gate.sigmoid() * shared)
