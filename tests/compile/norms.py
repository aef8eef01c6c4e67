"""Norms of either target, for tests that need some kernel."""

from __future__ import annotations

from typing import Any

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.norm import cpp, triton
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.spec import KernelSpec


def norm_spec(
    target: str, kind: Any, size: int, dtype: str, eps: float, *, needed_by: tuple[str, ...] = (), **features: Any
) -> KernelSpec:
    """Returns the norm's kernel for ``"cpp"`` or ``"triton"``."""
    of_target = cpp.norm_spec if target == "cpp" else triton.norm_spec
    return of_target(NormShape(kind, size, dtype, eps, **features), needed_by=needed_by)


def norm_kernel(kernel: Kernel) -> cpp.NormKernel | triton.NormKernel:
    """Returns the norm's launcher."""
    return cpp.NormKernel(kernel) if kernel.spec.target == "cpp" else triton.NormKernel(kernel)
