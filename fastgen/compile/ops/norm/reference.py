"""RMS norm and layer norm, with statistics in fp32."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec, Target, Value, power_of_2


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * (weight + offset)`` over the last axis (Zhang and Sennrich, 2019).

    ``x [T, …, H]``, ``weight [H]`` or ``[heads, H]``. The normalised value is rounded to ``x``'s dtype before it is
    weighted; with an ``offset``, which 16 bits could not add exactly, after it.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if offset:
        return (normed * (weight.float() + offset)).to(x.dtype)
    return normed.to(x.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """``(x − mean) / sqrt(var + eps) * (weight + offset) + bias`` over the last axis (Ba et al., 2016).

    ``x [T, …, H]``, ``weight, bias`` ``[H]`` or ``[heads, H]``. Computed in fp32, returned in ``x``'s dtype.
    """
    if not offset and (weight is None or weight.ndim == 1):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    out = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is not None:
        out = out * (weight.float() + offset)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def norm_spec(
    target: Target,
    kind: Literal["rms", "layer"],
    size: int,
    dtype: str,
    eps: float,
    *,
    weight: bool = True,
    bias: bool = False,
    offset: float = 0.0,
    residual: bool = False,
    scale: float = 1.0,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """The kernel that norms rows of ``size`` features of ``dtype`` (a short name), for :class:`NormKernel`.

    With ``residual`` it first adds ``scale * x`` to the residual stream, each rounded to ``dtype``, and norms that.
    Raises ``ValueError`` for a ``scale`` without it, and for an RMS norm with a ``bias``.
    """
    if kind == "rms" and bias:
        raise ValueError("bias=True: an RMS norm has none")
    if scale != 1 and not residual:
        raise ValueError(f"scale={scale}: only what is added to a residual is scaled")
    parameters: dict[str, Value] = {
        **{"H": size, "dtype": dtype, "eps": eps, "offset": offset or None},
        **{"weight": weight, "bias": bias, "residual": residual, "scale": scale if scale != 1 else None},
    }
    arguments = [
        Argument("x", dtype, "in"),
        *([Argument("residual", dtype, "out")] if residual else []),
        *([Argument("weight", dtype, "in")] if weight else []),
        *([Argument("bias", dtype, "in")] if bias else []),
        Argument("out", dtype, "out"),
        *([Argument("num_rows", "i64", "scalar")] if target == "cpp" else []),
    ]
    return KernelSpec(
        op=f"{kind}_norm",
        target=target,
        parameters=parameters,
        arguments=tuple(arguments),
        options={"num_warps": min(32, max(1, power_of_2(size) // 512))} if target == "triton" else {},
        template="norm",
        needed_by=needed_by,
    )


class NormKernel:
    """Launches a kernel of :func:`norm_spec`: :func:`rms_norm` or :func:`layer_norm` of every row."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._names = [argument.name for argument in kernel.spec.arguments]

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """``x, out, residual [T, H]``, contiguous; ``weight, bias [H]``. Writes ``out``, and to the ``residual`` the
        sum. Those that the kernel was not made for are not looked at.
        """
        given = {"x": x, "residual": residual, "weight": weight, "bias": bias, "out": out, "num_rows": len(x)}
        self._kernel((len(x),), *(given[name] for name in self._names))
