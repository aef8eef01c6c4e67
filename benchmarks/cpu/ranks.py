"""The cost of ranks that work together: a plan, sums over two ranks by their size, tokens of one request.

``python -m benchmarks.cpu.ranks [MODEL] [QUANTIZE]`` prints it. One and two ranks take turns, each with all cores
together. Beside the time that passes it says the processor time of all ranks, in which they also wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastgen
from fastgen.compile.build.builder import Kernel
from fastgen.compile.build.cpp import CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.device import current
from fastgen.compile.host.rank_memory import AREA_BYTES, RankMemory, SharedRanks
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.ranks.cpp import (
    AllReduceKernel,
    RowMaximaKernel,
    SumProductsKernel,
    all_reduce_spec,
    row_maxima_spec,
    sum_products_spec,
)
from fastgen.compile.weights.formats import QuantizedFormat
from fastgen.compile.weights.packed import PackedWeight
from fastgen.runtime.targets import parse_quantize

NUM_SUMS = 2000
NUM_TURNS = 6
NUM_TOKENS = 200
# A token of a small and of a large model, and a step of 512 tokens of a small one.
COUNTS = (128, 8192, 512 * 768)


class Times(NamedTuple):
    """The median and the least seconds of a call."""

    median_s: float
    least_s: float

    def __str__(self) -> str:
        return f"{1e6 * self.median_s:,.1f} us, at least {1e6 * self.least_s:,.1f}"


class Kept:
    """A kernel that keeps its launch instead of running it, to be repeated as a tape does."""

    def __init__(self, kernel: Kernel):
        self.spec, self._kernel = kernel.spec, kernel

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        self.run = self._kernel.bind(grid, *arguments)

    def bind(self, grid: tuple[int, ...], *arguments: Any) -> Callable[[], None]:
        """See :class:`Kernel`."""
        return self._kernel.bind(grid, *arguments)


def timed(kernels: Sequence[Kept], num_turns: int) -> Times:
    """Returns the times of ``num_turns`` launches of the kernels, one after the other."""
    times_s = []
    for _ in range(num_turns):
        began_s = time.perf_counter()
        for kernel in kernels:
            kernel.run()
        times_s.append(time.perf_counter() - began_s)
    return Times(statistics.median(times_s), min(times_s))


def sums(memory: RankMemory, rank: int) -> list[tuple[Times, Times]]:
    """Returns the times of a sum over two ranks for each of ``COUNTS`` numbers: of results, and of the integer products
    of as many outputs of a row, with the maximum of its inputs before."""
    loader = KernelLoader(CppBuilder(cpp_arch(current("cpu"))))
    load_thread_pool(loader).resize(1)
    arch, ranks = loader.builder.arch, SharedRanks(memory, rank, 60.0)
    specs = all_reduce_spec(arch), row_maxima_spec(arch), sum_products_spec(arch)
    loader.build(specs)
    reduce, maxima, sum_products = (Kept(loader.load(spec)) for spec in specs)
    found = []
    for count in COUNTS:
        num_turns = NUM_SUMS if count < 1 << 16 else NUM_SUMS // 10
        x, products = torch.zeros(count), torch.zeros(max(1, count // 8192), min(count, 8192), dtype=torch.int32)
        AllReduceKernel(reduce, ranks)(x)
        largest = RowMaximaKernel(maxima, ranks)(x.view(products.shape))
        SumProductsKernel(sum_products, ranks)(products, largest, PackedWeight("int8", products.shape[1], 4, arch))
        found.append((timed([reduce], num_turns), timed([maxima, sum_products], num_turns)))
    memory.check()
    return found


def measure_sums() -> None:
    """Prints what sums take, with the other rank in another process."""
    memory = RankMemory(2, AREA_BYTES)
    command = [sys.executable, "-m", "benchmarks.cpu.ranks", "--other", str(memory.fd)]
    with subprocess.Popen(command, pass_fds=(memory.fd,)):
        for count, (plain, exact) in zip(COUNTS, sums(memory, 0), strict=True):
            print(f"a sum of {count:,} numbers over 2 ranks: {plain}; of integer products and maxima: {exact}")


class OfAToken(NamedTuple):
    """The cost of a token of one request: milliseconds that pass, and of the processors; and plans, their bytes and
    microseconds."""

    ms: float
    processor_ms: float
    num_plans: float
    plan_bytes: float
    plan_us: float


def of_a_token(model: str, quantize: QuantizedFormat | None, count: int) -> OfAToken:
    """Measures one request on ``count`` ranks."""
    with fastgen.load(model, quantize=quantize, tensor_parallel=count) as llm:
        llm.generate([5, 6, 7], max_new_tokens=NUM_TOKENS, ignore_eos=True)
        before, began_s, began_processor_s = llm.metrics(), time.perf_counter(), _processor_s()
        llm.generate([5, 6, 7], max_new_tokens=NUM_TOKENS, ignore_eos=True)
        took_s, processor_s, after = time.perf_counter() - began_s, _processor_s() - began_processor_s, llm.metrics()
    num_plans = after.rank_plans_total - before.rank_plans_total
    plans = max(1, num_plans)
    return OfAToken(
        1e3 * took_s / NUM_TOKENS,
        1e3 * processor_s / NUM_TOKENS,
        num_plans / NUM_TOKENS,
        (after.rank_plan_bytes_total - before.rank_plan_bytes_total) / plans,
        1e6 * (after.rank_plan_seconds_total - before.rank_plan_seconds_total) / plans,
    )


def _processor_s() -> float:
    """Returns the processor time so far of this process and its children."""
    total = time.process_time()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def main() -> None:
    """Prints all of it."""
    if sys.argv[1:2] == ["--other"]:
        sums(RankMemory(2, AREA_BYTES, fd=int(sys.argv[2])), 1)
        return
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny-llama"
    quantize = parse_quantize(sys.argv[2], "cpp") if len(sys.argv) > 2 else None
    measure_sums()
    turns = [[of_a_token(model, quantize, count) for count in (1, 2)] for _ in range(NUM_TURNS)]
    for place, count in enumerate((1, 2)):
        each_ms, processor_ms = ([turn[place][field] for turn in turns] for field in (0, 1))
        spread = f"{min(each_ms):.2f} to {max(each_ms):.2f}"
        print(
            f"{model}, ranks: {count}: {statistics.median(each_ms):.2f} ms a token ({spread}), "
            f"{statistics.median(processor_ms):.2f} ms of processors"
        )
    last = turns[-1][1]
    print(f"{last.num_plans:.2f} plans a token, each of {last.plan_bytes:,.0f} bytes, written in {last.plan_us:.0f} us")


if __name__ == "__main__":
    main()
