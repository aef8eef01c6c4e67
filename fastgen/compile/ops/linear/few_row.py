"""Linear layers for a few rows, 1 to 64, in Triton: as fast as the weights can be read, whole or in few bits.

Programs share the outputs, and where those are too few to keep the device busy the features too: then each leaves its
part in fp32, and a second kernel adds the parts in a fixed order, so that the same call gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec, Value, power_of_2
from fastgen.compile.weights.formats import GROUP, WeightOnlyFormat
from fastgen.compile.weights.quantized import CODES, SCALES, QuantizedWeight

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
        """Whether the library that torch calls can compute it. It rounds to the dtype of what it multiplies, and
        weights in few bits are laid out whole for it, which layers with an ``out_dtype`` of their own are too large
        for: heads."""
        return self.out_dtype == "" or (self.out_dtype == self.dtype and self.weight == "plain")


@dataclass(frozen=True)
class SplitK:
    """How a kernel is cut: outputs of a program, features that it takes at a time, what Triton is told, and how many
    programs share an output's features."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_splits: int = 1


@dataclass(frozen=True)
class _Tiles:
    """Defaults. ``programs_per_sm`` is how many a multiprocessor should have at once, of those with whole weights."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# By architecture and by rows: the largest tiles that build without spills and leave room for two programs or more on a
# multiprocessor (of 99 KiB on sm_86 and sm_89, 64 KiB on gfx942). None of this is measured yet.
_TILES: dict[str, dict[int, _Tiles]] = {
    "sm_80": {16: _Tiles(64, 128, 4, 4, 2), 32: _Tiles(64, 128, 4, 3, 2), 64: _Tiles(64, 64, 4, 4, 2)},
    "sm_86": {16: _Tiles(64, 64, 4, 4, 2), 32: _Tiles(64, 64, 4, 3, 2), 64: _Tiles(64, 64, 4, 3, 2)},
    "gfx942": {16: _Tiles(64, 64, 8, 2, 2), 32: _Tiles(64, 64, 8, 2, 2), 64: _Tiles(64, 64, 8, 2, 2)},
    "interpret": {16: _Tiles(16, 32, 4, 1, 2), 32: _Tiles(32, 32, 4, 1, 2), 64: _Tiles(16, 64, 4, 1, 2)},
}
_TILES |= {"sm_89": _TILES["sm_86"], "sm_90": _TILES["sm_80"], "sm_100": _TILES["sm_80"]}
_TILES_FP32 = _Tiles(16, 32, 4, 2, 2)  # exact dots, without tensor cores, with operands in registers
# What the rule for splits weighs against each other, in the time of one step of a program over its features.
_START, _ADDING, _ADDING_A_SPLIT = 3, 3, 0.25
_MOST_SPLITS = 32


def row_tile(num_rows: int) -> int:
    """Rows that a kernel computes for ``num_rows``: 16, 32 or 64. Raises ``ValueError`` for more than 64."""
    if not 0 <= num_rows <= MAX_ROWS:
        raise ValueError(f"{num_rows} rows: few-row kernels take up to {MAX_ROWS}")
    return max(16, power_of_2(max(1, num_rows)))


def usual_num_sms(arch: str) -> int:
    """Multiprocessors of a usual GPU of ``arch``, by which the default splits features: the same for all of them."""
    return _NUM_SMS.get(arch, _NUM_SMS["sm_80"])


def default_split(shape: FewRowShape, num_rows: int, arch: str, num_sms: int) -> SplitK:
    """Tiles from the table; an architecture that is not listed gets the smallest of NVIDIA's. As many splits as the
    estimate likes best: rounds of programs over the device, times a program's steps and its start, plus the adding.
    """
    tiles = _TILES.get(arch, _TILES["sm_86"])[row_tile(num_rows)]
    if shape.dtype == "fp32" and arch != "interpret":
        tiles = _TILES_FP32
    split = SplitK(tiles.block_n, tiles.block_k, tiles.num_warps, tiles.num_stages)
    # Weights in few bits leave room for more programs, and it takes more to have as many bytes on their way.
    slots = num_sms * tiles.programs_per_sm * (1 if shape.weight == "plain" else 2)
    steps = -(-shape.in_features // split.block_k)
    programs = -(-shape.out_features // split.block_n)

    def cost(num_splits: int) -> float:
        rounds = -(-programs * num_splits // slots)
        adding = _ADDING + _ADDING_A_SPLIT * num_splits if num_splits > 1 else 0.0
        return rounds * (-(-steps // num_splits) + _START) + adding

    return replace(split, num_splits=min(range(1, min(steps, _MOST_SPLITS) + 1), key=cost))


def candidate_splits(shape: FewRowShape, num_rows: int, arch: str, num_sms: int) -> list[SplitK]:
    """What is worth measuring for this shape, the default first: its splits and its outputs halved and doubled, its
    features halved with a stage more."""
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
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class FewRowSpecs:
    """The kernels of one layer for up to ``row_tile`` rows, in the order in which they are launched."""

    main: KernelSpec
    reduce: KernelSpec | None
    num_splits: int
    out_features: int

    def workspace_numel(self, num_rows: int) -> int:
        """Numbers in fp32 that the parts of ``num_rows`` take; 0 where there are none."""
        return 0 if self.reduce is None else self.num_splits * num_rows * self.out_features


def few_row_specs(shape: FewRowShape, num_rows: int, split: SplitK, *, needed_by: tuple[str, ...] = ()) -> FewRowSpecs:
    """The kernels for up to ``row_tile(num_rows)`` rows. Splits that would have nothing to do are left out.

    Raises ``ValueError`` for sizes that are not positive, for more than 64 rows, and for tiles that cut through groups.
    """
    if min(shape.out_features, shape.in_features) < 1:
        raise ValueError(f"{shape}: sizes must be positive")
    if shape.weight == "int4_weight_only" and split.block_k % GROUP:
        raise ValueError(f"{split}: int4 weights come in groups of {GROUP} features")
    steps = -(-shape.in_features // split.block_k)
    share = -(-steps // split.num_splits)
    num_splits = -(-steps // share)
    out_dtype = shape.out_dtype or shape.dtype
    parameters: dict[str, Value] = {
        "OUT": shape.out_features,
        "IN": shape.in_features,
        "dtype": shape.dtype,
        "weight": shape.weight,
        "bias": shape.bias and num_splits == 1,
        "out_dtype": out_dtype if num_splits == 1 else "fp32",
        "block_m": row_tile(num_rows),
        "block_n": split.block_n,
        "block_k": split.block_k,
        "splits": num_splits,
        "share": share,
    }
    bias = [Argument("bias", shape.dtype, "in")] if shape.bias else []
    rows = Argument("num_rows", "i32", "scalar")
    arguments = [Argument("x", shape.dtype, "in"), Argument("weight", shape.weight_dtype, "in")]
    if shape.weight != "plain":
        arguments.append(Argument("scale", SCALES[shape.weight], "in"))
    arguments += bias if num_splits == 1 else []
    arguments += [Argument("out", out_dtype if num_splits == 1 else "fp32", "out"), rows]
    options: dict[str, Value] = {"num_warps": split.num_warps, "num_stages": split.num_stages}
    main = KernelSpec("few_row_linear", "triton", parameters, tuple(arguments), options, needed_by=needed_by)
    if num_splits == 1:
        return FewRowSpecs(main, None, 1, shape.out_features)
    block = min(512, max(32, power_of_2(shape.out_features)))
    reduce = KernelSpec(
        "few_row_reduce",
        "triton",
        {"OUT": shape.out_features, "splits": num_splits, "dtype": out_dtype, "bias": shape.bias, "block": block},
        (Argument("part", "fp32", "in"), *bias, Argument("out", out_dtype, "out"), rows),
        {"num_warps": max(1, block // 128)},
        needed_by=needed_by,
    )
    return FewRowSpecs(main, reduce, num_splits, shape.out_features)


class FewRowLinear:
    """Launches kernels of :func:`few_row_specs`. ``workspace`` is fp32 and holds ``workspace_numel`` numbers for the
    rows it is called with; layers may share one, since each call is done with it when the next begins."""

    def __init__(self, main: Kernel, reduce: Kernel | None, workspace: Tensor | None):
        if (reduce is None) != (workspace is None):
            raise ValueError("a workspace is needed where features are split, and nowhere else")
        self._main, self._reduce, self._workspace = main, reduce, workspace
        out_features, self._max_rows = _number(main, "OUT"), _number(main, "block_m")
        self._grid = -(-out_features // _number(main, "block_n")), _number(main, "splits")
        self._reduce_tiles = 0 if reduce is None else -(-out_features // _number(reduce, "block"))

    def __call__(self, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
        """``x [T, in]``, ``weight [out, in]``, ``bias [out]``, ``out [T, out]``, contiguous. A bias that the kernel was
        not made for is not looked at. Raises ``ValueError`` for more rows than the kernels compute.
        """
        num_rows = len(x)
        if num_rows > self._max_rows:
            raise ValueError(f"{num_rows} rows: these kernels compute up to {self._max_rows}")
        if num_rows == 0:
            return
        target = out if self._workspace is None else self._workspace
        given = {"x": x, "weight": weight, "bias": bias, "out": target}
        if isinstance(weight, QuantizedWeight):
            given |= {"weight": weight.codes, "scale": weight.scale}
        self._main(self._grid, *(given[each.name] for each in self._main.spec.arguments[:-1]), num_rows)
        if self._reduce is not None:
            given = {"part": target, "bias": bias, "out": out}
            names = [each.name for each in self._reduce.spec.arguments[:-1]]
            self._reduce((num_rows * self._reduce_tiles,), *(given[name] for name in names), num_rows)


def _number(kernel: Kernel, name: str) -> int:
    value = kernel.spec.parameters[name]
    assert isinstance(value, int)
    return value
