"""Weights stored as rows ``[out, in]``, plain or quantized: those of the reference and of Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastgen.compile.host.ranks import Ranks
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.compile.weights.quantized import QuantizedWeight
from fastgen.compile.weights.rows import Rows, empty_weight, weight_rows


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Returns a parameter of ``shape`` that is still to be written."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def zero_bias(*shape: int, biased: Sequence[bool], dtype: torch.dtype, device: torch.device) -> nn.Parameter | None:
    """Returns a bias for parts of which some are ``biased``; the entries of the others stay zero."""
    if not any(biased):
        return None
    return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)


class StoredTable(nn.Module):
    """``weight [rows, size]``, in ``dtype`` unless there is a ``weight_format``."""

    # Names the row of the memory ledger that counts its weights.
    weights = "table"

    def __init__(
        self,
        num_rows: int,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightOnlyFormat | None = None,
    ):
        super().__init__()
        self.num_rows, self.size, self.dtype = num_rows, size, dtype
        self.weight = empty_weight(num_rows, size, dtype, device, weight_format)

    @property
    def slot(self) -> Tensor | Rows:
        """Returns the place of the checkpoint's tensor."""
        return weight_rows(self.weight, 0, self.num_rows, self.dtype)

    @property
    def weight_format(self) -> WeightOnlyFormat | None:
        return self.weight.format if isinstance(self.weight, QuantizedWeight) else None


class StoredLinear(nn.Module):
    """The stacked weight ``[sum of out, in]`` of several linear layers, in ``dtype`` unless there is a
    ``weight_format``, and their bias if any has one. ``ranks`` are those that split the inputs.
    """

    # Names the row of the memory ledger that counts its weights.
    weights = "matrix"

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        biased: Sequence[bool],
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightOnlyFormat | None = None,
        ranks: Ranks | None = None,
    ):
        super().__init__()
        self.out_features, self.dtype, self.total = list(out_features), dtype, sum(out_features)
        self._ranks = ranks
        self.weight = empty_weight(self.total, in_features, dtype, device, weight_format)
        self.bias = zero_bias(self.total, biased=biased, dtype=dtype, device=device)

    def part(self, index: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of part ``index``: its weight rows ``[out, in]`` and its bias ``[out]``."""
        start = sum(self.out_features[:index])
        bias = None if self.bias is None else self.bias.data[start : start + self.out_features[index]]
        return weight_rows(self.weight, start, self.out_features[index], self.dtype, self._ranks), bias


class StoredGroups(nn.Module):
    """A stacked linear layer for each expert: ``weight [E, sum of out, in]``, and a bias if any part has one."""

    # Names the row of the memory ledger that counts its weights.
    weights = "matrix"

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: Sequence[int],
        biased: Sequence[bool],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.num_experts, self.out_features, self.total = num_experts, list(out_features), sum(out_features)
        self.weight = empty_parameter(num_experts, self.total, in_features, dtype=dtype, device=device)
        self.bias = zero_bias(num_experts, self.total, biased=biased, dtype=dtype, device=device)

    def part(self, expert: int, index: int) -> tuple[Tensor, Tensor | None]:
        """Returns the place of part ``index`` of one expert: its weight rows ``[out, in]`` and its bias ``[out]``."""
        start = sum(self.out_features[:index])
        rows = slice(start, start + self.out_features[index])
        return self.weight.data[expert, rows], None if self.bias is None else self.bias.data[expert, rows]


class StoredHeadMaps(nn.Module):
    """Maps each head by a matrix of its own: ``x [T, N, rank] -> [T, N, out]``, or if ``transposed``
    ``x [T, N, out] -> [T, N, rank]``. The weight is the checkpoint's ``[N * out, rank]``.
    """

    # Names the row of the memory ledger that counts its weights.
    weights = "matrix"

    def __init__(
        self, num_heads: int, shape: tuple[int, int], *, transposed: bool, dtype: torch.dtype, device: torch.device
    ):
        super().__init__()
        self.num_heads, self.transposed = num_heads, transposed
        self.out_features = shape[1] if transposed else shape[0] // num_heads
        self.weight = empty_parameter(*shape, dtype=dtype, device=device)

    @property
    def slot(self) -> Tensor:
        """Returns the place of the checkpoint's tensor."""
        return self.weight.data

    def maps(self) -> Tensor:
        """Returns the maps ``[N, out, in]``."""
        weight = self.weight.view(self.num_heads, -1, self.weight.shape[1])
        return weight.transpose(1, 2) if self.transposed else weight


class NormParameters(nn.Module):
    """``weight`` and ``bias`` of ``shape``, where a norm has them."""

    def __init__(self, shape: Sequence[int], *, weight: bool, bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = empty_parameter(*shape, dtype=dtype, device=device) if weight else None
        self.bias = empty_parameter(*shape, dtype=dtype, device=device) if bias else None
