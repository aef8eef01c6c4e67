"""The C++ kernels of :class:`~fastgen.compile.host.rank_memory.SharedRanks`."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.host.rank_memory import SharedRanks
from fastgen.compile.host.ranks import DescribedRanks, Ranks
from fastgen.compile.spec import Argument, KernelSpec
from fastgen.compile.weights.packed import PackedWeight

_NEEDED_BY = ("tensor parallelism",)
_EXCHANGE = (
    Argument("shared", "u8", "out"),
    *(Argument(name, "i64", "scalar") for name in ("areas_offset", "area_bytes", "rank", "num_ranks", "timeout_ms")),
)


def all_reduce_spec(arch: str) -> KernelSpec:
    """Returns the kernel for :class:`AllReduceKernel`."""
    arguments = (Argument("x", "fp32", "out"), Argument("count", "i64", "scalar"), *_EXCHANGE)
    return KernelSpec("all_reduce", "cpp", {"arch": arch}, arguments, needed_by=_NEEDED_BY)


def gather_columns_spec() -> KernelSpec:
    """Returns the kernel for :class:`GatherKernel`."""
    sizes = (Argument(name, "i64", "scalar") for name in ("num_rows", "num_columns"))
    arguments = (Argument("x", "fp32", "in"), Argument("out", "fp32", "out"), *sizes, *_EXCHANGE)
    return KernelSpec("gather_columns", "cpp", {}, arguments, needed_by=_NEEDED_BY)


def row_maxima_spec(arch: str) -> KernelSpec:
    """Returns the kernel for :class:`RowMaximaKernel`."""
    sizes = (Argument(name, "i64", "scalar") for name in ("x_stride", "num_rows", "num_features"))
    arguments = (Argument("x", "fp32", "in"), Argument("largest", "fp32", "out"), *sizes, *_EXCHANGE)
    return KernelSpec("row_maxima", "cpp", {"arch": arch}, arguments, needed_by=_NEEDED_BY)


def sum_products_spec(arch: str, *, routed: bool = False) -> KernelSpec:
    """Returns the kernel for :class:`SumProductsKernel`; with ``routed`` each row has an expert's scales and biases."""
    arguments = (
        Argument("products", "i32", "in"),
        *(Argument(name, "fp32", "in") for name in ("largest", "scale", "bias")),
        *([Argument("experts", "i64", "in"), Argument("group_size", "i64", "scalar")] if routed else []),
        Argument("y", "fp32", "out"),
        *(Argument(name, "i64", "scalar") for name in ("num_rows", "num_outputs")),
        *_EXCHANGE,
    )
    return KernelSpec("sum_products", "cpp", {"arch": arch, "routed": routed}, arguments, needed_by=_NEEDED_BY)


class AllReduceKernel:
    """Sums over ranks that share memory, in their order, by a kernel of :func:`all_reduce_spec`. Where a rank does not
    come, it returns early; the memory's state tells."""

    def __init__(self, kernel: Kernel, ranks: Ranks):
        self._kernel, self._exchange = kernel, _exchange(ranks)

    def __call__(self, x: Tensor) -> Tensor:
        """Sums ``x``, fp32 and contiguous, in place, and returns it."""
        self._kernel((), x, x.numel(), *self._exchange)
        return x


class GatherKernel:
    """Lays columns of ranks that share memory side by side, by a kernel of :func:`gather_columns_spec`."""

    def __init__(self, kernel: Kernel, ranks: Ranks):
        self._kernel, self._exchange = kernel, _exchange(ranks)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Gathers ``x [R, n]`` of all ranks in ``out [R, V]`` of rank 0, both fp32 and contiguous."""
        self._kernel((), x, out, *out.shape, *self._exchange)


class RowMaximaKernel:
    """Finds the largest magnitude of each row over the ranks, each of which has some features of it, by a kernel of
    :func:`row_maxima_spec`."""

    def __init__(self, kernel: Kernel, ranks: Ranks):
        self._kernel, self._exchange = kernel, _exchange(ranks)

    def __call__(self, x: Tensor) -> Tensor:
        """Takes ``x [T, in]``, fp32, each row contiguous. Returns ``[T]``."""
        largest = x.new_empty(len(x))
        self._kernel((), x, largest, x.stride(0), *x.shape, *self._exchange)
        return largest


class SumProductsKernel:
    """Sums integer products over the ranks, scales them and adds the bias, by a kernel of :func:`sum_products_spec`.

    Products are exact, so the results have the bits of one rank's.
    """

    def __init__(self, kernel: Kernel, ranks: Ranks):
        self._kernel, self._exchange = kernel, _exchange(ranks)

    def __call__(
        self, products: Tensor, largest: Tensor, weight: PackedWeight, experts: Tensor | None = None
    ) -> Tensor:
        """Takes the rank's ``products [T, out]``, int32, of rows whose ``largest [T]`` magnitudes are those of all
        inputs. A row's scales are those of ``weight``, or of the group that ``experts``, of ``T`` numbers, has for it.
        Returns ``[T, out]``.
        """
        out = products.new_empty(products.shape, dtype=torch.float32)
        routed = () if experts is None else (experts, len(weight.bias) // weight.num_groups)
        self._kernel((), products, largest, weight.scale, weight.bias, *routed, out, *out.shape, *self._exchange)
        return out


def _exchange(ranks: Ranks) -> tuple[Tensor, int, int, int, int, int]:
    if isinstance(ranks, DescribedRanks):  # nothing runs
        return torch.empty(0, dtype=torch.uint8), 0, 0, ranks.index, ranks.count, 0
    assert isinstance(ranks, SharedRanks), "these kernels exchange through shared memory"
    memory = ranks.memory
    timeout_ms = round(1000 * ranks.timeout_s)
    return memory.shared, memory.areas_offset, memory.area_bytes, ranks.index, ranks.count, timeout_ms
