"""Mixture of experts on the ``cpp`` target: routing, and what the experts made put together again."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.compile.build import Kernel
from fastgen.compile.ops.moe import Scoring
from fastgen.compile.spec import Argument, KernelSpec


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
    """The kernel for :class:`RouteKernel`; parameters as for :func:`fastgen.compile.ops.moe.route`."""
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
    """:func:`fastgen.compile.ops.moe.route` by a kernel of :func:`route_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel, self._top_k = kernel, int(kernel.spec.parameters["top"] or 0)

    def __call__(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """``logits [T, E]`` contiguous, ``correction [E]`` fp32; experts ``[T, k]`` i64 and weights ``[T, k]``."""
        shape = (len(logits), self._top_k)
        experts, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        given = (logits,) if correction is None else (logits, correction)
        self._kernel((), *given, experts, weights, len(logits))
        return experts, weights


def combine_spec(
    arch: str, *, top_k: int, shared: bool = False, gated: bool = False, needed_by: tuple[str, ...] = ()
) -> KernelSpec:
    """The kernel for :class:`CombineKernel`; ``gated`` weighs the ``shared`` expert by a sigmoid."""
    names = ["outputs", *(["shared"] if shared else []), *(["gates"] if gated else []), "weights"]
    return KernelSpec(
        "combine",
        "cpp",
        {"top": top_k, "shared": shared, "gated": gated, "arch": arch},
        (
            *(Argument(name, "fp32", "in") for name in names),
            Argument("places", "i64", "in"),
            Argument("out", "fp32", "out"),
            *(Argument(name, "i64", "scalar") for name in ("num_tokens", "num_features")),
        ),
        needed_by=needed_by,
    )


class CombineKernel:
    """:func:`fastgen.compile.ops.moe.combine` by a kernel of :func:`combine_spec`, and the shared expert added."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __call__(
        self, outputs: Tensor, order: Tensor, weights: Tensor, shared: Tensor | None, gates: Tensor | None
    ) -> Tensor:
        """``outputs [T*k, H]`` in ``order``, ``weights [T, k]``; ``shared [T, H]``, ``gates [T, 1]``; to ``[T, H]``."""
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        out = outputs.new_empty(len(weights), outputs.shape[1])
        given = [tensor for tensor in (outputs, shared, gates, weights) if tensor is not None]
        self._kernel((), *given, places, out, *out.shape)
        return out
