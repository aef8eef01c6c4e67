"""The C++ kernels of :mod:`~fastgen.compile.ops.linear.reference`, one for each weight format, for any size."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec, Value
from fastgen.compile.weights.formats import GROUP
from fastgen.compile.weights.packed import ARCHES_WITH_TILES, PANELS, TILED, PackedWeight, WeightFormat

_CPU = torch.device("cpu")
_IN_INTEGERS = ("int8", "int4")
_TILE_ROWS = 16  # that a matrix unit reads at once


def _prepares(weight: WeightFormat, arch: str) -> bool:
    """Returns whether kernels first quantize rows, round them, or cut their numbers into parts."""
    return weight in (*_IN_INTEGERS, "bf16_dot") or (weight == "bf16" and arch in ARCHES_WITH_TILES)


def linear_spec(
    weight: WeightFormat,
    arch: str,
    *,
    routed: bool = False,
    over_ranks: bool = False,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """Returns the kernel for all layers with weights in this format, of any size, for :class:`LinearKernel`, or with
    ``routed`` for :class:`fastgen.compile.ops.experts.cpp.GroupedLinearKernel`.

    ``arch`` is the instruction set, one of :data:`fastgen.compile.build.cpp.CPP_ARCHES`. The kernel runs on the
    thread pool, so call :func:`fastgen.compile.host.thread_pool.load_thread_pool` first. Where there is a matrix unit,
    it multiplies all but few rows of the formats that it supports.

    ``over_ranks`` is for int8 weights of which each rank has some inputs. Rows are quantized with scales of whole rows,
    and ``y`` are sums of products, integers that are still to be summed over the ranks, scaled and biased.
    """
    assert not over_ranks or weight == "int8", "other sums of products are not exact, so ranks sum results"
    prepares = _prepares(weight, arch)
    tiles = TILED.get(weight) if arch in ARCHES_WITH_TILES else None
    arguments = [
        Argument("x", "fp32", "in"),
        Argument("x_stride", "i64", "scalar"),
        *([] if routed else [Argument("x_group_stride", "i64", "scalar")]),
        *([] if routed and not prepares else [Argument("num_rows", "i64", "scalar")]),
        *([Argument(name, "i64", "in") for name in ("order", "first_rows")] if routed else []),
        *([Argument("choices_per_row", "i64", "scalar")] if routed else []),
        Argument("num_groups", "i64", "scalar"),
        *([Argument("workspace", "u8", "out")] if prepares else []),
        Argument("weights", "u8", "in"),
        *([Argument("largest", "fp32", "in")] if over_ranks else []),
        *([] if over_ranks else [Argument(name, "fp32", "in") for name in ("scale", "bias")]),
        Argument("y", "i32" if over_ranks else "fp32", "out"),
        Argument("y_stride", "i64", "scalar"),
        *([] if routed else [Argument("y_group_stride", "i64", "scalar")]),
        Argument("in_features", "i64", "scalar"),
        Argument("out_features", "i64", "scalar"),
    ]
    parameters: dict[str, Value] = {"weight": weight, "arch": arch, "panel": PANELS[arch], "routed": routed}
    parameters |= {"tiles": tiles, **({"over_ranks": over_ranks} if weight in _IN_INTEGERS else {})}
    return KernelSpec(
        op="linear",
        target="cpp",
        parameters=parameters,
        arguments=tuple(arguments),
        template="linear_int" if weight in _IN_INTEGERS else "linear_float",
        needed_by=needed_by,
    )


def _workspace_bytes(weight: WeightFormat, arch: str, max_rows: int, max_in_features: int) -> int:
    """Returns the bytes in which a :class:`LinearKernel` prepares rows; where they are read as they are, none.

    A matrix unit reads complete tiles, the last of which may have rows after the last row.
    """
    if not _prepares(weight, arch):
        return 0
    if arch in ARCHES_WITH_TILES:
        max_rows, max_in_features = max_rows + _TILE_ROWS - 1, max_in_features + TILED[weight] - 1
    num_parts = 3 if weight == "bf16" else 1
    in_bf16 = 2 * num_parts * (max_in_features + 1)
    row_bytes = (max_in_features // GROUP + 1) * (GROUP + 8) if weight in _IN_INTEGERS else in_bf16
    return max_rows * (row_bytes + 128)


class LinearKernel:
    """Launches a kernel of :func:`linear_spec`: ``x Wᵀ + b``, ``x`` and ``y`` in fp32.

    An output's bits depend only on its row of ``x``, its weights and the instruction set. ``max_rows`` (counting the
    rows of each group, or where rows are routed the choices) and ``max_in_features`` bound the rows that are prepared
    at once: quantized, rounded or cut into parts. Each thread needs its own launcher. Launchers of one format that run
    one after the other may work in one ``workspace``.
    """

    def __init__(
        self,
        kernel: Kernel,
        max_rows: int,
        max_in_features: int,
        device: torch.device = _CPU,
        workspace: Tensor | None = None,
    ):
        self._kernel = kernel
        self._format = cast(WeightFormat, kernel.spec.parameters["weight"])
        self._arch = str(kernel.spec.parameters["arch"])
        self._names = [argument.name for argument in kernel.spec.arguments]
        self._max_rows, self._max_in_features, self._device = max_rows, max_in_features, device
        size_bytes = _workspace_bytes(self._format, self._arch, max_rows, max_in_features)
        self.workspace = torch.empty(size_bytes, dtype=torch.uint8, device=device) if workspace is None else workspace

    def pack(self, out_features: int, in_features: int, *, num_groups: int = 1) -> PackedWeight:
        """Returns an empty weight in the kernel's format."""
        return PackedWeight(
            self._format, out_features, in_features, self._arch, num_groups=num_groups, device=self._device
        )

    def __call__(self, x: Tensor, weight: PackedWeight, out: Tensor) -> None:
        """Takes ``x [T, in]`` and ``out [T, out]``, or ``[T, N, in]`` and ``[T, N, out]`` for a weight of ``N`` groups;
        fp32, each row contiguous. Raises ``ValueError``.
        """
        if len(x):
            self._kernel((), *self.arguments(x, weight, out))

    def products(self, x: Tensor, largest: Tensor, weight: PackedWeight) -> Tensor:
        """Returns the sums of products ``[T, out]``, int32, by a kernel ``over_ranks``: ``x [T, in]`` are some inputs
        of rows whose ``largest [T]`` magnitudes are those of all inputs. Raises ``ValueError``."""
        out = x.new_empty(len(x), weight.out_features, dtype=torch.int32)
        if len(x):
            rows = (len(x),)
            strides = {"x_group_stride": 0, "y_group_stride": 0}  # of one group
            given = self.fitting(x, weight, out, rows, rows, num_rows=len(x), largest=largest, **strides)
            self._kernel((), *given)
        return out

    def arguments(self, x: Tensor, weight: PackedWeight, out: Tensor) -> list[Tensor | int]:
        """Returns the kernel's arguments for these tensors. Raises ``ValueError`` where they do not fit it."""
        rows = (len(x),) if x.ndim == 2 and weight.num_groups == 1 else (len(x), weight.num_groups)
        groups = {"x_group_stride": x.stride(-2), "y_group_stride": out.stride(-2)}
        return self.fitting(x, weight, out, rows, rows, num_rows=len(x), **groups)

    def fitting(
        self,
        x: Tensor,
        weight: PackedWeight,
        out: Tensor,
        x_rows: tuple[int, ...],
        out_rows: tuple[int, ...],
        **given: Tensor | int,
    ) -> list[Tensor | int]:
        """Returns the kernel's arguments: those of ``x``, ``weight`` and ``out``, and the others as ``given``.

        Raises ``ValueError`` where ``x`` is not ``[*x_rows, in]`` or ``out`` not ``[*out_rows, out]``, and where the
        kernel was made for something else.
        """
        expected, expected_out = (*x_rows, weight.in_features), (*out_rows, weight.out_features)
        is_contiguous = x.stride(-1) == 1 and out.stride(-1) == 1
        if x.shape != expected or out.shape != expected_out or not is_contiguous:
            found = f"x {tuple(x.shape)}, out {tuple(out.shape)}"
            raise ValueError(f"{found}: expected {expected} and {expected_out}, their rows contiguous")
        if weight.format != self._format or weight.arch != self._arch:
            raise ValueError(f"weights in {weight.format} for {weight.arch}, the kernel is {self._kernel.spec.name}")
        # A matrix unit reads routed rows once for each choice.
        num_prepared = math.prod(out_rows if self._arch in ARCHES_WITH_TILES else x_rows)
        is_too_large = num_prepared > self._max_rows or weight.in_features > self._max_in_features
        if is_too_large and _prepares(self._format, self._arch):
            raise ValueError(f"x {tuple(x.shape)}: made for at most {self._max_rows} x {self._max_in_features}")
        given |= {"x": x, "x_stride": x.stride(0), "y": out, "y_stride": out.stride(0), "workspace": self.workspace}
        given |= {"weights": weight.panels, "scale": weight.scale, "bias": weight.bias, "num_groups": weight.num_groups}
        given |= {"in_features": weight.in_features, "out_features": weight.out_features}
        return [given[name] for name in self._names]
