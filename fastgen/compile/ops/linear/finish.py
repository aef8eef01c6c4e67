"""The op that follows a linear layer: kernels for few rows may compute it of their sums, in place of storing them.

An op that reads each output by itself, or outputs in pairs, is computed by the last kernel of the layer, whichever that
is. A norm needs whole rows. Only the kernel that adds the parts of split features has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastgen.compile.ops.activation.triton import function_name
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.qkv.triton import ROTARY_ARGUMENTS, check_rotary
from fastgen.compile.spec import Argument, Value


@dataclass(frozen=True)
class AddAndNorm:
    """Adds the outputs, normed as ``first`` says, to a residual stream and norms the sum; see :class:`NormShape`."""

    norm: NormShape
    first: NormShape | None = None
    needs_rows: ClassVar[bool] = True
    pairs: ClassVar[bool] = False

    def arguments(self, dtype: str) -> tuple[Argument, ...]:
        """Returns what the kernel takes beside the layer's operands: the norm's result is ``out``."""
        norms = [("norm", self.norm)] if self.first is None else [("first_norm", self.first), ("norm", self.norm)]
        weights = [
            Argument(f"{prefix}_{name}", dtype, "in")
            for prefix, norm in norms
            for name, there in (("weight", norm.weight), ("bias", norm.bias))
            if there
        ]
        return (Argument("residual", dtype, "out"), *weights, Argument("out", dtype, "out"))

    def parameters(self) -> dict[str, Value]:
        """Returns what its template branches on."""
        parameters = {"kind": self.norm.kind, **self.norm.parameters()}
        del parameters["residual"]
        first = {} if self.first is None else {"kind": self.first.kind, **self.first.parameters()}
        return parameters | {f"first_{name}": first.get(name) for name in ("kind", "eps", "offset", "weight", "bias")}


@dataclass(frozen=True)
class Activate:
    """Applies an activation to each output; a ``gated`` one to those of the first half, which the others multiply."""

    kind: str
    gated: bool
    needs_rows: ClassVar[bool] = False

    @property
    def pairs(self) -> bool:
        """Returns whether it reads outputs in pairs."""
        return self.gated

    def arguments(self, dtype: str) -> tuple[Argument, ...]:
        return (Argument("out", dtype, "out"),)

    def parameters(self) -> dict[str, Value]:
        return {"finish": "activate", "kind": function_name(self.kind), "gated": self.gated}


@dataclass(frozen=True)
class RotateAndWrite:
    """Rotates queries and keys of ``head_dim`` features by position, the first ``rotary_dim`` of them, and writes keys
    and values to the cache; queries are the ``out``. Raises ``ValueError`` for an odd number of features."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    interleaved: bool = False
    needs_rows: ClassVar[bool] = False
    pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rotary(self.rotary_dim, self.head_dim)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: features are taken in pairs")

    def arguments(self, dtype: str) -> tuple[Argument, ...]:
        return (
            *(ROTARY_ARGUMENTS if self.rotary_dim else ()),
            Argument("out", dtype, "out"),
            Argument("k_cache", dtype, "out"),
            Argument("v_cache", dtype, "out"),
            Argument("slots", "i64", "in"),
        )

    def parameters(self) -> dict[str, Value]:
        sizes: dict[str, Value] = {"N": self.num_heads, "K": self.num_kv_heads, "D": self.head_dim}
        return {"finish": "rotate", **sizes, "R": self.rotary_dim or None, "interleaved": self.interleaved}


Finish = AddAndNorm | Activate | RotateAndWrite

# The parameters of kernels that store their sums.
NO_FINISH: dict[str, Value] = dict.fromkeys(("finish", "kind", "gated", "N", "K", "D", "R", "interleaved"))
