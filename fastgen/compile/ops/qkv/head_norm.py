"""The norm of queries, keys or latent vectors before attention, for kernels of both targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastgen.compile.spec import Argument, Value


@dataclass(frozen=True)
class HeadNorm:
    """A norm of queries or keys: of each head separately, or of all heads together with ``over_all``. With ``per_head``
    each head has its own weight."""

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0
    over_all: bool = False
    per_head: bool = False
    weight: bool = True
    bias: bool = False

    def parameters(self, prefix: str) -> dict[str, Value]:
        return {
            f"{prefix}_norm": self.kind,
            f"{prefix}_over": "all" if self.over_all else "head",
            f"{prefix}_per_head": self.per_head,
            f"{prefix}_weight": self.weight,
            f"{prefix}_bias": self.bias,
            f"{prefix}_eps": self.eps,
            f"{prefix}_offset": self.offset or None,
        }

    def arguments(self, prefix: str, dtype: str) -> list[Argument]:
        names = [name for name, there in (("weight", self.weight), ("bias", self.bias)) if there]
        return [Argument(f"{prefix}_norm_{name}", dtype, "in") for name in names]


def norm_parameters(norm: HeadNorm | None, prefix: str) -> dict[str, Value]:
    """Returns the parameters of a norm, or of its absence: the same names, without values."""
    return dict.fromkeys(HeadNorm("rms", 0.0).parameters(prefix)) if norm is None else norm.parameters(prefix)


def norm_arguments(norm: HeadNorm | None, prefix: str, dtype: str) -> list[Argument]:
    """Returns the arguments of a norm with weights of ``dtype``; none where there is no norm."""
    return [] if norm is None else norm.arguments(prefix, dtype)
