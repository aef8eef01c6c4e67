"""The Triton kernel that adds what all ranks have sent."""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec

_BLOCK = 1024  # numbers of a program, eight for each of its threads


def sum_parts_spec(num_ranks: int, dtype: str) -> KernelSpec:
    """Returns the kernel for :class:`SumPartsKernel`, for the parts of ``num_ranks`` ranks in ``dtype``."""
    return KernelSpec(
        "sum_parts",
        "triton",
        {"num_ranks": num_ranks, "dtype": dtype, "block": _BLOCK},
        (Argument("parts", dtype, "in"), Argument("out", dtype, "out"), Argument("count", "i32", "scalar")),
        {"num_warps": _BLOCK // 256},
        needed_by=("tensor parallelism",),
    )


class SumPartsKernel:
    """Adds the parts of all ranks in their order, in fp32, by a kernel of :func:`sum_parts_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __call__(self, parts: Tensor, out: Tensor) -> None:
        """Writes the sum of ``parts [n, ...]`` over the ranks to ``out [...]``, both contiguous."""
        self._kernel((-(-out.numel() // _BLOCK),), parts, out, out.numel())
