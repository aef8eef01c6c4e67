"""A rank of a process group on a CPU that adds through symmetric memory, by interpreted kernels.

``python -m tests.compile.symmetric_rank WHAT DIRECTORY INDEX COUNT DTYPE`` calls the function ``WHAT``, prints what it
found, and fails if a sum is wrong. Each rank is a process: Triton's interpreter runs one kernel of a process at a time.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

from fastgen.compile.backends import rank_sums
from fastgen.compile.backends.modules.collectives import SHOTS, AllReduce
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.capture.cuda_graph import GraphPool
from fastgen.compile.capture.recording import library_call
from fastgen.compile.host.group_ranks import GroupRanks, MeetingPoint, open_group
from fastgen.compile.host.symmetric_memory import HALF_BYTES
from fastgen.compile.ops.ranks.triton import SymmetricSumKernel, symmetric_sum_spec
from fastgen.compile.spec import torch_dtype

CPU = torch.device("cpu")
# Less than a program handles at a time, as much as all do, and more than that; the last has no whole blocks.
SIZES = (8, 1016, 1024, 4 * 1024 + 8, 32 * 1024, 70 * 1024 + 8)


class Rank:
    """Rank ``index`` of ``count``, and what it adds with."""

    def __init__(self, directory: Path, index: int, count: int, dtype: str):
        self.ranks: GroupRanks = open_group(MeetingPoint("gloo", directory / "meeting", "symmetric"), index, count, CPU)
        assert self.ranks.symmetric is not None
        self.memory, self.dtype = self.ranks.symmetric, torch_dtype(dtype)
        self.loader = KernelLoader(TritonBuilder("interpret"), cache=KernelCache(directory / f"cache{index}"))
        kernels = [self.loader.load(symmetric_sum_spec(count, dtype, shots)) for shots in (1, 2)]
        self.kernel = SymmetricSumKernel(kernels, self.memory, index)

    def parts(self, seed: int, *shape: int) -> list[Tensor]:
        """Returns each rank's part. Sums in another order than that of the ranks have other bits."""
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(shape, generator=generator) * 100.0**index for index in range(self.ranks.count)]
        return [each.to(self.dtype) for each in drawn]

    def expected(self, parts: list[Tensor]) -> Tensor:
        total = parts[0].float()
        for each in parts[1:]:
            total = total + each.float()
        if self.dtype == torch.bfloat16:  # Triton's interpreter cuts bits off where hardware rounds
            total = (total.view(torch.int32) & -(1 << 16)).view(torch.float32)
        return total.to(self.dtype)


def many_sums(rank: Rank) -> str:
    """Messages of all sizes in any order, in one shot or two, while ranks come early or late; counters wrap around."""
    same, own = random.Random(rank.ranks.count), random.Random(rank.ranks.index)
    start = torch.iinfo(torch.int32).max - 9
    rank.memory.epochs.fill_(start)
    signals(rank).fill_(start)
    rank.ranks.all_max(torch.zeros(1))
    for turn in range(12):
        size, shots = same.choice(SIZES), same.choice((1, 2))
        parts = rank.parts(turn, size)
        x = torch.full((size + 8,), -7.0, dtype=rank.dtype)
        x[:size] = parts[rank.ranks.index]
        time.sleep(own.choice((0, 0, 0.02)))
        rank.kernel(x[:size], shots)
        assert torch.equal(x[:size], rank.expected(parts)), (turn, size, shots)
        assert (x[size:] == -7).all(), "it writes nothing behind its numbers"
    assert (rank.memory.epochs < 0).all()
    return "added"


def signals(rank: Rank) -> Tensor:
    """The signals that others give this rank."""
    buffers: Tensor = rank.memory._owner.view(rank.ranks.count, -1)
    return buffers[rank.ranks.index, 2 * HALF_BYTES :].view(torch.int32)


def by_size(rank: Rank) -> str:
    """Messages that symmetric memory has no room for are added by the library."""
    sums = AllReduce(rank.ranks, rank.ranks.count)
    sums.through_memory, sums.shots = rank.kernel, dict(SHOTS)
    ways: list[int] = []
    for shape in ((1, 8), (3, 8), (5, 1), (65, 2048), (HALF_BYTES // 8192 + 1, 8192 // rank.dtype.itemsize)):
        parts = rank.parts(len(ways), *shape)
        x = parts[rank.ranks.index].clone()
        ways.append(sums.shots_for(x))
        sums(x)
        total = rank.expected(parts)
        if not ways[-1] and rank.dtype == torch.bfloat16:  # torch rounds
            total = sum((each.float() for each in parts[1:]), parts[0].float()).to(rank.dtype)
        assert torch.equal(x, total), shape
    return str(ways)


def trial(rank: Rank) -> str:
    """All ranks choose the same, and no way that adds wrongly."""
    sums = AllReduce(rank.ranks, rank.ranks.count)
    wrong = 8 * rank.dtype.itemsize  # bytes

    def add(x: Tensor, shots: int) -> None:
        rank.kernel(x, shots)
        if x.nbytes == wrong and rank.ranks.index == 1:
            library_call(torch.add, x, 1, out=x)

    sums.through_memory = add
    pool = GraphPool(CPU, rank.loader)
    rank_sums._NUM_SUMS = rank_sums._NUM_TURNS = 1
    rank_sums.choose_shots(sums, rank.ranks, [1, 2, 3, 1 << 20], 8, torch.empty(0, dtype=rank.dtype), pool)
    assert sums.shots[wrong.bit_length()] == 0
    return str(sums.shots)


def ending(rank: Rank) -> str:
    """A rank waits for another that does not come, and stops waiting when its memory ends."""
    x = torch.ones(8, dtype=rank.dtype)
    if rank.ranks.index == 0:
        threading.Timer(0.5, rank.memory.end).start()
        rank.kernel(x, 1)
    rank.ranks.all_max(torch.zeros(1))  # the others wait here
    return "ended"


if __name__ == "__main__":
    what, directory, index, count, dtype = sys.argv[1:]
    torch.set_num_threads(1)
    print(globals()[what](Rank(Path(directory), int(index), int(count), dtype)))
