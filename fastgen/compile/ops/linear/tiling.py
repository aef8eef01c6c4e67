"""Tile sizes, by architecture, and splits, by shape, of the Triton kernels of linear layers for a few rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fastgen.compile.spec import power_of_2
from fastgen.compile.weights.formats import GROUP, WeightOnlyFormat
from fastgen.compile.weights.quantized import CODES

FewRowFormat = Literal["plain"] | WeightOnlyFormat
MAX_ROWS = 64
_NUM_SMS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_100": 148, "gfx942": 304, "interpret": 2}


@dataclass(frozen=True)
class FewRowShape:
    """A linear layer: sizes, short names of dtypes, format of the weights. ``out_dtype`` is ``dtype`` unless given."""

    out_features: int
    in_features: int
    dtype: str
    weight: FewRowFormat = "plain"
    bias: bool = False
    out_dtype: str = ""

    @property
    def weight_dtype(self) -> str:
        return self.dtype if self.weight == "plain" else CODES[self.weight]

    @property
    def library_serves(self) -> bool:
        """Returns whether the library that torch calls can compute it. The library's results have the dtype of its
        operands, and quantized weights are dequantized for it. Heads are too large for that, and they have another
        ``out_dtype``."""
        return self.out_dtype == "" or (self.out_dtype == self.dtype and self.weight == "plain")

    @property
    def library_widens(self) -> bool:
        """Returns whether it is a product of 16-bit numbers to fp32, which the library computes on some devices."""
        return self.weight == "plain" and self.dtype != "fp32" and self.out_dtype == "fp32"


@dataclass(frozen=True)
class SplitK:
    """Sizes of a program: its outputs, the features that it takes at a time, Triton's options, and how many
    programs share an output's features."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_splits: int = 1


@dataclass(frozen=True)
class _Tiles:
    """Defaults. ``programs_per_sm`` is how many programs a multiprocessor should have at once, for plain weights.
    ``programs_with_a_stage_less`` fit with a stage less; layers have them that need fewer rounds so, without splits."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    programs_with_a_stage_less: int = 0


# By architecture and by rows: the largest tiles that build without spills and leave room for two programs or more on a
# multiprocessor (of 99 KiB on sm_86 and sm_89, 64 KiB on gfx942). Those of sm_90 with 16 rows are measured: on an H200
# four stages are better than three or five, unless three save a round. A second round of a third of the programs keeps
# too few bytes in flight: it took 13 of the 46 µs of 22016 outputs of 4096 features. The others are not measured.
_TILES: dict[str, dict[int, _Tiles]] = {
    "sm_80": {16: _Tiles(64, 128, 4, 4, 2), 32: _Tiles(64, 128, 4, 3, 2), 64: _Tiles(64, 64, 4, 4, 2)},
    "sm_86": {16: _Tiles(64, 64, 4, 4, 2), 32: _Tiles(64, 64, 4, 3, 2), 64: _Tiles(64, 64, 4, 3, 2)},
    "gfx942": {16: _Tiles(64, 64, 8, 2, 2), 32: _Tiles(64, 64, 8, 2, 2), 64: _Tiles(64, 64, 8, 2, 2)},
    "interpret": {16: _Tiles(16, 32, 4, 1, 2), 32: _Tiles(32, 32, 4, 1, 2), 64: _Tiles(16, 64, 4, 1, 2)},
}
_TILES["sm_90"] = {**_TILES["sm_80"], 16: _Tiles(64, 128, 4, 4, 2, programs_with_a_stage_less=3)}
_TILES |= {"sm_89": _TILES["sm_86"], "sm_100": _TILES["sm_80"]}
_TILES_FP32 = _Tiles(16, 32, 4, 2, 2)  # exact dots, without tensor cores, with operands in registers
# Costs that the rule for splits compares, in units of one step of a program over its features.
_START, _ADDING, _ADDING_A_SPLIT = 3, 3, 0.25
_MOST_SPLITS = 32


def row_tile(num_rows: int) -> int:
    """Returns the rows that a kernel computes for ``num_rows``: 16, 32 or 64. Raises ``ValueError`` for
    more than 64.
    """
    if not 0 <= num_rows <= MAX_ROWS:
        raise ValueError(f"{num_rows} rows: few-row kernels take up to {MAX_ROWS}")
    return max(16, power_of_2(max(1, num_rows)))


def usual_num_sms(arch: str) -> int:
    """Returns the multiprocessors of a usual GPU of ``arch``, by which the default splits features on all of them."""
    return _NUM_SMS.get(arch, _NUM_SMS["sm_80"])


def default_split(shape: FewRowShape, num_rows: int, arch: str, num_sms: int) -> SplitK:
    """Returns tiles from the table; an architecture that is not listed gets the smallest of NVIDIA's. The number of
    splits minimises an estimate: rounds of programs over the device, times a program's steps and start, plus the sum.
    """
    tiles = _tiles(shape, num_rows, arch)
    split = SplitK(tiles.block_n, tiles.block_k, tiles.num_warps, tiles.num_stages)
    # Quantized weights leave room for more programs, and more are needed to have as many bytes in flight.
    slots = num_sms * tiles.programs_per_sm * (1 if shape.weight == "plain" else 2)
    steps = -(-shape.in_features // split.block_k)
    programs = -(-shape.out_features // split.block_n)

    def cost(num_splits: int) -> float:
        rounds = -(-programs * num_splits // slots)
        adding = _ADDING + _ADDING_A_SPLIT * num_splits if num_splits > 1 else 0.0
        return rounds * (-(-steps // num_splits) + _START) + adding

    num_splits = min(range(1, min(steps, _MOST_SPLITS) + 1), key=cost)
    more_slots = num_sms * tiles.programs_with_a_stage_less if shape.weight == "plain" else 0
    if more_slots and -(-programs // more_slots) * (steps + _START) < cost(num_splits):
        return replace(split, num_stages=split.num_stages - 1)
    return replace(split, num_splits=num_splits)


def _tiles(shape: FewRowShape, num_rows: int, arch: str) -> _Tiles:
    if shape.dtype == "fp32" and arch != "interpret":
        return _TILES_FP32
    return _TILES.get(arch, _TILES["sm_86"])[row_tile(num_rows)]


def candidate_splits(shape: FewRowShape, num_rows: int, arch: str, num_sms: int) -> list[SplitK]:
    """Returns the splits worth measuring for this shape, the default first: splits and outputs halved and doubled,
    features halved with one more stage, and a stage less or more where that is a program more or less at once."""
    default = default_split(shape, num_rows, arch, num_sms)
    steps = -(-shape.in_features // default.block_k)
    twice = min(2 * default.num_splits, steps)
    found = [default]
    found += [replace(default, num_splits=each) for each in (1, default.num_splits // 2, twice) if each]
    found.append(replace(default, block_n=default.block_n * 2, num_warps=default.num_warps * 2, num_splits=twice))
    if default.block_n > 16:
        found.append(replace(default, block_n=default.block_n // 2, num_splits=-(-default.num_splits // 2)))
    if default.block_k > GROUP:
        found.append(replace(default, block_k=default.block_k // 2, num_stages=default.num_stages + 1))
    if shape.weight == "plain" and (tiles := _tiles(shape, num_rows, arch)).programs_with_a_stage_less:
        other = tiles.num_stages - 1 if default.num_stages == tiles.num_stages else tiles.num_stages
        found.append(replace(default, num_stages=other))
    return list(dict.fromkeys(found))
