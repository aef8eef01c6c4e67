"""The C++ kernels of :mod:`~fastgen.compile.ops.linear.reference`, one for each weight format, for any size."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec, Value
from fastgen.compile.weights.packed import ARCHES_WITH_TILES, PANELS, TILED, PackedWeight, WeightFormat
from fastgen.compile.weights.prepared_rows import row_format

_CPU = torch.device("cpu")
_IN_INTEGERS = ("int8", "int4")


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
    prepares = row_format(weight, arch) is not None
    tiles = TILED.get(weight) if arch in ARCHES_WITH_TILES else None
    arguments = [
        Argument("x", "fp32", "in"),
        Argument("x_stride", "i64", "scalar"),
        *([] if routed else [Argument("x_group_stride", "i64", "scalar")]),
        *([] if routed and not prepares else [Argument("num_rows", "i64", "scalar")]),
        *([Argument(name, "i64", "in") for name in ("order", "first_rows")] if routed else []),
        *([Argument("choices_per_row", "i64", "scalar")] if routed else []),
        Argument("num_groups", "i64", "scalar"),
        *([Argument("workspace", "u8", "out"), Argument("row_bytes", "i64", "scalar")] if prepares else []),
        *([Argument("is_prepared", "i64", "scalar")] if prepares and not (routed or over_ranks) else []),
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


class LinearKernel:
    """Launches a kernel of :func:`linear_spec`: ``x Wᵀ + b``, ``x`` and ``y`` in fp32.

    An output's bits depend only on its row of ``x``, its weights and the instruction set. ``max_rows`` (counting the
    rows of each group, or where rows are routed the choices) and ``max_in_features`` bound the rows that it prepares
    at once in its ``workspace``: see :class:`~fastgen.compile.weights.prepared_rows.RowFormat`. Each thread needs its
    own launcher. Launchers of one format that run one after the other may work in one ``workspace``.
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
        self._rows = row_format(self._format, self._arch)
        size_bytes = self._rows.size_bytes(max_rows, max_in_features) if self._rows else 0
        self.workspace = torch.empty(size_bytes, dtype=torch.uint8, device=device) if workspace is None else workspace

    def pack(self, out_features: int, in_features: int, *, num_groups: int = 1) -> PackedWeight:
        """Returns an empty weight in the kernel's format."""
        return PackedWeight(
            self._format, out_features, in_features, self._arch, num_groups=num_groups, device=self._device
        )

    def __call__(self, x: Tensor, weight: PackedWeight, out: Tensor) -> None:
        """Takes ``x [T, in]`` and ``out [T, out]``, or ``[T, N, in]`` and ``[T, N, out]`` for a weight of ``N`` groups;
        fp32, each row contiguous. Or ``x`` are prepared rows, ``[T, row_bytes]`` u8, of room that
        :meth:`RowFormat.empty` gave. Raises ``ValueError``.
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
        if self._rows is not None and x.dtype == torch.uint8:
            return self._prepared_arguments(x, weight, out)
        rows = (len(x),) if x.ndim == 2 and weight.num_groups == 1 else (len(x), weight.num_groups)
        groups = {"x_group_stride": x.stride(-2), "y_group_stride": out.stride(-2)}
        return self.fitting(x, weight, out, rows, rows, num_rows=len(x), **groups)

    def _prepared_arguments(self, x: Tensor, weight: PackedWeight, out: Tensor) -> list[Tensor | int]:
        """Returns the kernel's arguments for prepared rows ``x``, which take the workspace's place."""
        assert self._rows is not None
        row_bytes, least = self._rows.row_bytes(weight.in_features), self._rows.size_bytes(len(x), weight.in_features)
        room = x.untyped_storage().nbytes() - x.storage_offset()
        if x.shape != (len(x), row_bytes) or not x.is_contiguous() or room < least or weight.num_groups > 1:
            raise ValueError(f"prepared rows {tuple(x.shape)} in {room} bytes: expected rows of {row_bytes} in {least}")
        self._check(weight, out, (len(x),))
        given: dict[str, Tensor | int] = {"is_prepared": 1, "num_rows": len(x), "y_group_stride": 0}
        given["workspace"] = x.as_strided((least,), (1,))  # with the rows behind that a tile reads
        given |= {"x": weight.bias, "x_stride": 0, "x_group_stride": 0}  # not read
        return self._in_order(weight, out, **given)

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
        expected = (*x_rows, weight.in_features)
        if x.shape != expected or x.stride(-1) != 1:
            raise ValueError(f"x {tuple(x.shape)}: expected {expected}, its rows contiguous")
        self._check(weight, out, out_rows)
        # A matrix unit reads routed rows once for each choice.
        num_prepared = math.prod(out_rows if self._arch in ARCHES_WITH_TILES else x_rows)
        if self._rows and (num_prepared > self._max_rows or weight.in_features > self._max_in_features):
            raise ValueError(f"x {tuple(x.shape)}: made for at most {self._max_rows} x {self._max_in_features}")
        return self._in_order(weight, out, x=x, x_stride=x.stride(0), workspace=self.workspace, is_prepared=0, **given)

    def _check(self, weight: PackedWeight, out: Tensor, out_rows: tuple[int, ...]) -> None:
        expected = (*out_rows, weight.out_features)
        if out.shape != expected or out.stride(-1) != 1:
            raise ValueError(f"out {tuple(out.shape)}: expected {expected}, its rows contiguous")
        if weight.format != self._format or weight.arch != self._arch:
            raise ValueError(f"weights in {weight.format} for {weight.arch}, the kernel is {self._kernel.spec.name}")

    def _in_order(self, weight: PackedWeight, out: Tensor, **given: Tensor | int) -> list[Tensor | int]:
        """Returns ``given`` and what follows from ``weight`` and ``out`` in the order of the kernel's arguments."""
        given |= {"y": out, "y_stride": out.stride(0)}
        given |= {"weights": weight.panels, "scale": weight.scale, "bias": weight.bias, "num_groups": weight.num_groups}
        given |= {"in_features": weight.in_features, "out_features": weight.out_features}
        given["row_bytes"] = self._rows.row_bytes(weight.in_features) if self._rows else 0
        return [given[name] for name in self._names]
