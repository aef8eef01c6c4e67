"""Triton kernels that add what all ranks have: what they have sent, or what stands in symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.host.symmetric_memory import HALF_BYTES, NUM_PROGRAMS, SymmetricMemory
from fastgen.compile.spec import MAX_REGISTERS, Argument, KernelSpec, Value, power_of_2, torch_dtype

_BLOCK = 1024  # numbers of a program, eight for each of its threads
_NEEDED_BY = ("tensor parallelism",)


def sum_parts_spec(num_ranks: int, dtype: str) -> KernelSpec:
    """Returns the kernel for :class:`SumPartsKernel`, for the parts of ``num_ranks`` ranks in ``dtype``."""
    return KernelSpec(
        "sum_parts",
        "triton",
        {"num_ranks": num_ranks, "dtype": dtype, "block": _BLOCK},
        (Argument("parts", dtype, "in"), Argument("out", dtype, "out"), Argument("count", "i32", "scalar")),
        {"num_warps": _BLOCK // 256},
        needed_by=_NEEDED_BY,
    )


class SumPartsKernel:
    """Adds the parts of all ranks in their order, in fp32, by a kernel of :func:`sum_parts_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __call__(self, parts: Tensor, out: Tensor) -> None:
        """Writes the sum of ``parts [n, ...]`` over the ranks to ``out [...]``, both contiguous."""
        self._kernel((-(-out.numel() // _BLOCK),), parts, out, out.numel())


def symmetric_sum_spec(num_ranks: int, dtype: str, shots: int) -> KernelSpec:
    """Returns the kernel for :class:`SymmetricSumKernel`, which adds numbers of ``num_ranks`` ranks in ``dtype`` after
    one exchange, or with two ``shots`` adds a share of them, and exchanges the sums."""
    parameters: dict[str, Value] = {
        "num_ranks": num_ranks,
        "lanes": power_of_2(num_ranks),
        "dtype": dtype,
        "vector": 16 // torch_dtype(dtype).itemsize,
        "shots": shots,
        "block": _BLOCK,
        "num_programs": NUM_PROGRAMS,
        "half_bytes": HALF_BYTES,
    }
    arguments = (
        Argument("x", dtype, "out"),
        Argument("buffers", "i64", "in"),
        Argument("epochs", "i32", "out"),
        Argument("ended", "i32", "in"),
        Argument("rank", "i32", "scalar"),
        Argument("count", "i32", "scalar"),
    )
    options: dict[str, Value] = {"num_warps": _BLOCK // 256, "maxnreg": MAX_REGISTERS}
    return KernelSpec("symmetric_sum", "triton", parameters, arguments, options, needed_by=_NEEDED_BY)


class SymmetricSumKernel:
    """Adds the numbers of all ranks in their order, in fp32, through ``memory``, of which this process is rank
    ``index``. ``kernels`` are those of :func:`symmetric_sum_spec` with one shot, and with two."""

    def __init__(self, kernels: Sequence[Kernel], memory: SymmetricMemory, index: int):
        self._kernels, self._memory, self._index = kernels, memory, index

    def __call__(self, x: Tensor, shots: int) -> None:
        """Replaces the contiguous ``x``, of at most :data:`HALF_BYTES` bytes, by its sum over the ranks."""
        memory = self._memory
        arguments = x, memory.buffers, memory.epochs, memory.ended, self._index, x.numel()
        self._kernels[shots - 1]((NUM_PROGRAMS,), *arguments)
