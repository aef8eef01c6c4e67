"""Linear layers, several of the checkpoint's stacked into one matrix where they read the same input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fastgen.compile.ops.linear.cpp import LinearKernel
from fastgen.compile.ops.linear.reference import linear, logits
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.compile.weights.packed import PackedWeight
from fastgen.compile.weights.quantized import QuantizedWeight, quantized

# Computes ``out = x Wᵀ + b``, given ``x, weight, bias, out``.
PlainLinear = Callable[[Tensor, Tensor | QuantizedWeight, Tensor | None, Tensor], None]


class Rows(Protocol):
    """What is written by rows ``[out, in]``, and kept in another way than a tensor's."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype:
        """In which what is written must be finite."""

    def copy_(self, rows: Tensor) -> None: ...

    def holds(self, rows: Tensor) -> bool:
        """Whether these rows, rounded and packed, are what is there."""


@dataclass(frozen=True)
class PackedRows:
    """Rows ``start .. start + shape[0] - 1`` of a packed weight, written as ``[out, in]``."""

    weight: PackedWeight
    start: int
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        """In which what is written must be finite."""
        return torch.float16 if self.weight.format == "fp16" else torch.float32

    def copy_(self, rows: Tensor) -> None:
        self.weight.write(self.start, rows)

    def holds(self, rows: Tensor) -> bool:
        """Whether these rows, packed, are what is there."""
        there = self.weight.rows(torch.arange(self.start, self.start + len(rows)))
        packed = PackedWeight(self.weight.format, *self.shape, self.weight.arch)
        packed.write(0, rows)
        return torch.equal(there, packed.rows(torch.arange(len(rows))))


@dataclass(frozen=True)
class QuantizedRows:
    """The same of a weight in few bits, in a model of ``dtype``."""

    weight: QuantizedWeight
    start: int
    shape: tuple[int, int]
    dtype: torch.dtype

    def copy_(self, rows: Tensor) -> None:
        self.weight.write(self.start, rows)

    def holds(self, rows: Tensor) -> bool:
        """Whether these rows, rounded, are what is there."""
        place, other = slice(self.start, self.start + self.shape[0]), quantized(rows, self.weight.format)
        codes, scale = self.weight.codes[place].to(rows.device), self.weight.scale[place].to(rows.device)
        return torch.equal(codes, other.codes) and torch.equal(scale, other.scale)


@dataclass(frozen=True)
class PackedHeads:
    """A packed weight for each head, written as one ``[heads * out, in]``; ``turned``, each holds it transposed."""

    heads: Sequence[PackedWeight]
    turned: bool

    @property
    def shape(self) -> tuple[int, int]:
        first = self.heads[0]
        rows, width = (
            (first.in_features, first.out_features) if self.turned else (first.out_features, first.in_features)
        )
        return len(self.heads) * rows, width

    @property
    def dtype(self) -> torch.dtype:
        """In which what is written must be finite."""
        return self._parts()[0].dtype

    def copy_(self, rows: Tensor) -> None:
        for part, its_rows in zip(self._parts(), self._cut(rows), strict=True):
            part.copy_(its_rows)

    def holds(self, rows: Tensor) -> bool:
        """Whether these rows, packed, are what is there."""
        return all(part.holds(its_rows) for part, its_rows in zip(self._parts(), self._cut(rows), strict=True))

    def _parts(self) -> list[PackedRows]:
        return [PackedRows(head, 0, (head.out_features, head.in_features)) for head in self.heads]

    def _cut(self, rows: Tensor) -> list[Tensor]:
        parts = rows.view(len(self.heads), -1, rows.shape[1])
        return list(parts.transpose(1, 2).contiguous() if self.turned else parts)


def stored_weight(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightOnlyFormat | None,
) -> nn.Parameter | QuantizedWeight:
    """A weight ``[out, in]`` that nobody has written yet, in ``dtype`` unless there is a ``weight_format``."""
    if weight_format is not None:
        return QuantizedWeight(weight_format, out_features, in_features, device)
    return nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False)


def weight_rows(
    weight: nn.Parameter | QuantizedWeight, start: int, num_rows: int, dtype: torch.dtype
) -> Tensor | QuantizedRows:
    """Where ``num_rows`` rows of it from ``start`` on are written, in a model of ``dtype``."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedRows(weight, start, (num_rows, weight.in_features), dtype)
    return weight.data[start : start + num_rows]


class Linear(nn.Module):
    """``y = x Wᵀ + b`` with the rows of several projections stacked: ``x [T, in] -> [T, sum(out_features)]``.

    ``biased[i]`` says whether part ``i`` has a bias; where only some have one, the others' entries stay zero. With a
    ``kernel`` the weight is packed for it, in its format, and there is no other copy; a ``plain_kernel`` reads it as it
    is stored: in ``dtype``, or in few bits where there is a ``weight_format``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        biased: Sequence[bool],
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernel: LinearKernel | None = None,
        plain_kernel: PlainLinear | None = None,
        weight_format: WeightOnlyFormat | None = None,
    ):
        super().__init__()
        self.out_features, self.kernel, self.plain_kernel = list(out_features), kernel, plain_kernel
        self.dtype = dtype
        total = sum(out_features)
        if kernel is not None:
            self.packed = kernel.pack(total, in_features)
            return
        self.weight = stored_weight(total, in_features, dtype, device, weight_format)
        self.bias = (
            nn.Parameter(torch.zeros(total, dtype=dtype, device=device), requires_grad=False) if any(biased) else None
        )

    def part(self, index: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Where part ``index`` goes: its weight rows ``[out, in]`` and its bias ``[out]``."""
        start = sum(self.out_features[:index])
        rows = slice(start, start + self.out_features[index])
        if self.kernel is not None:
            shape = (self.out_features[index], self.packed.in_features)
            return PackedRows(self.packed, start, shape), self.packed.bias[rows]
        bias = None if self.bias is None else self.bias.data[rows]
        return weight_rows(self.weight, start, self.out_features[index], self.dtype), bias

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is None and self.plain_kernel is None:
            return linear(x, self.weight, self.bias)
        return self._by_kernel(x, x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """The same in fp32; a kernel must be one that computes so."""
        if self.kernel is None and self.plain_kernel is None:
            return logits(x, self.weight, self.bias)
        return self._by_kernel(x, torch.float32)

    def _by_kernel(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        out = x.new_empty(len(x), sum(self.out_features), dtype=dtype)
        if self.kernel is not None:
            self.kernel(x, self.packed, out)
        elif self.plain_kernel is not None:
            self.plain_kernel(x, self.weight, self.bias, out)
        return out
