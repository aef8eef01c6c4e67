"""The C++ kernels of :class:`~fastgen.compile.host.rank_memory.SharedRanks`."""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.host.rank_memory import SharedRanks
from fastgen.compile.spec import Argument, KernelSpec

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


class AllReduceKernel:
    """:meth:`SharedRanks.all_reduce` by a kernel of :func:`all_reduce_spec`. Where a rank does not come, it returns
    early; the memory's state tells."""

    def __init__(self, kernel: Kernel, ranks: SharedRanks):
        self._kernel, self._exchange = kernel, _exchange(ranks)

    def __call__(self, x: Tensor) -> Tensor:
        """Sums ``x``, fp32 and contiguous, in place, and returns it."""
        self._kernel((), x, x.numel(), *self._exchange)
        return x


class GatherKernel:
    """:meth:`SharedRanks.gather` by a kernel of :func:`gather_columns_spec`."""

    def __init__(self, kernel: Kernel, ranks: SharedRanks):
        self._kernel, self._exchange = kernel, _exchange(ranks)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Gathers ``x [R, n]`` of all ranks in ``out [R, V]`` of rank 0, both fp32 and contiguous."""
        self._kernel((), x, out, *out.shape, *self._exchange)


def _exchange(ranks: SharedRanks) -> tuple[Tensor, int, int, int, int, int]:
    memory = ranks.memory
    timeout_ms = round(1000 * ranks.timeout_s)
    return memory.shared, memory.areas_offset, memory.area_bytes, ranks.index, ranks.count, timeout_ms
