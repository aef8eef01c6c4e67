"""The C++ kernel of :mod:`~fastgen.compile.ops.add.reference`."""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec


def add_spec(arch: str, scale: float | None = None, *, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel for :class:`AddKernel`, in fp32. ``arch`` is one of the C++ builder's."""
    arguments = (Argument("x", "fp32", "out"), Argument("y", "fp32", "in"), Argument("count", "i64", "scalar"))
    return KernelSpec("add", "cpp", {"scale": scale, "arch": arch}, arguments, needed_by=needed_by)


class AddKernel:
    """:func:`~fastgen.compile.ops.add.reference.scaled_add` in place, by a kernel of :func:`add_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds ``y`` to ``x``, both contiguous and of one shape, and returns ``x``. Raises ``ValueError``."""
        if x.shape != y.shape or not (x.is_contiguous() and y.is_contiguous()):
            raise ValueError(f"x {tuple(x.shape)}, y {tuple(y.shape)}: expected two contiguous tensors of one shape")
        self._kernel((), x, y, x.numel())
        return x
