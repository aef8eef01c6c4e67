"""Destinations for rows of a checkpoint's weights: tensors as they are, or weights that are kept in another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fastgen.compile.host.ranks import Ranks
from fastgen.compile.weights.formats import (
    SCALED_BY_GROUP,
    SCALED_BY_OUTPUT,
    WeightOnlyFormat,
    group_scales,
    largest_of,
)
from fastgen.compile.weights.packed import FLOATS, PackedWeight
from fastgen.compile.weights.quantized import QuantizedWeight, quantized


class Rows(Protocol):
    """A weight that is written by rows ``[out, in]`` and kept in another way than a tensor."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def limit(self, numbers: Tensor) -> str | None:
        """Returns what cannot hold rows with these finite ``numbers``, and what to do; ``None`` where they fit."""

    def copy_(self, rows: Tensor) -> None: ...

    def holds(self, rows: Tensor) -> bool:
        """Returns whether the weight holds exactly these rows, rounded and packed."""


def limit_of(numbers: Tensor, dtype: torch.dtype, weight_format: str = "") -> str | None:
    """Returns what cannot hold these finite ``numbers`` in ``dtype`` or in ``weight_format``, and what to do; ``None``
    where they fit.
    """
    if not numbers.to(dtype).isfinite().all():
        return f"{dtype} cannot hold; load with dtype='float32' or 'bfloat16'"
    if weight_format in SCALED_BY_GROUP and not group_scales(numbers).isfinite().all():
        return f"the scales of {weight_format!r}, in float16, cannot hold; load with another quantize="
    return None


def _largest_of_all(rows: Tensor, weight_format: str, ranks: Ranks | None) -> Tensor | None:
    """Returns the largest magnitude of each row over all ``ranks``, each of which has some of its inputs; ``None`` in a
    format that has no scales for it, or where there are no ``ranks``."""
    if ranks is None or weight_format not in SCALED_BY_OUTPUT:
        return None
    largest = largest_of(rows)
    ranks.all_max(largest)
    return largest


@dataclass(frozen=True)
class PackedRows:
    """Rows ``start .. start + shape[0] - 1`` of a packed weight, written as ``[out, in]``. If ``ranks`` split the
    inputs, they write at the same time, and scales are those of whole rows."""

    weight: PackedWeight
    start: int
    shape: tuple[int, int]
    ranks: Ranks | None = None

    def limit(self, numbers: Tensor) -> str | None:
        """Returns what cannot hold rows with these finite ``numbers``, and what to do; ``None`` where they fit."""
        return limit_of(numbers, FLOATS.get(self.weight.format, torch.float32), self.weight.format)

    def copy_(self, rows: Tensor) -> None:
        self.weight.write(self.start, rows, _largest_of_all(rows, self.weight.format, self.ranks))

    def holds(self, rows: Tensor) -> bool:
        """Returns whether the weight holds exactly these rows, packed."""
        there = self.weight.rows(torch.arange(self.start, self.start + len(rows)))
        packed = PackedWeight(self.weight.format, *self.shape, self.weight.arch)
        packed.write(0, rows, _largest_of_all(rows, self.weight.format, self.ranks))
        return torch.equal(there, packed.rows(torch.arange(len(rows))))


@dataclass(frozen=True)
class QuantizedRows:
    """Rows ``start .. start + shape[0] - 1`` of a quantized weight, written as ``[out, in]`` in a model of
    ``dtype``. If ``ranks`` split the inputs, they write at the same time, and scales are those of whole rows."""

    weight: QuantizedWeight
    start: int
    shape: tuple[int, int]
    dtype: torch.dtype
    ranks: Ranks | None = None

    def limit(self, numbers: Tensor) -> str | None:
        """Returns what cannot hold rows with these finite ``numbers``, and what to do; ``None`` where they fit."""
        return limit_of(numbers, self.dtype, self.weight.format)

    def copy_(self, rows: Tensor) -> None:
        self.weight.write(self.start, rows, _largest_of_all(rows, self.weight.format, self.ranks))

    def holds(self, rows: Tensor) -> bool:
        """Returns whether the weight holds exactly these rows, rounded."""
        largest = _largest_of_all(rows, self.weight.format, self.ranks)
        place, other = slice(self.start, self.start + self.shape[0]), quantized(rows, self.weight.format, largest)
        codes, scale = self.weight.codes[place].to(rows.device), self.weight.scale[place].to(rows.device)
        return torch.equal(codes, other.codes) and torch.equal(scale, other.scale)


@dataclass(frozen=True)
class PackedHeads:
    """A packed weight for each head, written as one ``[heads * out, in]``; ``transposed`` ones hold
    their own part transposed."""

    heads: Sequence[PackedWeight]
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        first = self.heads[0]
        rows, width = (
            (first.in_features, first.out_features) if self.transposed else (first.out_features, first.in_features)
        )
        return len(self.heads) * rows, width

    def limit(self, numbers: Tensor) -> str | None:
        """Returns what cannot hold rows with these finite ``numbers``, and what to do; ``None`` where they fit."""
        return self._parts()[0].limit(numbers)

    def copy_(self, rows: Tensor) -> None:
        for part, its_rows in zip(self._parts(), self._cut(rows), strict=True):
            part.copy_(its_rows)

    def holds(self, rows: Tensor) -> bool:
        """Returns whether the weight holds exactly these rows, packed."""
        return all(part.holds(its_rows) for part, its_rows in zip(self._parts(), self._cut(rows), strict=True))

    def _parts(self) -> list[PackedRows]:
        return [PackedRows(head, 0, (head.out_features, head.in_features)) for head in self.heads]

    def _cut(self, rows: Tensor) -> list[Tensor]:
        parts = rows.view(len(self.heads), -1, rows.shape[1])
        return list(parts.transpose(1, 2).contiguous() if self.transposed else parts)


def empty_weight(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightOnlyFormat | None,
) -> nn.Parameter | QuantizedWeight:
    """Returns an empty weight ``[out, in]``, in ``dtype`` unless there is a ``weight_format``."""
    if weight_format is not None:
        return QuantizedWeight(weight_format, out_features, in_features, device)
    return nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False)


def weight_rows(
    weight: nn.Parameter | QuantizedWeight, start: int, num_rows: int, dtype: torch.dtype, ranks: Ranks | None = None
) -> Tensor | QuantizedRows:
    """Returns the place of ``num_rows`` rows of ``weight`` from ``start`` on, in a model of ``dtype``; ``ranks`` are
    those that split its inputs."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedRows(weight, start, (num_rows, weight.in_features), dtype, ranks)
    return weight.data[start : start + num_rows]
