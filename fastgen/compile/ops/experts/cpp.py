"""Mixture of experts in C++: routing, the experts' linear layers, and the sum of their results.

Choices are sorted by expert, but rows are not moved: the experts' layers read and write them by the sorted order.
``T`` tokens, ``E`` experts, ``k`` of them a token, ``T*k`` choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.experts.reference import Scoring
from fastgen.compile.ops.linear.cpp import LinearKernel
from fastgen.compile.spec import Argument, KernelSpec
from fastgen.compile.weights.packed import PackedWeight


def route_spec(
    arch: str,
    num_experts: int,
    *,
    top_k: int,
    scoring: Scoring,
    normalize: bool,
    corrected: bool = False,
    scale: float | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """Returns the kernel for :class:`RouteKernel`; for parameters see
    :func:`fastgen.compile.ops.experts.reference.route`.
    """
    return KernelSpec(
        "route",
        "cpp",
        {"E": num_experts, "top": top_k, "scoring": scoring, "normalize": normalize, "corrected": corrected}
        | {"scale": scale, "num_groups": num_groups, "top_groups": top_groups, "arch": arch},
        (
            Argument("logits", "fp32", "in"),
            *([Argument("correction", "fp32", "in")] if corrected else []),
            Argument("experts", "i64", "out"),
            Argument("weights", "fp32", "out"),
            Argument("num_tokens", "i64", "scalar"),
        ),
        needed_by=needed_by,
    )


class RouteKernel:
    """Launches a kernel of :func:`route_spec`; see :func:`fastgen.compile.ops.experts.reference.route`."""

    def __init__(self, kernel: Kernel):
        self._kernel, self._top_k = kernel, int(kernel.spec.parameters["top"] or 0)

    def __call__(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """Takes ``logits [T, E]`` contiguous and ``correction [E]``; returns experts ``[T, k]`` i64, weights ``[T,
        k]``.
        """
        shape = (len(logits), self._top_k)
        experts, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        given = (logits,) if correction is None else (logits, correction)
        self._kernel((), *given, experts, weights, len(logits))
        return experts, weights


@dataclass(frozen=True)
class SortedChoices:
    """A step's choices, numbered ``token * k + place``, sorted by expert; within an expert by number.

    ``order [T*k]`` i64; the choices of expert ``e`` begin at ``first_rows[e]``, ``[E + 1]`` i64, the last is ``T*k``.
    """

    order: Tensor
    first_rows: Tensor


def sort_spec(num_experts: int, *, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel for :class:`SortKernel`."""
    return KernelSpec(
        "sort_by_expert",
        "cpp",
        {"E": num_experts},
        (
            Argument("experts", "i64", "in"),
            *(Argument(name, "i64", "out") for name in ("order", "first_rows")),
            Argument("num_choices", "i64", "scalar"),
        ),
        needed_by=needed_by,
    )


class SortKernel:
    """Launches a kernel of :func:`sort_spec`; see :func:`fastgen.compile.ops.experts.reference.sort_by_expert`."""

    def __init__(self, kernel: Kernel):
        self._kernel, self._num_experts = kernel, int(kernel.spec.parameters["E"] or 0)

    def __call__(self, experts: Tensor) -> SortedChoices:
        """Sorts the choices ``experts [T, k]`` i64, contiguous, each below ``E``."""
        sizes = (experts.numel(), self._num_experts + 1)
        choices = SortedChoices(*(torch.empty(size, dtype=torch.int64) for size in sizes))
        self._kernel((), experts, choices.order, choices.first_rows, experts.numel())
        return choices


class GroupedLinearKernel(LinearKernel):
    """Launches a ``routed`` kernel of :func:`fastgen.compile.ops.linear.cpp.linear_spec`: every expert's linear
    layer at once, each for its choices. The weights of an expert without choices are not read.

    Bits and bounds are those of :class:`~fastgen.compile.ops.linear.cpp.LinearKernel`.
    """

    def route(self, x: Tensor, choices: SortedChoices, weight: PackedWeight, largest: Tensor | None = None) -> Tensor:
        """Returns the outputs ``[T*k, out]``, row ``c`` for choice ``c``, from row ``c // k`` of ``x [T, in]``, or from
        row ``c`` where ``x`` has ``T*k`` rows. Tensors are fp32; a group of ``weight`` is an expert. Raises
        ``ValueError``.

        A kernel ``over_ranks`` gets the ``largest [len(x)]`` magnitudes of all inputs of rows, and the outputs are
        sums of products, int32.
        """
        num_choices, num_experts = len(choices.order), len(choices.first_rows) - 1
        if num_experts != weight.num_groups:
            raise ValueError(f"choices of {num_experts} experts for the weights of {weight.num_groups}")
        if num_choices % max(1, len(x)) or bool(len(x)) != bool(num_choices):
            raise ValueError(f"x of {len(x)} rows for {num_choices} choices")
        out = x.new_empty(num_choices, weight.out_features, dtype=x.dtype if largest is None else torch.int32)
        if num_choices:
            given: dict[str, Tensor | int] = {} if largest is None else {"largest": largest}
            arguments = self.fitting(
                x,
                weight,
                out,
                (len(x),),
                (num_choices,),
                order=choices.order,
                first_rows=choices.first_rows,
                choices_per_row=num_choices // len(x),
                num_rows=len(x),
                **given,
            )
            self._kernel((), *arguments)
        return out


def combine_spec(
    arch: str, *, top_k: int, shared: bool = False, gated: bool = False, needed_by: tuple[str, ...] = ()
) -> KernelSpec:
    """Returns the kernel for :class:`CombineKernel`; ``gated`` weighs the ``shared`` expert by a sigmoid."""
    names = ["outputs", *(["shared"] if shared else []), *(["gates"] if gated else []), "weights"]
    return KernelSpec(
        "combine",
        "cpp",
        {"top": top_k, "shared": shared, "gated": gated, "arch": arch},
        (
            *(Argument(name, "fp32", "in") for name in names),
            Argument("out", "fp32", "out"),
            *(Argument(name, "i64", "scalar") for name in ("num_tokens", "num_features")),
        ),
        needed_by=needed_by,
    )


class CombineKernel:
    """Launches a kernel of :func:`combine_spec`: :func:`fastgen.compile.ops.experts.reference.combine`, and the sum
    with the shared expert."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __call__(self, outputs: Tensor, weights: Tensor, shared: Tensor | None, gates: Tensor | None) -> Tensor:
        """Takes ``outputs [T*k, H]`` by choice, ``weights [T, k]``; ``shared [T, H]``, ``gates [T, 1]``; returns ``[T,
        H]``.
        """
        out = outputs.new_empty(len(weights), outputs.shape[1])
        given = [tensor for tensor in (outputs, shared, gates, weights) if tensor is not None]
        self._kernel((), *given, out, *out.shape)
        return out
