"""Mixture of experts on a GPU: the reference of :mod:`fastgen.compile.ops.experts.reference` without the host.

``route → sort → grouped linear → activation → grouped linear → combine``. Nothing that experts take depends on a number
read back: the sort writes a list of tiles, each of rows of one expert, and grids have a program for as many tiles as
there can be, of which those behind the list's end leave at once. The first product gathers its rows by the sorted
choices, the second scatters its rows back to them, so no row is moved by itself. Nothing is dropped, and every order is
fixed: the same input gives the same bits.

``T`` tokens, ``E`` experts, ``k`` of them a token, ``T·k`` choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.experts.reference import Scoring
from fastgen.compile.spec import Argument, KernelSpec, Value, power_of_2

_COMBINED = 1024  # features that a program combines
_ANY_ROWS = 1 << 30


@dataclass(frozen=True)
class GroupedTiling:
    """How a grouped product is cut: rows, outputs and features of a tile, and what Triton is told."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By architecture, and by the rows that an expert gets on average, up to which a tiling holds: few rows read weights as
# fast as they come, many compute. All build without spilling registers. None of this is measured yet.
_TILINGS: dict[str, dict[int, GroupedTiling]] = {
    "sm_80": {
        16: GroupedTiling(16, 64, 128, 4, 3),
        64: GroupedTiling(64, 128, 64, 8, 3),
        _ANY_ROWS: GroupedTiling(128, 128, 32, 8, 4),
    },
    "sm_90": {
        16: GroupedTiling(16, 64, 128, 4, 4),
        64: GroupedTiling(64, 128, 64, 4, 4),
        _ANY_ROWS: GroupedTiling(128, 128, 64, 8, 4),
    },
    "gfx942": {
        16: GroupedTiling(16, 64, 128, 4, 2),
        64: GroupedTiling(64, 64, 64, 4, 2),
        _ANY_ROWS: GroupedTiling(128, 128, 32, 8, 2),
    },
    "interpret": {_ANY_ROWS: GroupedTiling(16, 32, 32, 4, 1)},
}
_TILINGS |= {"sm_86": _TILINGS["sm_80"], "sm_89": _TILINGS["sm_80"], "sm_100": _TILINGS["sm_90"]}
# fp32 products are exact, without tensor cores, and their operands lie in registers.
_TILING_FP32 = GroupedTiling(16, 32, 32, 4, 1)


def grouped_tilings(dtype: str, arch: str) -> dict[int, GroupedTiling]:
    """The defaults, by the rows that experts get on average, up to which each holds; an unknown architecture gets
    NVIDIA's oldest."""
    if dtype == "fp32" and arch != "interpret":
        return {_ANY_ROWS: _TILING_FP32}
    return _TILINGS.get(arch, _TILINGS["sm_80"])


