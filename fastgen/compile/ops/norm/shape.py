"""The size and the features of a norm, for kernels of both targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastgen.compile.spec import Argument, Value


@dataclass(frozen=True)
class NormShape:
    """A norm of rows of ``size`` features of ``dtype`` (a short name).

    With ``residual`` the kernel first adds ``scale * x`` to the residual stream, each rounded to ``dtype``, and norms
    the sum. Raises ``ValueError`` for a ``scale`` without it, and for an RMS norm with a ``bias``.
    """

    kind: Literal["rms", "layer"]
    size: int
    dtype: str
    eps: float
    weight: bool = True
    bias: bool = False
    offset: float = 0.0
    residual: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind == "rms" and self.bias:
            raise ValueError("bias=True: an RMS norm has none")
        if self.scale != 1 and not self.residual:
            raise ValueError(f"scale={self.scale}: only what is added to a residual is scaled")

    def parameters(self) -> dict[str, Value]:
        """Returns the parameters that the templates of both targets branch on."""
        return {
            "H": self.size,
            "dtype": self.dtype,
            "eps": self.eps,
            "offset": self.offset or None,
            "weight": self.weight,
            "bias": self.bias,
            "residual": self.residual,
            "scale": self.scale if self.scale != 1 else None,
        }

    def arguments(self) -> tuple[Argument, ...]:
        """Returns the tensors of the kernel, in order."""
        return (
            Argument("x", self.dtype, "in"),
            *([Argument("residual", self.dtype, "out")] if self.residual else []),
            *([Argument("weight", self.dtype, "in")] if self.weight else []),
            *([Argument("bias", self.dtype, "in")] if self.bias else []),
            Argument("out", self.dtype, "out"),
        )
