"""Linear layers, and the head's logits."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.compile.build import Kernel
from fastgen.compile.ops.packed_weight import PANELS, PackedWeight, WeightFormat
from fastgen.compile.ops.quantization import GROUP
from fastgen.compile.spec import Argument, KernelSpec

_VOCAB_PIECE = 8192  # vocabulary rows widened to fp32 at a time, so that a head in 16 bits never needs a second copy


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x Wᵀ + b``: ``x [T, in]``, ``weight [out, in]``, ``bias [out]``; returns ``[T, out]`` in ``x``'s dtype."""
    return F.linear(x, weight, bias)


def logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b`` accumulated and returned in fp32, whatever the weights' dtype.

    ``x [R, H]``, ``weight [V, H]``, ``bias [V]``; returns ``[R, V]``. Rounded to 16 bits, logits would tie where the
    model's do not.
    """
    x = x.float()
    if weight.dtype == torch.float32:
        out = F.linear(x, weight)
    else:
        pieces = [weight[start : start + _VOCAB_PIECE] for start in range(0, len(weight), _VOCAB_PIECE)]
        out = torch.cat([F.linear(x, piece.float()) for piece in pieces], dim=-1)
    return out if bias is None else out + bias.float()


def per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A map of its own for each head: ``x [T, N, in]``, ``weight [N, out, in]``; returns ``[T, N, out]``."""
    return torch.einsum("tni,noi->tno", x, weight)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """A map of its own for each group of rows: the first ``counts[0]`` by ``weight[0]``, the next by ``weight[1]`` …

    ``x [M, in]``, ``weight [E, out, in]``, ``bias [E, out]``, ``counts [E]`` with sum ``M``, zeros allowed; returns
    ``[M, out]`` in ``x``'s dtype.
    """
    out = x.new_empty(len(x), weight.shape[1])
    start = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            rows = slice(start, start + count)
            out[rows] = F.linear(x[rows], weight[group], None if bias is None else bias[group])
            start += count
    return out


def linear_spec(weight: WeightFormat, arch: str, *, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """The kernel for every layer whose weights have this format, of any size, for :class:`LinearKernel`.

    ``arch`` is the instruction set, one of :data:`fastgen.compile.build_cpp.CPP_ARCHES`. The kernel runs on the pool:
    :func:`fastgen.compile.thread_pool.load_thread_pool` comes first.
    """
    in_integers = weight in ("int8", "int4")
    arguments = [
        Argument("x", "fp32", "in"),
        Argument("x_stride", "i64", "scalar"),
        Argument("num_rows", "i64", "scalar"),
        *([Argument("workspace", "u8", "out")] if in_integers else []),
        Argument("weights", "u8", "in"),
        Argument("scale", "fp32", "in"),
        Argument("bias", "fp32", "in"),
        Argument("y", "fp32", "out"),
        Argument("y_stride", "i64", "scalar"),
        Argument("in_features", "i64", "scalar"),
        Argument("out_features", "i64", "scalar"),
    ]
    return KernelSpec(
        op="linear",
        target="cpp",
        parameters={"weight": weight, "arch": arch, "panel": PANELS[arch]},
        arguments=tuple(arguments),
        template="linear_int" if in_integers else "linear_float",
        needed_by=needed_by,
    )


class LinearKernel:
    """Launches a kernel of :func:`linear_spec`: ``x Wᵀ + b``, in fp32 beside the weights.

    An output's bits depend on its row of ``x``, its weights and the instruction set alone. ``max_rows`` and
    ``max_in_features`` bound the rows that integer formats quantise at once. Two threads need a launcher each.
    """

    def __init__(self, kernel: Kernel, max_rows: int, max_in_features: int):
        self._kernel = kernel
        self._format = cast(WeightFormat, kernel.spec.parameters["weight"])
        self._arch = str(kernel.spec.parameters["arch"])
        self._max_rows, self._max_in_features = max_rows, max_in_features
        self._workspace: list[Tensor] = []
        if self._format in ("int8", "int4"):
            row_bytes = (max_in_features // GROUP + 1) * (GROUP + 8) + 128
            self._workspace = [torch.empty(max_rows * row_bytes, dtype=torch.uint8)]

    def pack(self, out_features: int, in_features: int) -> PackedWeight:
        """An empty weight in the kernel's format."""
        return PackedWeight(self._format, out_features, in_features, self._arch)

    def __call__(self, x: Tensor, weight: PackedWeight, out: Tensor) -> None:
        """``x [T, in]`` and ``out [T, out]``, fp32 with rows contiguous in themselves. Raises ``ValueError``."""
        if len(x):
            self._kernel((), *self.arguments(x, weight, out))

    def arguments(self, x: Tensor, weight: PackedWeight, out: Tensor) -> tuple[Tensor | int, ...]:
        """The kernel's own arguments for these. Raises ``ValueError`` where they do not fit it."""
        num_rows, in_features = x.shape
        is_contiguous = x.stride(1) == 1 and out.stride(1) == 1
        if in_features != weight.in_features or out.shape != (num_rows, weight.out_features) or not is_contiguous:
            expected = f"({num_rows}, {weight.in_features}) and ({num_rows}, {weight.out_features})"
            raise ValueError(f"x {tuple(x.shape)}, out {tuple(out.shape)}: expected {expected}, their rows contiguous")
        if weight.format != self._format or weight.arch != self._arch:
            raise ValueError(f"weights in {weight.format} for {weight.arch}, the kernel is {self._kernel.spec.name}")
        if num_rows > self._max_rows or in_features > self._max_in_features:
            raise ValueError(f"x {tuple(x.shape)}: made for at most {self._max_rows} x {self._max_in_features}")
        sizes = (out.stride(0), in_features, weight.out_features)
        pointers = (*self._workspace, weight.panels, weight.scale, weight.bias, out)
        return (x, x.stride(0), num_rows, *pointers, *sizes)
