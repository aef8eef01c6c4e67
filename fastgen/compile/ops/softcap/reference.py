"""Soft caps, which keep scores and logits within bounds (Gemma 2, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, elementwise: near ``x`` where that is small, and never beyond ``±cap``."""
    return cap * torch.tanh(x / cap)


def softcap_spec(cap: float, arch: str, *, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """The C++ kernel for :class:`SoftcapKernel`."""
    arguments = (Argument("x", "fp32", "out"), Argument("count", "i64", "scalar"))
    return KernelSpec("softcap", "cpp", {"cap": cap, "arch": arch}, arguments, needed_by=needed_by)


class SoftcapKernel:
    """:func:`soft_cap` in place, by a kernel of :func:`softcap_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` fp32, contiguous; itself."""
        self._kernel((), x, x.numel())
        return x
