"""Mixture of experts on a GPU: the reference of :mod:`fastgen.compile.ops.experts.reference` without the host.

``route → sort → grouped linear → activation → grouped linear → combine``. No launch depends on a number
that is read back. The sort writes a list of tiles, each with rows of one expert. Grids have a program for the largest
possible number of tiles, and programs beyond the list's end return at once. The first product gathers its rows by the
sorted choices and the second scatters its rows back, so no kernel only moves rows. No token is dropped, and every order
is fixed: the same input gives the same bits.

``T`` tokens, ``E`` experts, ``k`` of them a token, ``T·k`` choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.experts.reference import Scoring
from fastgen.compile.ops.experts.tiling import GroupedTiling
from fastgen.compile.spec import Argument, KernelSpec, Value, power_of_2

_COMBINED = 1024  # features that a program combines


def route_spec(
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
    """Returns the kernel of :func:`fastgen.compile.ops.experts.reference.route`, for :class:`RouteKernel`.

    Raises ``ValueError`` where groups do not divide the experts, or have fewer than ``top_k``.
    """
    if num_experts % num_groups or not 1 <= top_k <= num_experts // num_groups * min(top_groups, num_groups):
        raise ValueError(f"{top_k} of {num_experts} experts in {top_groups} of {num_groups} groups cannot be chosen")
    grouped = top_groups < num_groups
    parameters: dict[str, Value] = {
        **{"E": num_experts, "K": top_k, "scoring": scoring, "normalize": normalize, "corrected": corrected},
        **{"scale": None if scale is None else float(scale)},
        **{"num_groups": num_groups if grouped else None, "top_groups": top_groups if grouped else None},
        **{"block_t": max(1, 512 // power_of_2(num_experts))},
    }
    arguments = (
        Argument("logits", "fp32", "in"),
        *([Argument("correction", "fp32", "in")] if corrected else []),
        Argument("experts", "i32", "out"),
        Argument("weights", "fp32", "out"),
        Argument("num_tokens", "i32", "scalar"),
    )
    return KernelSpec("moe_route", "triton", parameters, arguments, {"num_warps": 4}, needed_by=needed_by)


class RouteKernel:
    """Launches a kernel of :func:`route_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._block_t = int(kernel.spec.parameters["block_t"] or 1)
        self._corrected = bool(kernel.spec.parameters["corrected"])

    def __call__(self, logits: Tensor, correction: Tensor | None, experts: Tensor, weights: Tensor) -> None:
        """Takes ``logits [T, E]`` and ``correction [E]`` fp32. Writes ``experts [T, k]`` i32 and
        ``weights [T, k]`` fp32.
        """
        corrections = [correction] if self._corrected else []
        grid = (-(-len(logits) // self._block_t),)
        self._kernel(grid, logits, *corrections, experts, weights, len(logits))


def sort_spec(num_experts: int, block_m: int, *, block: int = 2048, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel that sorts choices by expert and lists tiles of ``block_m`` rows, for :class:`SortKernel`."""
    arguments = (
        Argument("experts", "i32", "in"),
        *(Argument(name, "i32", "out") for name in ("order", "tiles", "num_tiles")),
        Argument("num_choices", "i32", "scalar"),
    )
    parameters: dict[str, Value] = {"E": num_experts, "block": block, "block_m": block_m}
    return KernelSpec("moe_sort", "triton", parameters, arguments, {"num_warps": 8}, needed_by=needed_by)


@dataclass(frozen=True)
class ExpertTiles:
    """The choices of a step, expert by expert, in static buffers.

    ``order [T·k]`` i32 are the choices, numbered ``token · k + place``, sorted by expert and stable. ``tiles [·, 3]``
    i32 are an expert, the tile's first row in ``order``, and the end of the expert's rows; ``num_tiles [1]`` is their
    number.
    """

    num_experts: int
    block_m: int
    order: Tensor
    tiles: Tensor
    num_tiles: Tensor

    def most_tiles(self, num_choices: int) -> int:
        """Returns the most tiles that this many choices can make."""
        return _most_tiles(num_choices, self.block_m, self.num_experts)


class SortKernel:
    """Launches a kernel of :func:`sort_spec` for up to ``max_choices`` choices; fills its :class:`ExpertTiles`."""

    def __init__(self, kernel: Kernel, *, max_choices: int, device: torch.device):
        self._kernel = kernel
        num_experts, block_m = (int(kernel.spec.parameters[name] or 0) for name in ("E", "block_m"))
        most_tiles = _most_tiles(max_choices, block_m, num_experts)
        self.tiles = ExpertTiles(
            num_experts,
            block_m,
            order=torch.zeros(max_choices, dtype=torch.int32, device=device),
            tiles=torch.zeros(most_tiles, 3, dtype=torch.int32, device=device),
            num_tiles=torch.zeros(1, dtype=torch.int32, device=device),
        )

    def __call__(self, experts: Tensor) -> ExpertTiles:
        """Sorts the choices ``experts [T, k]`` i32, each below ``E``. Returns the same tiles each time.

        Raises ``ValueError`` for more choices than there is room for.
        """
        tiles = self.tiles
        if experts.numel() > len(tiles.order):
            raise ValueError(f"experts {tuple(experts.shape)}: made for at most {len(tiles.order)} choices")
        grid = (tiles.num_experts if experts.numel() else 0,)
        self._kernel(grid, experts, tiles.order, tiles.tiles, tiles.num_tiles, experts.numel())
        return tiles


def _most_tiles(num_choices: int, block_m: int, num_experts: int) -> int:
    return num_choices // block_m + min(num_experts, num_choices)


def grouped_linear_spec(
    in_features: int,
    out_features: int,
    dtype: str,
    tiling: GroupedTiling,
    *,
    top_k: int | None = None,
    scatters: bool = False,
    bias: bool = False,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """Returns the kernel of :func:`fastgen.compile.ops.linear.reference.grouped_linear`, for
    :class:`GroupedLinearKernel`.

    With ``top_k`` it reads for each choice its token's row of ``x``, ``choice // top_k``; else rows of ``x`` are
    sorted. Where it ``scatters``, it writes row ``choice``; else sorted rows.
    """
    parameters: dict[str, Value] = {
        **{"in_features": in_features, "out_features": out_features, "dtype": dtype},
        **{"gathers": top_k is not None, "scatters": scatters, "bias": bias, "top_k": top_k},
        **{"block_m": tiling.block_m, "block_n": tiling.block_n, "block_k": tiling.block_k},
    }
    arguments = (
        *(Argument(name, dtype, "in") for name in ("x", "weight", *(["bias"] if bias else []))),
        *([Argument("order", "i32", "in")] if top_k is not None or scatters else []),
        *(Argument(name, "i32", "in") for name in ("tiles", "num_tiles")),
        Argument("out", dtype, "out"),
    )
    options: dict[str, Value] = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return KernelSpec("grouped_linear", "triton", parameters, arguments, options, needed_by=needed_by)


class GroupedLinearKernel:
    """Launches a kernel of :func:`grouped_linear_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._names = [argument.name for argument in kernel.spec.arguments]
        parameters = kernel.spec.parameters
        self._column_tiles = -(-int(parameters["out_features"] or 0) // int(parameters["block_n"] or 1))
        self._block_m = parameters["block_m"]

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tiles: ExpertTiles, num_choices: int, out: Tensor
    ) -> None:
        """Takes ``x [T, in]``, or ``[T·k, in]`` sorted, ``weight [E, out, in]`` and ``bias [E, out]``. Writes
        ``out [T·k, out]``.

        Raises ``ValueError`` for ``tiles`` of another height than the kernel's.
        """
        if tiles.block_m != self._block_m:
            raise ValueError(f"tiles of {tiles.block_m} rows, the kernel is {self._kernel.spec.name}")
        given = {"x": x, "weight": weight, "bias": bias, "order": tiles.order, "out": out}
        given |= {"tiles": tiles.tiles, "num_tiles": tiles.num_tiles}
        grid = (tiles.most_tiles(num_choices) * self._column_tiles,)
        self._kernel(grid, *(given[name] for name in self._names))


def combine_spec(num_features: int, top_k: int, dtype: str, *, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel that weighs and sums the ``k`` rows of each token, for :class:`CombineKernel`."""
    block = min(_COMBINED, max(32, power_of_2(num_features)))
    arguments = (
        Argument("outputs", dtype, "in"),
        Argument("weights", "fp32", "in"),
        Argument("out", dtype, "out"),
    )
    parameters: dict[str, Value] = {"H": num_features, "K": top_k, "dtype": dtype, "block": block}
    options: dict[str, Value] = {"num_warps": max(1, block // 256)}
    return KernelSpec("moe_combine", "triton", parameters, arguments, options, needed_by=needed_by)


class CombineKernel:
    """Launches a kernel of :func:`combine_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        parameters = kernel.spec.parameters
        self._pieces = -(-int(parameters["H"] or 0) // int(parameters["block"] or 1))

    def __call__(self, outputs: Tensor, weights: Tensor, out: Tensor) -> None:
        """Takes ``outputs [T·k, H]`` in the order of choices and ``weights [T, k]`` fp32. Writes ``out [T, H]``."""
        self._kernel((len(weights) * self._pieces,), outputs, weights, out)