def grouped_tiling(dtype: str, arch: str, rows_per_expert: float) -> GroupedTiling:
    """That of :func:`grouped_tilings` where experts get so many rows on average."""
    tilings = grouped_tilings(dtype, arch)
    return tilings[min(rows for rows in tilings if rows >= rows_per_expert)]


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
    """The kernel of :func:`fastgen.compile.ops.experts.reference.route`, for :class:`Route`.

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


class Route:
    """Launches a kernel of :func:`route_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._block_t = int(kernel.spec.parameters["block_t"] or 1)
        self._corrected = bool(kernel.spec.parameters["corrected"])

    def __call__(self, logits: Tensor, correction: Tensor | None, experts: Tensor, weights: Tensor) -> None:
        """``logits [T, E]``, ``correction [E]`` fp32; writes ``experts [T, k]`` i32 and ``weights [T, k]`` fp32."""
        corrections = [correction] if self._corrected else []
        grid = (-(-len(logits) // self._block_t),)
        self._kernel(grid, logits, *corrections, experts, weights, len(logits))


def sort_spec(num_experts: int, block_m: int, *, block: int = 2048, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """The kernel that sorts choices by expert and lists tiles of ``block_m`` rows, for :class:`ExpertTiles`."""
    arguments = (
        Argument("experts", "i32", "in"),
        *(Argument(name, "i32", "out") for name in ("order", "tiles", "num_tiles")),
        Argument("num_choices", "i32", "scalar"),
    )
    parameters: dict[str, Value] = {"E": num_experts, "block": block, "block_m": block_m}
    return KernelSpec("moe_sort", "triton", parameters, arguments, {"num_warps": 8}, needed_by=needed_by)


class ExpertTiles:
    """The choices of a step, expert by expert; by a kernel of :func:`sort_spec`. For ``max_choices`` at most.

    ``order [T·k]`` i32 are the choices, numbered ``token · k + place``, sorted by expert and stable. ``tiles [·, 3]``
    i32 are an expert, the first of its rows in ``order`` that is the tile's, and the end of the expert's rows;
    ``num_tiles [1]`` says how many there are.
    """

    def __init__(self, kernel: Kernel, *, max_choices: int, device: torch.device):
        self._kernel = kernel
        self.num_experts = int(kernel.spec.parameters["E"] or 0)
        self.block_m = int(kernel.spec.parameters["block_m"] or 0)
        self.order = torch.zeros(max_choices, dtype=torch.int32, device=device)
        self.tiles = torch.zeros(self.most_tiles(max_choices), 3, dtype=torch.int32, device=device)
        self.num_tiles = torch.zeros(1, dtype=torch.int32, device=device)

    def most_tiles(self, num_choices: int) -> int:
        """As many as there can be, however tokens choose."""
        return num_choices // self.block_m + min(self.num_experts, num_choices)

    def __call__(self, experts: Tensor) -> None:
        """``experts [T, k]`` i32, each below ``E``. Raises ``ValueError`` for more choices than there is room for."""
        if experts.numel() > len(self.order):
            raise ValueError(f"experts {tuple(experts.shape)}: made for at most {len(self.order)} choices")
        grid = (self.num_experts if experts.numel() else 0,)
        self._kernel(grid, experts, self.order, self.tiles, self.num_tiles, experts.numel())


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
    """The kernel of :func:`fastgen.compile.ops.linear.reference.grouped_linear`, for :class:`TritonGroupedLinear`.

    With ``top_k`` it reads for each choice its token's row of ``x``, ``choice // top_k``; else rows lie sorted. Where
    it ``scatters``, it writes row ``choice``; else sorted rows.
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


class TritonGroupedLinear:
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
        """``x [T, in]``, or ``[T·k, in]`` sorted; ``weight [E, out, in]``, ``bias [E, out]``; ``out [T·k, out]``.

        Raises ``ValueError`` for ``tiles`` of another height than the kernel's.
        """
        if tiles.block_m != self._block_m:
            raise ValueError(f"tiles of {tiles.block_m} rows, the kernel is {self._kernel.spec.name}")
        given = {"x": x, "weight": weight, "bias": bias, "order": tiles.order, "out": out}
        given |= {"tiles": tiles.tiles, "num_tiles": tiles.num_tiles}
        grid = (tiles.most_tiles(num_choices) * self._column_tiles,)
        self._kernel(grid, *(given[name] for name in self._names))


def combine_spec(num_features: int, top_k: int, dtype: str, *, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """The kernel that weighs and sums the ``k`` rows of each token, for :class:`Combine`."""
    block = min(_COMBINED, max(32, power_of_2(num_features)))
    arguments = (
        Argument("outputs", dtype, "in"),
        Argument("weights", "fp32", "in"),
        Argument("out", dtype, "out"),
    )
    parameters: dict[str, Value] = {"H": num_features, "K": top_k, "dtype": dtype, "block": block}
    options: dict[str, Value] = {"num_warps": max(1, block // 256)}
    return KernelSpec("moe_combine", "triton", parameters, arguments, options, needed_by=needed_by)


class Combine:
    """Launches a kernel of :func:`combine_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        parameters = kernel.spec.parameters
        self._pieces = -(-int(parameters["H"] or 0) // int(parameters["block"] or 1))

    def __call__(self, outputs: Tensor, weights: Tensor, out: Tensor) -> None:
        """``outputs [T·k, H]`` in the order of choices, ``weights [T, k]`` fp32; writes ``out [T, H]``."""
        self._kernel((len(weights) * self._pieces,), outputs, weights, out)
