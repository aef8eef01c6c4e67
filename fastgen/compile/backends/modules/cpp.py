"""The ops of a model by C++ kernels: weights packed for one instruction set, activations in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastgen.compile.backends.modules.stored import StoredTable
from fastgen.compile.capture.recording import library_call
from fastgen.compile.host.ranks import Ranks
from fastgen.compile.ops.activation.cpp import ActivationKernel
from fastgen.compile.ops.embedding.cpp import EmbeddingKernel
from fastgen.compile.ops.experts.cpp import CombineKernel, GroupedLinearKernel, RouteKernel, SortedChoices, SortKernel
from fastgen.compile.ops.linear.cpp import LinearKernel
from fastgen.compile.ops.ranks.cpp import RowMaximaKernel, SumProductsKernel
from fastgen.compile.ops.softcap.cpp import SoftcapKernel
from fastgen.compile.weights.packed import PackedWeight
from fastgen.compile.weights.quantized import QuantizedWeight
from fastgen.compile.weights.rows import PackedHeads, PackedRows, Rows


class PlainTable(StoredTable):
    """A table ``weight [rows, size]`` that is only looked up."""

    @property
    def stored(self) -> Tensor:
        """Returns the table as kernels read it."""
        assert not isinstance(self.weight, QuantizedWeight)
        return self.weight


class PackedTable(nn.Module):
    """A table that a head multiplies by, packed for ``kernel``."""

    # Names the row of the memory ledger that counts its weights.
    weights = "table"

    def __init__(self, kernel: LinearKernel, num_rows: int, size: int):
        super().__init__()
        self.kernel, self.num_rows, self.size = kernel, num_rows, size
        self.packed = kernel.pack(num_rows, size)

    @property
    def slot(self) -> Rows:
        """Returns the place of the checkpoint's tensor."""
        return PackedRows(self.packed, 0, (self.num_rows, self.size))

    @property
    def stored(self) -> PackedWeight:
        """Returns the table as kernels read it."""
        return self.packed


Table = PlainTable | PackedTable


class Positions(nn.Module):
    """Adds rows of ``table`` by position, in place."""

    def __init__(self, table: PlainTable, kernel: EmbeddingKernel):
        super().__init__()
        self.table = table
        self._kernel = kernel

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        self._kernel(self.table.stored, x, positions)
        return x


class Embedding(nn.Module):
    """Looks up tokens and scales them, then adds ``positions`` if there are some."""

    def __init__(self, tokens: Table, kernel: EmbeddingKernel, positions: Positions | None):
        super().__init__()
        self.tokens, self.positions = tokens, positions
        self._kernel = kernel

    def forward(self, input_ids: Tensor, token_source: Tensor, sampled_ids: Tensor, positions: Tensor) -> Tensor:
        x = torch.empty(len(input_ids), self.tokens.size, dtype=torch.float32, device=input_ids.device)
        self._kernel(self.tokens.stored, x, input_ids, token_source, sampled_ids)
        return x if self.positions is None else self.positions(x, positions)


