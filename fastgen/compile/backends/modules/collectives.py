"""Operations over all ranks of a model: sums, gathered logits, and a norm over the heads of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fastgen.compile.backends.modules.stored import NormParameters
from fastgen.compile.capture.recording import library_call
from fastgen.compile.host.ranks import Ranks, share
from fastgen.compile.host.symmetric_memory import HALF_BYTES
from fastgen.compile.ops.ranks.reference import sum_parts

_UNIT = 16  # bytes; kernels move whole units through symmetric memory
# Writes the sum of ``parts [n, ...]`` to ``out [...]``, added in their order in fp32.
AddParts = Callable[[Tensor, Tensor], None]
# Replaces a contiguous ``x`` of at most ``HALF_BYTES`` bytes by its sum, in so many shots.
AddThroughMemory = Callable[[Tensor, int], None]
# The shots of messages of all sizes, where nothing is measured: one below 256 KiB.
SHOTS = {bits: 1 if bits <= 18 else 2 for bits in range(HALF_BYTES.bit_length() + 1)}


class AllReduce:
    """The sum of ``x [T, H]`` over ``num_ranks`` ranks, in place, which ``add`` adds in the order of the ranks.

    In one shot every rank gets the parts of all. In two each gets its share of all parts, and then the others' sums:
    fewer bytes for three ranks and more, but two exchanges. Messages of some sizes are added through symmetric memory,
    where ranks have some. All ways give the same bits.
    """

    # Rows up to which one shot is used: a step of so few rows waits for exchanges, not for bytes.
    ONE_SHOT_ROWS = 64

    def __init__(self, ranks: Ranks, num_ranks: int, add: AddParts | None = None):
        self._ranks, self._num_ranks, self._add = ranks, num_ranks, add or partial(library_call, sum_parts)
        self.through_memory: AddThroughMemory | None = None
        # In how many shots messages are added through memory, by the bit length of their bytes; 0 for none.
        self.shots: dict[int, int] = {}

    def __call__(self, x: Tensor) -> Tensor:
        return self.by(self.shots_for(x), x)

    def shots_for(self, x: Tensor) -> int:
        """Returns in how many shots ``x`` is added through symmetric memory; 0 if it is not."""
        return self.shots.get(x.nbytes.bit_length(), 0) if self.has_room(x) else 0

    def has_room(self, x: Tensor) -> bool:
        """Returns whether symmetric memory has room for ``x``."""
        return self.through_memory is not None and x.nbytes <= HALF_BYTES and x.nbytes % _UNIT == 0

    def by(self, shots: int, x: Tensor) -> Tensor:
        """Adds ``x`` in so many ``shots`` through symmetric memory, or with 0 by exchanges of the library."""
        if shots:
            assert self.through_memory is not None
            self.through_memory(x, shots)
            return x
        return self._by_library(x)

    def _by_library(self, x: Tensor) -> Tensor:
        count = self._num_ranks
        if count <= 2 or len(x) <= self.ONE_SHOT_ROWS or x.shape[1] % count:
            parts = x.new_empty(count, *x.shape)
            library_call(self._ranks.all_gather, x, parts)
            self._add(parts, x)
            return x
        shares = x.view(count, -1)
        parts, own = torch.empty_like(shares), torch.empty_like(shares[0])
        library_call(self._ranks.all_to_all, shares, parts)
        self._add(parts, own)
        library_call(self._ranks.all_gather, own, shares)
        return x


class Gather:
    """The columns ``x [R, n]`` of ``num_ranks`` ranks side by side in ``out [R, V]`` of rank 0. Ranks have the columns
    of :func:`share`, and messages that are equally long; the ``out`` of other ranks is left alone."""

    def __init__(self, ranks: Ranks, num_ranks: int):
        self._ranks, self._num_ranks = ranks, num_ranks

    def __call__(self, x: Tensor, out: Tensor) -> None:
        columns = [share(out.shape[1], index, self._num_ranks) for index in range(self._num_ranks)]
        most = max(end - first for first, end in columns)
        own = x
        if x.shape[1] < most:
            own = x.new_empty(len(x), most)  # the columns behind those of x are sent, and not read
            library_call(Tensor.copy_, own[:, : x.shape[1]], x)
        parts = x.new_empty(self._num_ranks, len(x), most)
        library_call(self._ranks.all_gather, own, parts)
        if self._ranks.index == 0:
            for part, (first, end) in zip(parts, columns, strict=True):
                library_call(Tensor.copy_, out[:, first:end], part[:, : end - first])


@dataclass(frozen=True)
class HeadsOfRank:
    """Columns ``first`` to ``end`` of a rank's ``qkv``, and the RMS norm over these columns of all ranks together."""

    first: int
    end: int
    eps: float
    offset: float
    parameters: NormParameters


class RankNorm(nn.Module):
    """RMS norms of queries and of keys over the heads of all ranks, in place: ``qkv [T, (N + 2K) D]``.

    Each rank sums the squares of its own features; sums over all ranks give the means. Where ranks hold the same KV
    head, each of its features counts equally often, so the mean is the same.
    """

    def __init__(self, all_reduce: Callable[[Tensor], Tensor], norms: Sequence[HeadsOfRank], num_ranks: int):
        super().__init__()
        self._all_reduce, self._norms, self._num_ranks = all_reduce, norms, num_ranks
        self.parameters_of_norms = nn.ModuleList(each.parameters for each in norms)

    def forward(self, qkv: Tensor) -> None:
        sums = qkv.new_empty(len(qkv), len(self._norms), dtype=torch.float32)
        for place, norm in enumerate(self._norms):
            wide = _wide(qkv[:, norm.first : norm.end])
            library_call(torch.mul, wide, wide, out=wide)
            library_call(torch.sum, wide, 1, out=sums[:, place])
        self._all_reduce(sums)
        for place, norm in enumerate(self._norms):
            x, factor = qkv[:, norm.first : norm.end], sums[:, place]
            library_call(torch.mul, factor, 1 / (self._num_ranks * x.shape[1]), out=factor)
            library_call(torch.add, factor, norm.eps, out=factor)
            library_call(torch.rsqrt, factor, out=factor)
            wide = _wide(x)
            library_call(torch.mul, wide, factor.unsqueeze(1), out=wide)
            weight = norm.parameters.weight
            if weight is not None and norm.offset:
                moved = torch.empty_like(weight, dtype=torch.float32)
                library_call(torch.add, weight, norm.offset, out=moved)
                library_call(torch.mul, wide, moved, out=wide)
                library_call(Tensor.copy_, x, wide)
            else:
                library_call(Tensor.copy_, x, wide)
                if weight is not None:
                    library_call(torch.mul, x, weight, out=x)


def _wide(x: Tensor) -> Tensor:
    """Returns a copy in fp32."""
    wide = x.new_empty(x.shape, dtype=torch.float32)
    library_call(Tensor.copy_, wide, x)
    return wide
