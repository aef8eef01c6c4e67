"""Linear layers on a GPU: few rows by kernels of our own, many by the library that torch calls.

A kernel for few rows, 1 to 64, is as fast as weights can be read, plain or quantized. Outputs are divided among
programs. Where there are too few outputs to keep the device busy, features are divided too: each program writes a
partial sum in fp32, and a second kernel adds these in a fixed order, so that the same call gives the same bits. The
last of these kernels may compute the op that follows too: see :mod:`~fastgen.compile.ops.linear.finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.capture.recording import library_call
from fastgen.compile.ops.linear.finish import NO_FINISH, AddAndNorm, Finish
from fastgen.compile.ops.linear.tiling import MAX_ROWS, FewRowShape, SplitK, row_tile
from fastgen.compile.spec import MAX_REGISTERS, Argument, KernelSpec, Value, power_of_2
from fastgen.compile.weights.formats import GROUP, WeightOnlyFormat
from fastgen.compile.weights.quantized import CODES, SCALES, QuantizedWeight

_TILES = (16, 32, 64)
# Most pieces of 64 rows, each of which reads the quantized weight again; with more, dequantizing it once moves fewer
# bytes.
_MOST_PIECES = 3
_BLOCK = 1024  # weights that a program dequantizes, eight for each of its threads


@dataclass(frozen=True)
class FewRowSpecs:
    """The kernels of one layer for up to ``row_tile`` rows, in launch order. Where the layer ``finishes``, the last one
    computes the op that follows too."""

    main: KernelSpec
    reduce: KernelSpec | None
    num_splits: int
    out_features: int
    finishes: bool = False

    def workspace_numel(self, num_rows: int) -> int:
        """Returns how many fp32 numbers the partial sums of ``num_rows`` take; 0 without splits."""
        return 0 if self.reduce is None else self.num_splits * num_rows * self.out_features


@lru_cache(maxsize=1024)  # most layers have a shape that another has
def few_row_specs(
    shape: FewRowShape,
    num_rows: int,
    split: SplitK,
    *,
    finish: Finish | None = None,
    needed_by: tuple[str, ...] = (),
) -> FewRowSpecs:
    """Returns the kernels for up to ``row_tile(num_rows)`` rows, which ``finish`` if they can: a norm needs split
    features. Splits without work are left out.

    Raises ``ValueError`` for sizes that are not positive, for more than 64 rows, and for tiles that cut through groups.
    """
    if min(shape.out_features, shape.in_features) < 1:
        raise ValueError(f"{shape}: sizes must be positive")
    if shape.weight == "int4_weight_only" and split.block_k % GROUP:
        raise ValueError(f"{split}: int4 weights come in groups of {GROUP} features")
    steps = -(-shape.in_features // split.block_k)
    share = -(-steps // split.num_splits)
    num_splits = -(-steps // share)
    is_whole = num_splits == 1
    if finish is not None and finish.needs_rows and is_whole:
        finish = None
    out_dtype = shape.out_dtype or shape.dtype
    ending = (Argument("out", out_dtype, "out"),) if finish is None else finish.arguments(shape.dtype)
    following = NO_FINISH if finish is None or not is_whole else NO_FINISH | finish.parameters()
    parameters: dict[str, Value] = {
        "OUT": shape.out_features,
        "IN": shape.in_features,
        "dtype": shape.dtype,
        "weight": shape.weight,
        "bias": shape.bias and is_whole,
        "out_dtype": out_dtype if is_whole else "fp32",
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
    arguments += [*bias, *ending] if is_whole else [Argument("out", "fp32", "out")]
    options: dict[str, Value] = {"num_warps": split.num_warps, "num_stages": split.num_stages}
    if _needs_registers(shape, row_tile(num_rows), is_whole=is_whole):
        options["maxnreg"] = MAX_REGISTERS
    main = KernelSpec(
        "few_row_linear", "triton", parameters | following, (*arguments, rows), options, needed_by=needed_by
    )
    if is_whole:
        return FewRowSpecs(main, None, 1, shape.out_features, finish is not None)
    arguments = [Argument("part", "fp32", "in"), *bias, *ending, rows]
    if isinstance(finish, AddAndNorm):
        reduce = _reduce_and_norm(finish, num_splits, arguments, needed_by)
    else:
        reduce = _reduce(shape, out_dtype, finish, num_splits, arguments, needed_by)
    return FewRowSpecs(main, reduce, num_splits, shape.out_features, finish is not None)


def _needs_registers(shape: FewRowShape, rows: int, *, is_whole: bool) -> bool:
    """Returns whether the assembler would spill some registers on sm_80, sm_86 or sm_100, to make room for more
    programs than shared memory has room for.
    """
    if shape.weight == "int4_weight_only":
        return rows > 16
    if shape.weight == "fp8_weight_only":
        return rows == 16
    return rows == MAX_ROWS and shape.out_dtype == "fp32" and (is_whole or shape.weight == "int8_weight_only")


def _reduce(
    shape: FewRowShape,
    out_dtype: str,
    finish: Finish | None,
    num_splits: int,
    arguments: Sequence[Argument],
    needed_by: tuple[str, ...],
) -> KernelSpec:
    size = shape.out_features // (2 if finish is not None and finish.pairs else 1)
    block = min(512, max(32, power_of_2(size)))
    parameters: dict[str, Value] = {"OUT": shape.out_features, "splits": num_splits, "dtype": out_dtype}
    parameters |= {"bias": shape.bias, "block": block, "tiles": -(-size // block)}
    parameters |= NO_FINISH | ({} if finish is None else finish.parameters())
    options: dict[str, Value] = {"num_warps": max(1, block // 128)}
    return KernelSpec("few_row_reduce", "triton", parameters, tuple(arguments), options, needed_by=needed_by)


def _reduce_and_norm(
    finish: AddAndNorm, num_splits: int, arguments: Sequence[Argument], needed_by: tuple[str, ...]
) -> KernelSpec:
    has_bias = any(argument.name == "bias" for argument in arguments)
    parameters = finish.parameters() | {"splits": num_splits, "sum_bias": has_bias}
    # Four numbers a thread: with eight the assembler requests the parts in two turns.
    options: dict[str, Value] = {"num_warps": min(32, max(1, power_of_2(finish.norm.size) // 128))}
    return KernelSpec("few_row_norm", "triton", parameters, tuple(arguments), options, needed_by=needed_by)


class FewRowKernel:
    """Launches kernels of :func:`few_row_specs`. ``workspace`` is fp32 and has room for ``workspace_numel`` numbers.
    Layers may share one, since calls run one after the other.
    """

    def __init__(self, main: Kernel, reduce: Kernel | None, workspace: Tensor | None):
        if (reduce is None) != (workspace is None):
            raise ValueError("a workspace is needed where features are split, and nowhere else")
        self._main, self._reduce, self._workspace = main, reduce, workspace
        out_features, self._max_rows = _number(main, "OUT"), _number(main, "block_m")
        self._grid = -(-out_features // _number(main, "block_n")), _number(main, "splits")
        # The tensors that each kernel takes, in order; the number of rows is last.
        self._operands = [each.name for each in main.spec.arguments[:-1]]
        self._reduce_operands = [] if reduce is None else [each.name for each in reduce.spec.arguments[:-1]]
        # Programs that share a row; one, where rows are normed.
        self._reduce_tiles = _number(reduce, "tiles") if reduce is not None and "tiles" in reduce.spec.parameters else 1

    def __call__(
        self, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, out: Tensor, **others: Tensor
    ) -> None:
        """Takes ``x [T, in]``, ``weight [out, in]``, ``bias [out]`` and ``out [T, out]``, contiguous. ``others`` are
        those of an op that the kernels compute too, and ``out`` is its result. What the kernels were not made for is
        ignored. Raises ``ValueError`` for more rows than the kernels compute.
        """
        num_rows = len(x)
        if num_rows > self._max_rows:
            raise ValueError(f"{num_rows} rows: these kernels compute up to {self._max_rows}")
        if num_rows == 0:
            return
        target = out if self._workspace is None else self._workspace
        given = {**others, "x": x, "weight": weight, "bias": bias, "out": target}
        if isinstance(weight, QuantizedWeight):
            given |= {"weight": weight.codes, "scale": weight.scale}
        self._main(self._grid, *[given[name] for name in self._operands], num_rows)
        if self._reduce is not None:
            given = {**others, "part": target, "bias": bias, "out": out}
            tensors = [given[name] for name in self._reduce_operands]
            self._reduce((num_rows, self._reduce_tiles), *tensors, num_rows)


def _load(
    specs: FewRowSpecs, num_rows: int, load: Callable[[KernelSpec], Kernel], get_workspace: Callable[[int], Tensor]
) -> FewRowKernel:
    reduce = None if specs.reduce is None else load(specs.reduce)
    workspace = None if reduce is None else get_workspace(specs.workspace_numel(num_rows))
    return FewRowKernel(load(specs.main), reduce, workspace)


def _number(kernel: Kernel, name: str) -> int:
    value = kernel.spec.parameters[name]
    assert isinstance(value, int)
    return value


def dequantize_spec(
    in_features: int, weight: WeightOnlyFormat, dtype: str, *, needed_by: tuple[str, ...] = ()
) -> KernelSpec:
    """Returns the kernel that dequantizes a weight of ``in_features``, rounded to ``dtype``, for
    :class:`DequantizeKernel`.
    """
    block = min(_BLOCK, max(32, power_of_2(in_features)))
    parameters: dict[str, Value] = {"IN": in_features, "weight": weight, "dtype": dtype}
    return KernelSpec(
        "dequantize",
        "triton",
        parameters | {"block": block, "tiles": -(-in_features // block)},
        (
            Argument("codes", CODES[weight], "in"),
            Argument("scale", SCALES[weight], "in"),
            Argument("out", dtype, "out"),
        ),
        {"num_warps": max(1, block // 256)},
        needed_by=needed_by,
    )


class DequantizeKernel:
    """Launches a kernel of :func:`dequantize_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel, self._tiles = kernel, kernel.spec.parameters["tiles"]

    def __call__(self, weight: QuantizedWeight, out: Tensor) -> None:
        """Writes the dequantized weight into ``out [out, in]``, which is contiguous."""
        assert isinstance(self._tiles, int)
        self._kernel((weight.out_features * self._tiles,), weight.codes, weight.scale, out)


def has_wide_products(x: Tensor) -> bool:
    """Returns whether the library that torch calls multiplies 16-bit numbers to fp32 where ``x`` lies."""
    return x.is_cuda


class LinearKernel:
    """Computes ``x Wᵀ + b`` for any number of rows, with weights as they are stored.

    Which kernel computes a call depends only on its number of rows. ``split_for(rows)`` says how the kernel for up to
    ``rows`` rows is cut; ``None`` means that the library computes them. ``get_workspace(numel)`` returns an fp32 buffer
    for partial sums, and ``dequantized`` is a buffer in the layer's dtype, in which a quantized weight is dequantized
    for the library. Layers may share both, since calls run one after the other. ``finish`` is an op that kernels for
    few rows compute too where they can; see :meth:`finish`.
    """

    def __init__(
        self,
        shape: FewRowShape,
        load: Callable[[KernelSpec], Kernel],
        get_workspace: Callable[[int], Tensor],
        split_for: Callable[[int], SplitK | None],
        *,
        dequantized: Tensor | None = None,
        finish: Finish | None = None,
        needed_by: tuple[str, ...] = (),
    ):
        self._shape, self._dequantize, self._dequantized = shape, None, None
        if shape.weight != "plain" and shape.library_serves:
            assert dequantized is not None, f"{shape}: the library needs room for the dequantized weight"
            self._dequantized = dequantized[: shape.out_features * shape.in_features].view(
                shape.out_features, shape.in_features
            )
            spec = dequantize_spec(shape.in_features, shape.weight, shape.dtype, needed_by=needed_by)
            self._dequantize = DequantizeKernel(load(spec))
        self._few: dict[int, FewRowKernel] = {}
        self._finishing: dict[int, FewRowKernel] = {}
        for rows in _TILES:
            if (split := split_for(rows)) is None:
                assert shape.library_serves, f"{shape}: the library cannot compute it"
                continue
            specs = few_row_specs(shape, rows, split, finish=finish, needed_by=needed_by)
            if specs.finishes:
                self._finishing[rows] = _load(specs, rows, load, get_workspace)
            if not specs.finishes or (rows == MAX_ROWS and self._has_pieces()):
                specs = few_row_specs(shape, rows, split, needed_by=needed_by)
                self._few[rows] = _load(specs, rows, load, get_workspace)

    def finishes(self, num_rows: int) -> bool:
        """Returns whether kernels compute the layer and the op that follows at once, for so many rows."""
        return num_rows <= MAX_ROWS and row_tile(num_rows) in self._finishing

    def finish(
        self, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, out: Tensor, **others: Tensor
    ) -> None:
        """Computes the layer and the op that follows it into ``out``, for so many rows as :meth:`finishes`. ``others``
        are what the op takes beside, by the names of its arguments."""
        self._finishing[row_tile(len(x))](x, weight, bias, out, **others)

    def __call__(self, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
        """Computes the layer alone, for other numbers of rows than :meth:`finishes`: ``x [T, in]``,
        ``weight [out, in]``, ``bias [out]``, ``out [T, out]``, contiguous.
        """
        few = self._few.get(row_tile(len(x))) if len(x) <= MAX_ROWS else None
        if few is not None:
            few(x, weight, bias, out)
        elif self._shape.library_widens and bias is None and has_wide_products(x):
            assert isinstance(weight, Tensor)
            library_call(torch.mm, x, weight.t(), out_dtype=out.dtype, out=out)
        elif len(x) > MAX_ROWS and self._in_pieces(len(x)):
            for start in range(0, len(x), MAX_ROWS):
                rows = slice(start, start + MAX_ROWS)
                self(x[rows], weight, bias, out[rows])
        else:
            plain = self._plain(weight)
            if bias is None:
                library_call(torch.mm, x, plain.t(), out=out)
            else:
                library_call(torch.addmm, bias, x, plain.t(), out=out)

    def _has_pieces(self) -> bool:
        """Returns whether kernels for few rows may compute more, in pieces."""
        return not self._shape.library_serves or self._shape.weight != "plain"

    def _in_pieces(self, num_rows: int) -> bool:
        """Returns whether kernels for few rows compute this many, in pieces."""
        if not self._shape.library_serves:
            return True
        return self._has_pieces() and MAX_ROWS in self._few and num_rows <= _MOST_PIECES * MAX_ROWS

    def _plain(self, weight: Tensor | QuantizedWeight) -> Tensor:
        """Returns the weight for the library. A quantized one is valid until the next layer's is dequantized."""
        if isinstance(weight, Tensor):
            return weight
        assert self._dequantize is not None
        assert self._dequantized is not None
        self._dequantize(weight, self._dequantized)
        return self._dequantized
