"""Ranks of a process group give the same sums as ranks that share memory, in one exchange or two; and the kernel that
adds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from fastgen.compile.backends.modules.collectives import AllReduce, Gather
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.group_ranks import MeetingPoint, open_group
from fastgen.compile.host.rank_memory import RankMemory, SharedRanks
from fastgen.compile.host.ranks import Ranks, share
from fastgen.compile.ops.ranks.triton import SumPartsKernel, sum_parts_spec
from fastgen.compile.spec import dtype_name
from tests.compile.test_ranks import in_order
from tests.kernel_device import DEVICE

T = TypeVar("T")

COUNTS = (1, 2, 3, 4)
DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


def of_group(count: int, file: Path, call: Callable[[Ranks], T]) -> list[T]:
    """The results of ``call`` on the ranks of a group, each a thread."""

    def run(index: int) -> T:
        return call(open_group(MeetingPoint("gloo", file), index, count, CPU))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def of_memory(count: int, file: Path, call: Callable[[Ranks], T]) -> list[T]:
    """Makes ranks that share memory. Their areas are small, so a message takes several exchanges."""
    memory = RankMemory(count, 4096)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, [SharedRanks(memory, index, 30.0) for index in range(count)]))


KINDS = pytest.mark.parametrize("of_all", [of_group, of_memory])


def drawn(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    # Sums in another order than that of the ranks would have other bits.
    return [(torch.randn(shape, generator=generator) * 100.0**index).to(dtype) for index in range(count)]


@KINDS
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_ranks_send_each_other(
    of_all: Callable[..., list[T]], count: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    given = drawn(count, 40, 33, dtype=dtype)
    pieces = drawn(count, count, 5, 7, dtype=dtype)

    def exchange(ranks: Ranks) -> tuple[Tensor, ...]:
        own, index = given[ranks.index], ranks.index
        everything, mine = own.new_empty(count, *own.shape), pieces[index].new_empty(pieces[index].shape)
        ranks.all_gather(own, everything)
        ranks.all_to_all(pieces[index], mine)
        total, largest, first = own.clone(), own.clone(), own.clone()
        AllReduce(ranks, count)(total)
        ranks.all_max(largest)
        ranks.broadcast(first)
        return everything, mine, total, largest, first

    for index, found in enumerate(of_all(count, tmp_path / "meeting", exchange)):
        everything, mine, total, largest, first = found
        assert torch.equal(everything, torch.stack(given))
        assert torch.equal(mine, torch.stack([each[index] for each in pieces]))
        assert torch.equal(total, in_order(given))
        assert torch.equal(largest, torch.stack(given).amax(0))
        assert torch.equal(first, given[0])


@KINDS
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("num_columns", [8, 13])
def test_columns_are_laid_side_by_side(
    of_all: Callable[..., list[Tensor]], count: int, num_columns: int, tmp_path: Path
) -> None:
    whole = torch.randn(6, num_columns, generator=torch.Generator().manual_seed(count))

    def gather(ranks: Ranks) -> Tensor:
        own = whole[:, slice(*share(num_columns, ranks.index, count))].contiguous()
        found = torch.full_like(whole, torch.nan)
        Gather(ranks, count)(own, found)
        return found

    assert torch.equal(of_all(count, tmp_path / "meeting", gather)[0], whole)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_shot_and_two_give_the_same_bits(count: int, dtype: torch.dtype, tmp_path: Path) -> None:
    most = AllReduce.ONE_SHOT_ROWS
    shapes = [(1, 12), (most, 12), (most + 1, 12), (most + 1, 13), (3 * most, 24)]
    given = {shape: drawn(count, *shape, dtype=dtype) for shape in shapes}

    def reduce(ranks: Ranks) -> list[Tensor]:
        add = AllReduce(ranks, count)
        return [add(parts[ranks.index].clone()) for parts in given.values()]

    for found in of_memory(count, tmp_path, reduce):
        for mine, parts in zip(found, given.values(), strict=True):
            assert torch.equal(mine, in_order(parts))


def test_two_shots_move_fewer_bytes() -> None:
    """Many rows of four ranks: each gets a share of the others' parts, and a share of sums of each."""
    rows, features, count = 2 * AllReduce.ONE_SHOT_ROWS, 8, 4
    received: list[int] = []

    class Counting(SharedRanks):
        def all_gather(self, x: Tensor, out: Tensor) -> None:
            received.append(out.nbytes - x.nbytes)

        def all_to_all(self, x: Tensor, out: Tensor) -> None:
            received.append(out.nbytes - x[0].nbytes)

    ranks = Counting(RankMemory(count, 4096), 0)
    x = torch.zeros(rows, features)
    AllReduce(ranks, count)(x)
    assert sum(received) == 2 * 3 * x.nbytes // 4
    received.clear()
    AllReduce(ranks, 2)(x)
    assert received == [x.nbytes], "with two ranks one exchange moves as little"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_adds_in_the_order_of_the_ranks(
    triton_kernels: KernelLoader, count: int, dtype: torch.dtype
) -> None:
    kernel = SumPartsKernel(triton_kernels.load(sum_parts_spec(count, dtype_name(dtype))))
    for shape in ((1, 3), (7, 293)):
        parts = torch.stack(drawn(count, *shape)).div(100.0 ** (count - 1)).to(dtype)
        found = torch.full((shape[0] + 1, shape[1]), -7.0, dtype=dtype)
        kernel(parts, found[:-1])
        expected = in_order(list(parts))
        if dtype == torch.bfloat16 and DEVICE == "cpu":  # Triton's interpreter cuts bits off where hardware rounds
            expected = (in_order(list(parts.float())).view(torch.int32) & -(1 << 16)).view(torch.float32).to(dtype)
        assert torch.equal(found[:-1], expected)
        assert (found[-1] == -7).all(), "it writes nothing behind its numbers"


def captured(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Returns ``step`` as a CUDA graph; it has run once before."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        step()
        graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph


@pytest.mark.gpu
def test_a_captured_sum_of_one_rank(tmp_path: Path) -> None:
    """NCCL's exchanges are part of a CUDA graph, which reads what stands there when it is replayed."""
    device = torch.device("cuda", 0)
    ranks = open_group(MeetingPoint("nccl", tmp_path / "meeting"), 0, 1, device)
    x, token_ids = torch.zeros(65, 8, device=device), torch.zeros(4, dtype=torch.int32, device=device)
    sums = AllReduce(ranks, 1)
    logits = torch.zeros(65, 8, device=device)

    def step() -> None:
        sums(x)
        x.mul_(2)
        Gather(ranks, 1)(x, logits)
        ranks.broadcast(token_ids)

    graph = captured(step, device)
    for turn in range(1, 4):
        x.fill_(turn)
        logits.zero_()
        graph.replay()
        assert (x == 2 * turn).all()
        assert (logits == 2 * turn).all()
    graph.reset()
    ranks.abort()
