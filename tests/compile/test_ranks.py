"""Sums and gathers through memory that ranks share, by torch and by C++ kernels; and a rank that is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.rank_memory import RankMemory, SharedRanks
from fastgen.compile.host.ranks import share
from fastgen.compile.ops.ranks.cpp import AllReduceKernel, GatherKernel, all_reduce_spec, gather_columns_spec
from fastgen.errors import RankError
from tests.compile.arches import in_each_width

T = TypeVar("T")

ARCHES = CPP_ARCHES[CPP_ARCHES.index(cpp_arch(device.current("cpu"))) :]
COUNTS = (1, 2, 3, 5)
AREA_BYTES = 4096


def of_all(memory: RankMemory, call: Callable[[SharedRanks], T], timeout_s: float = 30.0) -> list[T]:
    """What ``call`` returns on each rank; each is a thread."""
    with ThreadPoolExecutor(memory.count) as pool:
        return list(pool.map(call, [SharedRanks(memory, index, timeout_s) for index in range(memory.count)]))


def parts(count: int, *shape: int) -> list[Tensor]:
    return list(torch.randn(count, *shape, generator=torch.Generator().manual_seed(count)))


def in_order(given: list[Tensor]) -> Tensor:
    total = given[0].float()
    for each in given[1:]:
        total = total + each.float()
    return total.to(given[0].dtype)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_sum_in_their_order(count: int, dtype: torch.dtype) -> None:
    memory = RankMemory(count, AREA_BYTES)
    for shape in ((1, 1), (3, 7), (70, 33)):  # the last takes several exchanges
        given = [each.to(dtype) for each in parts(count, *shape)]

        def reduce(ranks: SharedRanks, given: list[Tensor] = given) -> Tensor:
            x = given[ranks.index].clone()
            ranks.all_reduce(x)
            return x

        for found in of_all(memory, reduce):
            assert torch.equal(found, in_order(given))


@pytest.mark.parametrize("arch", in_each_width(ARCHES))
def test_a_kernel_sums_to_the_same_bits(arch: str) -> None:
    kernel = KernelLoader(CppBuilder(arch)).load(all_reduce_spec(arch))
    for count in COUNTS:
        memory = RankMemory(count, AREA_BYTES)
        for shape in ((1, 1), (3, 7), (70, 33)):
            given = parts(count, *shape)

            def reduce(ranks: SharedRanks, given: list[Tensor] = given) -> Tensor:
                return AllReduceKernel(kernel, ranks)(given[ranks.index].clone())

            for found in of_all(memory, reduce):
                assert torch.equal(found, in_order(given))


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_rank_0_gets_the_columns_of_all(count: int, by_kernel: bool) -> None:
    kernel = KernelLoader(CppBuilder("portable")).load(gather_columns_spec())
    memory = RankMemory(count, AREA_BYTES)
    for num_rows, num_columns in ((1, count), (2, 61), (40, 134)):
        (whole,) = parts(1, num_rows, num_columns)

        def gather(ranks: SharedRanks, whole: Tensor = whole) -> Tensor:
            own, out = whole[:, slice(*share(whole.shape[1], ranks.index, ranks.count))], torch.zeros_like(whole)
            call = GatherKernel(kernel, ranks) if by_kernel else ranks.gather
            call(own.contiguous(), out)
            return out

        assert torch.equal(of_all(memory, gather)[0], whole)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_rank_that_does_not_come_ends_the_wait_of_the_others(by_kernel: bool) -> None:
    kernel = KernelLoader(CppBuilder("portable")).load(all_reduce_spec("portable"))
    memory = RankMemory(3, AREA_BYTES)

    def reduce(ranks: SharedRanks) -> None:
        if ranks.index == 1:
            return
        call = AllReduceKernel(kernel, ranks) if by_kernel else ranks.all_reduce
        call(torch.ones(1, 1))
        ranks.memory.check()

    with pytest.raises(RankError, match="rank 1 of 3 did not come"):
        of_all(memory, reduce, timeout_s=0.2)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_the_end_of_the_ranks_ends_every_wait(by_kernel: bool) -> None:
    kernel = KernelLoader(CppBuilder("portable")).load(all_reduce_spec("portable"))
    memory = RankMemory(2, AREA_BYTES)

    def reduce() -> None:
        ranks = SharedRanks(memory, 0, timeout_s=600.0)
        call = AllReduceKernel(kernel, ranks) if by_kernel else ranks.all_reduce
        call(torch.ones(1, 1))
        memory.check()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reduce)
        while memory.begin(0) < 2:  # it has not come to the wait
            time.sleep(0.001)
        memory.end()
        with pytest.raises(RankError, match="the ranks of this model have ended"):
            waiting.result(timeout=60)
