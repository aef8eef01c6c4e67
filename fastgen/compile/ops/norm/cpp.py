"""The C++ kernels of :mod:`~fastgen.compile.ops.norm.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.spec import Argument, KernelSpec, Value
from fastgen.compile.weights.prepared_rows import RowFormat


def norm_spec(shape: NormShape, rows: RowFormat | None = None, *, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel that norms rows of this shape, for :class:`NormKernel`. Given ``rows`` it writes results of
    fp32 as linear layers read them.
    """
    *inputs, out = shape.arguments()
    parameters: dict[str, Value] = {"row_format": None}
    if rows is not None:
        assert shape.dtype == "fp32", "rows are prepared of fp32"
        parameters, out = rows.parameters(shape.size), Argument("out", "u8", "out")
    return KernelSpec(
        op=f"{shape.kind}_norm",
        target="cpp",
        parameters=shape.parameters() | parameters,
        arguments=(*inputs, out, Argument("num_rows", "i64", "scalar")),
        template="norm",
        needed_by=needed_by,
    )


class NormKernel:
    """Launches a kernel of :func:`norm_spec`, made for the same ``rows``."""

    def __init__(self, kernel: Kernel, rows: RowFormat | None = None):
        self._kernel, self._rows = kernel, rows
        self._names = [argument.name for argument in kernel.spec.arguments[:-1]]

    def empty_out(self, x: Tensor) -> Tensor:
        """Returns room for the norm of ``x [T, H]``: the same, or prepared rows."""
        if self._rows is None:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._rows.empty(len(x), x.shape[1], x.device)

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """Norms every row: ``x, residual [T, H]``, contiguous; ``weight, bias [H]``. Writes ``out``, which
        :meth:`empty_out` gave, and the sum to ``residual``. Tensors that the kernel was not made for are ignored.
        """
        given = {"x": x, "residual": residual, "weight": weight, "bias": bias, "out": out}
        self._kernel((), *(given[name] for name in self._names), len(x))
