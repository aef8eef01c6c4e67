"""RMS and layer norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastgen.compile.ops.norm import cpp, triton
from fastgen.compile.ops.norm.reference import layer_norm, rms_norm
from fastgen.layers.residual import Residual, Stream, settled


class _Norm(nn.Module):
    """``weight`` and ``bias`` of ``shape``, whose last axis is normed; ``offset`` is added to the weight.

    A ``kernel`` computes it, where there is one, and an ``adding_kernel`` where something is still to be added to the
    stream that is normed.
    """

    def __init__(
        self,
        shape: Sequence[int],
        eps: float,
        *,
        weight: bool,
        bias: bool,
        offset: float = 0.0,
        dtype: torch.dtype,
        device: torch.device,
        kernel: cpp.NormKernel | triton.NormKernel | None = None,
        adding_kernel: cpp.NormKernel | triton.NormKernel | None = None,
    ):
        super().__init__()
        self.eps, self.offset, self.kernel, self.adding_kernel = eps, offset, kernel, adding_kernel

        def parameter(present: bool) -> nn.Parameter | None:
            return (
                nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False) if present else None
            )

        self.weight, self.bias = parameter(weight), parameter(bias)

    def forward(self, x: Stream) -> Tensor:
        if isinstance(x, Residual) and x.added is not None:
            assert self.adding_kernel is not None, "this norm was not built to read the stream"
            added, x.added = x.added, None
            out = torch.empty_like(added)
            self.adding_kernel(added, self.weight, self.bias, out, x.x)
            return out
        x = settled(x)
        if self.kernel is None:
            return self.reference(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.kernel(x.contiguous(), self.weight, self.bias, out)
        return out

    def reference(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class RMSNorm(_Norm):
    """``x [T, …, H]`` to the same shape; see :func:`fastgen.compile.ops.norm.reference.rms_norm`."""

    def reference(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)


class LayerNorm(_Norm):
    """``x [T, …, H]`` to the same shape; see :func:`fastgen.compile.ops.norm.reference.layer_norm`."""

    def reference(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.offset)


Norm = RMSNorm | LayerNorm


class QkNorm(nn.Module):
    """Norm of the queries or keys ``x [T, heads, D]``: each head by itself, or ``over_all`` heads laid together."""

    def __init__(self, norm: Norm, *, over_all: bool):
        super().__init__()
        self.norm, self.over_all = norm, over_all

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.flatten(1)).view_as(x) if self.over_all else self.norm(x)
        return normed
