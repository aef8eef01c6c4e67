"""The cost of ranks that work together: a plan of a step, a sum over two ranks by its size, tokens of one request.

``python -m benchmarks.cpu.ranks [MODEL]`` prints it. One and two ranks take turns, each with all cores together.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import torch

import fastgen
from fastgen.compile.build.cpp import CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.device import current
from fastgen.compile.host.rank_memory import AREA_BYTES, RankMemory, SharedRanks
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.ranks.cpp import AllReduceKernel, all_reduce_spec

NUM_SUMS = 2000
NUM_TURNS = 6
NUM_TOKENS = 200
# A token of a small and of a large model, and a step of 512 tokens of a small one.
COUNTS = (128, 8192, 512 * 768)


def sums(memory: RankMemory, rank: int) -> list[float]:
    """Returns the median seconds of a sum over two ranks, for each of ``COUNTS`` numbers."""
    loader = KernelLoader(CppBuilder(cpp_arch(current("cpu"))))
    load_thread_pool(loader).resize(1)
    loader.build([all_reduce_spec(loader.builder.arch)])
    kernel = AllReduceKernel(loader.load(all_reduce_spec(loader.builder.arch)), SharedRanks(memory, rank, 60.0))
    found = []
    for count in COUNTS:
        x, times_s = torch.ones(count), []
        for _ in range(NUM_SUMS if count < 1 << 16 else NUM_SUMS // 10):
            x.fill_(1.0)
            began_s = time.perf_counter()
            kernel(x)
            times_s.append(time.perf_counter() - began_s)
        found.append(statistics.median(times_s))
    memory.check()
    return found


def measure_sums() -> None:
    """Prints what sums take, with the other rank in another process."""
    memory = RankMemory(2, AREA_BYTES)
    command = [sys.executable, "-m", "benchmarks.cpu.ranks", "--other", str(memory.fd)]
    with subprocess.Popen(command, pass_fds=(memory.fd,)):
        for count, each_s in zip(COUNTS, sums(memory, 0), strict=True):
            print(f"a sum of {count:,} numbers over 2 ranks: {1e6 * each_s:,.1f} us")


def token_ms(model: str, count: int) -> tuple[float, float, float]:
    """Returns the milliseconds of a token of one request, and the bytes and microseconds of a plan."""
    with fastgen.load(model, tensor_parallel=count) as llm:
        llm.generate([5, 6, 7], max_new_tokens=NUM_TOKENS, ignore_eos=True)
        began_s = time.perf_counter()
        llm.generate([5, 6, 7], max_new_tokens=NUM_TOKENS, ignore_eos=True)
        took_s = time.perf_counter() - began_s
        metrics = llm.metrics()
    plans = max(1, metrics.rank_plans_total)
    return (
        1e3 * took_s / NUM_TOKENS,
        metrics.rank_plan_bytes_total / plans,
        1e6 * metrics.rank_plan_seconds_total / plans,
    )


def main() -> None:
    """Prints all of it."""
    if sys.argv[1:2] == ["--other"]:
        sums(RankMemory(2, AREA_BYTES, fd=int(sys.argv[2])), 1)
        return
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny-llama"
    measure_sums()
    turns = [[token_ms(model, count) for count in (1, 2)] for _ in range(NUM_TURNS)]
    for place, count in enumerate((1, 2)):
        each_ms = sorted(turn[place][0] for turn in turns)
        spread = f"{each_ms[0]:.2f} to {each_ms[-1]:.2f}"
        print(f"{model}, ranks: {count}: {statistics.median(each_ms):.2f} ms a token ({spread})")
    _, plan_bytes, plan_us = turns[-1][1]
    print(f"a plan: {plan_bytes:,.0f} bytes, written in {plan_us:.0f} us; two plans a step")


if __name__ == "__main__":
    main()
