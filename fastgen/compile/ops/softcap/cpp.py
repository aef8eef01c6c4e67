"""The C++ kernel of :mod:`~fastgen.compile.ops.softcap.reference`."""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec


def softcap_spec(cap: float, arch: str, *, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel for :class:`SoftcapKernel`."""
    arguments = (Argument("x", "fp32", "out"), Argument("count", "i64", "scalar"))
    return KernelSpec("softcap", "cpp", {"cap": cap, "arch": arch}, arguments, needed_by=needed_by)


class SoftcapKernel:
    """:func:`~fastgen.compile.ops.softcap.reference.soft_cap` in place, by a kernel of :func:`softcap_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __call__(self, x: Tensor) -> Tensor:
        """Changes ``x``, fp32 and contiguous, and returns it."""
        self._kernel((), x, x.numel())
        return x
