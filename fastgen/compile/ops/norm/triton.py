"""The Triton kernels of :mod:`~fastgen.compile.ops.norm.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.spec import KernelSpec, power_of_2


def norm_spec(shape: NormShape, *, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel that norms rows of this shape, for :class:`NormKernel`."""
    return KernelSpec(
        op=f"{shape.kind}_norm",
        target="triton",
        parameters=shape.parameters(),
        arguments=shape.arguments(),
        options={"num_warps": min(32, max(1, power_of_2(shape.size) // 512))},
        template="norm",
        needed_by=needed_by,
    )


class NormKernel:
    """Launches a kernel of :func:`norm_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._names = [argument.name for argument in kernel.spec.arguments]

    def empty_out(self, x: Tensor) -> Tensor:
        """Returns room for the norm of ``x [T, H]``."""
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """Norms every row: ``x, out, residual [T, H]``, contiguous; ``weight, bias [H]``. Writes ``out``, and the sum
        to ``residual``. Tensors that the kernel was not made for are ignored.
        """
        given = {"x": x, "residual": residual, "weight": weight, "bias": bias, "out": out}
        self._kernel((len(x),), *(given[name] for name in self._names))
