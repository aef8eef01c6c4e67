"""Tile sizes of the Triton kernel of experts' linear layers, by architecture and by rows of an expert."""

from __future__ import annotations

from dataclasses import dataclass

_ANY_ROWS = 1 << 30


@dataclass(frozen=True)
class GroupedTiling:
    """Sizes of a grouped product's tile: rows, outputs and features, and Triton's options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By architecture, and by the most rows of an expert on average that a tiling is for: few rows are bound by reading
# weights, many by computing. All build without spilling registers. None of this is measured yet.
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
    """Returns the defaults, by the most rows of an expert on average that each is for; an unknown architecture gets
    those of NVIDIA's oldest."""
    if dtype == "fp32" and arch != "interpret":
        return {_ANY_ROWS: _TILING_FP32}
    return _TILINGS.get(arch, _TILINGS["sm_80"])


def grouped_tiling(dtype: str, arch: str, rows_per_expert: float) -> GroupedTiling:
    """Returns the tiling of :func:`grouped_tilings` for this many rows of an expert on average."""
    tilings = grouped_tilings(dtype, arch)
    return tilings[min(rows for rows in tilings if rows >= rows_per_expert)]