class Linear(nn.Module):
    """``x Wᵀ + b`` of stacked parts, packed for ``kernel``. ``ranks`` are those that split the inputs. If they sum
    products, it is ``over_ranks``."""

    # Names the row of the memory ledger that counts its weights.
    weights = "matrix"

    def __init__(
        self,
        kernel: LinearKernel,
        in_features: int,
        out_features: Sequence[int],
        *,
        ranks: Ranks | None = None,
        over_ranks: OverRanks | None = None,
    ):
        super().__init__()
        self.out_features, self.total = list(out_features), sum(out_features)
        self.packed = kernel.pack(self.total, in_features)
        self._kernel, self._ranks, self._over_ranks = kernel, ranks, over_ranks

    def part(self, index: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of part ``index``: its weight rows ``[out, in]`` and its bias ``[out]``."""
        return _part(self.packed, self.out_features, index, self._ranks)

    def forward(self, x: Tensor) -> Tensor:
        if self._over_ranks is not None:
            largest = self._over_ranks.row_maxima(x)
            return self._over_ranks.sum_products(self._kernel.products(x, largest, self.packed), largest, self.packed)
        out = torch.empty(len(x), self.total, dtype=torch.float32, device=x.device)  # x may be prepared rows
        self._kernel(x, self.packed, out)
        return out


class OverRanks(NamedTuple):
    """Kernels that run before and after the products of a layer of which each rank has some inputs."""

    row_maxima: RowMaximaKernel
    sum_products: SumProductsKernel


def _part(
    packed: PackedWeight, out_features: Sequence[int], index: int, ranks: Ranks | None
) -> tuple[PackedRows, Tensor]:
    start, count = sum(out_features[:index]), out_features[index]
    return PackedRows(packed, start, (count, packed.in_features), ranks), packed.bias[start : start + count]


class HeadMaps(nn.Module):
    """Maps each head by a matrix of its own: ``x [T, N, rank] -> [T, N, out]``, or if ``transposed``
    ``x [T, N, out] -> [T, N, rank]``. The checkpoint's ``[N * out, rank]`` is packed for ``kernel``.
    """

    # Names the row of the memory ledger that counts its weights.
    weights = "matrix"

    def __init__(self, kernel: LinearKernel, num_heads: int, shape: tuple[int, int], *, transposed: bool):
        super().__init__()
        self.num_heads, self.transposed = num_heads, transposed
        sizes = (shape[0] // num_heads, shape[1])
        self.packed = kernel.pack(*(sizes[::-1] if transposed else sizes), num_groups=num_heads)
        self.out_features = self.packed.out_features
        self._kernel = kernel

    @property
    def slot(self) -> Rows:
        """Returns the place of the checkpoint's tensor."""
        return PackedHeads([self.packed.group(head) for head in range(self.num_heads)], self.transposed)

    def into(self, x: Tensor, out: Tensor) -> None:
        """Maps ``x [T, N, in]`` into ``out [T, N, out]``; each row of ``out`` may lie apart."""
        self._kernel(x, self.packed, out)


class Router(nn.Module):
    """Chooses experts by the logits of a linear layer."""

    def __init__(self, linear: Linear, kernel: RouteKernel, correction: nn.Parameter | None):
        super().__init__()
        self.linear, self.correction = linear, correction
        self._kernel = kernel

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernel(self.linear(x), self.correction)


class Groups(nn.Module):
    """A stacked linear layer for each expert, packed for ``kernel``; see :class:`Linear` for ``ranks``."""

    # Names the row of the memory ledger that counts its weights.
    weights = "matrix"

    def __init__(
        self,
        kernel: GroupedLinearKernel,
        num_experts: int,
        in_features: int,
        out_features: Sequence[int],
        *,
        ranks: Ranks | None = None,
        over_ranks: OverRanks | None = None,
    ):
        super().__init__()
        self.out_features = list(out_features)
        self.packed = kernel.pack(sum(out_features), in_features, num_groups=num_experts)
        self._kernel, self._ranks, self._over_ranks = kernel, ranks, over_ranks

    def part(self, expert: int, index: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of part ``index`` of one expert: its weight rows ``[out, in]`` and its bias ``[out]``."""
        return _part(self.packed.group(expert), self.out_features, index, self._ranks)

    def forward(self, x: Tensor, choices: SortedChoices, experts: Tensor) -> Tensor:
        """Returns the outputs of ``choices`` of ``experts [T, k]``; see :meth:`GroupedLinearKernel.route`."""
        if self._over_ranks is None:
            return self._kernel.route(x, choices, self.packed)
        largest = self._over_ranks.row_maxima(x)
        products = self._kernel.route(x, choices, self.packed, largest)
        return self._over_ranks.sum_products(products, largest, self.packed, experts)


class Experts(nn.Module):
    """Computes the chosen experts. Choices are sorted by expert; rows stay where they are, and layers read and write
    them in the sorted order.
    """

    def __init__(
        self,
        inward: Groups,
        activation: ActivationKernel,
        down: Groups,
        sort: SortKernel,
        combine: CombineKernel,
    ):
        super().__init__()
        self.inward, self.activation, self.down = inward, activation, down
        self._sort, self._combine = sort, combine

    def inward_part(self, expert: int, index: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of part ``index`` of an expert's first layer."""
        return self.inward.part(expert, index)

    def down_part(self, expert: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of an expert's second layer."""
        return self.down.part(expert, 0)

    def forward(
        self, x: Tensor, experts: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        return self._combine(self._outputs(x, experts), weights, shared, gate)

    def _outputs(self, x: Tensor, experts: Tensor) -> Tensor:
        """Returns the output of each choice, ``[T * k, H]``; choices are numbered ``token * k + place``."""
        choices = self._sort(experts)
        inner = self.activation(self.inward(x, choices, experts))
        out: Tensor = self.down(inner, choices, experts)
        return out


class Head(nn.Module):
    """``softcap(scale * (hidden Wᵀ + bias))``; the bias lies with the packed weight."""

    def __init__(self, table: PackedTable, *, scale: float | None, softcap: SoftcapKernel | None):
        super().__init__()
        self.table, self.scale = table, scale
        self._softcap = softcap

    @property
    def bias_slot(self) -> Tensor | None:
        """Returns the place of the checkpoint's bias."""
        return self.table.packed.bias[: self.table.num_rows]

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = hidden.new_empty(len(hidden), self.table.num_rows, dtype=torch.float32)
        self.table.kernel(hidden, self.table.packed, out)
        if self.scale is not None:
            library_call(torch.mul, out, self.scale, out=out)
        return out if self._softcap is None else self._softcap(out)
