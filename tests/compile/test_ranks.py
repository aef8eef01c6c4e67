"""Sums and gathers through memory that ranks share, by torch and by C++ kernels; and a rank that is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from fastgen.compile.backends.modules.collectives import AllReduce, Gather
from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.rank_memory import RankMemory, SharedRanks
from fastgen.compile.host.ranks import share
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.experts.cpp import GroupedLinearKernel, SortKernel, sort_spec
from fastgen.compile.ops.linear.cpp import LinearKernel, linear_spec
from fastgen.compile.ops.ranks.cpp import (
    AllReduceKernel,
    GatherKernel,
    RowMaximaKernel,
    SumProductsKernel,
    all_reduce_spec,
    gather_columns_spec,
    row_maxima_spec,
    sum_products_spec,
)
from fastgen.compile.weights.rows import PackedRows
from fastgen.errors import RankError
from tests.compile.arches import HERE, in_each_width
from tests.fast import cases

T = TypeVar("T")

ARCHES = CPP_ARCHES[CPP_ARCHES.index(cpp_arch(device.current("cpu"))) :]
COUNTS = (1, 2, 3, 5)
AREA_BYTES = 4096


def of_all(memory: RankMemory, call: Callable[[SharedRanks], T], timeout_s: float = 30.0) -> list[T]:
    """Returns the results of ``call`` on all ranks; each rank is a thread."""
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
            return AllReduce(ranks, count)(x)

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


@pytest.mark.parametrize("count", COUNTS)
def test_ranks_find_the_largest_of_all(count: int) -> None:
    memory = RankMemory(count, AREA_BYTES)
    for size in (1, 3000):  # the second takes several exchanges
        given = parts(count, size)

        def largest(ranks: SharedRanks, given: list[Tensor] = given) -> Tensor:
            x = given[ranks.index].clone()
            ranks.all_max(x)
            return x

        for found in of_all(memory, largest):
            assert torch.equal(found, torch.stack(given).amax(0))


def test_maxima_of_rows_are_those_of_all_inputs() -> None:
    kernel = KernelLoader(CppBuilder("portable")).load(row_maxima_spec("portable"))
    memory = RankMemory(3, AREA_BYTES)
    x = parts(3, 2000, 17)
    x[1][5, 3], x[2][6, 0], x[0][7] = float("nan"), float("-inf"), 0.0

    def maxima(ranks: SharedRanks) -> Tensor:
        padded = torch.cat([x[ranks.index], torch.full((len(x[0]), 2), 1e9)], dim=1)
        return RowMaximaKernel(kernel, ranks)(padded[:, :17])

    expected = torch.cat(x, dim=1).abs().amax(1)
    assert expected[5].isnan()
    for found in of_all(memory, maxima):
        assert torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("num_rows", [1, 4, 40])
@pytest.mark.parametrize("arch", in_each_width(ARCHES))
def test_integer_products_of_ranks_have_the_bits_of_one(arch: str, num_rows: int) -> None:
    """Weights and rows are quantized with the scales of all inputs, so sums of products are those of one rank."""
    loader = KernelLoader(CppBuilder(arch))
    load_thread_pool(loader)
    one = LinearKernel(loader.load(linear_spec("int8", arch)), num_rows, 240)
    maxima, sums = loader.load(row_maxima_spec(arch)), loader.load(sum_products_spec(arch))
    x, weight, bias = (torch.randn(shape) for shape in ((num_rows, 240), (75, 240), (75,)))
    x[0, 239], weight[3, 0] = 40.0, 17.0
    packed, expected = one.pack(75, 240), torch.empty(num_rows, 75)
    packed.write(0, weight)
    packed.bias[:75] = bias
    one(x, packed, expected)
    for count in (1, 2, 3):

        def product(ranks: SharedRanks, count: int = count) -> Tensor:
            own = slice(*share(240, ranks.index, count))
            kernel = LinearKernel(loader.load(linear_spec("int8", arch, over_ranks=True)), num_rows, 240)
            part, its_x = kernel.pack(75, 240 // count), x[:, own].contiguous()
            PackedRows(part, 0, (75, 240 // count), ranks).copy_(weight[:, own])
            part.bias[:75] = bias
            largest = RowMaximaKernel(maxima, ranks)(its_x)
            return SumProductsKernel(sums, ranks)(kernel.products(its_x, largest, part), largest, part)

        for found in of_all(RankMemory(count, AREA_BYTES), product):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("num_tokens", [1, 30])
@pytest.mark.parametrize("arch", cases(ARCHES, fast=[HERE]))
def test_experts_products_of_ranks_have_the_bits_of_one(arch: str, num_tokens: int) -> None:
    loader = KernelLoader(CppBuilder(arch))
    load_thread_pool(loader)
    num_experts, top_k, num_inputs, num_outputs = 4, 2, 90, 37
    specs = [linear_spec("int8", arch, routed=True, over_ranks=each) for each in (False, True)]
    maxima, sums = loader.load(row_maxima_spec(arch)), loader.load(sum_products_spec(arch, routed=True))
    experts = torch.rand(num_tokens, num_experts).topk(top_k).indices
    choices = SortKernel(loader.load(sort_spec(num_experts)))(experts)
    x, weight = torch.randn(num_tokens * top_k, num_inputs), torch.randn(num_experts, num_outputs, num_inputs)
    bias = torch.randn(num_experts, num_outputs)

    def outputs(ranks: SharedRanks, *, is_one: bool) -> Tensor:
        kernel = GroupedLinearKernel(loader.load(specs[not is_one]), len(x), num_inputs)
        own = slice(*share(num_inputs, ranks.index, ranks.count))
        its_x = x[:, own].contiguous()
        packed = kernel.pack(num_outputs, its_x.shape[1], num_groups=num_experts)
        for expert in range(num_experts):
            group = packed.group(expert)
            PackedRows(group, 0, (num_outputs, its_x.shape[1]), ranks).copy_(weight[expert, :, own])
            group.bias[:num_outputs] = bias[expert]
        if is_one:
            return kernel.route(its_x, choices, packed)
        largest = RowMaximaKernel(maxima, ranks)(its_x)
        products = kernel.route(its_x, choices, packed, largest)
        return SumProductsKernel(sums, ranks)(products, largest, packed, experts)

    (expected,) = of_all(RankMemory(1, AREA_BYTES), lambda ranks: outputs(ranks, is_one=True))
    for count in (2, 3):
        for found in of_all(RankMemory(count, AREA_BYTES), lambda ranks: outputs(ranks, is_one=False)):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_rank_0_gets_the_columns_of_all(count: int, by_kernel: bool) -> None:
    kernel = KernelLoader(CppBuilder("portable")).load(gather_columns_spec())
    memory = RankMemory(count, AREA_BYTES)
    for num_rows, num_columns in ((1, count), (2, 61), (40, 134)):
        (whole,) = parts(1, num_rows, num_columns)

        def gather(ranks: SharedRanks, whole: Tensor = whole) -> Tensor:
            own, out = whole[:, slice(*share(whole.shape[1], ranks.index, ranks.count))], torch.zeros_like(whole)
            call = GatherKernel(kernel, ranks) if by_kernel else Gather(ranks, memory.count)
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
        call = AllReduceKernel(kernel, ranks) if by_kernel else AllReduce(ranks, memory.count)
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
        call = AllReduceKernel(kernel, ranks) if by_kernel else AllReduce(ranks, memory.count)
        call(torch.ones(1, 1))
        memory.check()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reduce)
        while memory.begin(0) < 2:  # it has not come to the wait
            time.sleep(0.001)
        memory.end()
        with pytest.raises(RankError, match="the ranks of this model have ended"):
            waiting.result(timeout=60)
