"""Compares paged attention with the machine's own limits: ``python -m benchmarks.cpu.attention --help``.

Keys and values come from memory: blocks lie in random order in a cache that exceeds the processor's, and each call
reads other blocks. Rounds alternate over all cases. The machine's limits are measured before and after each call, and a
sample counts if both are the same, since neighbours on a shared machine take bandwidth and cores for seconds at a time.
Medians of the native call alone are printed, as in a step that is one native call:

    read     bytes of keys and values a second, over the read bandwidth
    peak     operations a second (two for a product added), over the fp32 rate

A decode with few query heads for each KV head is bound by memory; one with many, and a chunk, by arithmetic. A call of
a few microseconds mostly consists of its start and of the latency of the first bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from benchmarks.cpu.machine_limits import Limits, Machine, is_steady
from benchmarks.cpu.results import about_this_run
from benchmarks.new_file import new_file
from fastgen.compile.build.cpp import CppBuilder, CppKernel, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.host.workspace import Workspace
from fastgen.compile.ops.attention.cpp import AttentionKernel, AttentionLimits, attention_spec, empty_cache
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.spec import torch_dtype

_CACHE_BYTES = 128 << 20  # of keys, and as much of values
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Workload:
    """Describes ``num_seqs`` sequences of ``length`` tokens, of which ``num_new`` are new, for heads ``(N, K, D)``."""

    heads: tuple[int, int, int]
    dtype: str
    num_seqs: int
    length: int
    num_new: int

    @property
    def name(self) -> str:
        heads = "N{} K{} D{}".format(*self.heads)
        return f"{heads} {self.dtype} {self.num_seqs} x {self.num_new} of {self.length}"

    @property
    def read_bytes(self) -> int:
        _, num_kv_heads, head_dim = self.heads
        return 2 * self.num_seqs * self.length * num_kv_heads * head_dim * torch_dtype(self.dtype).itemsize

    @property
    def operations(self) -> int:
        num_heads, _, head_dim = self.heads
        pairs = self.num_new * (self.length - self.num_new) + self.num_new * (self.num_new + 1) // 2
        return 4 * self.num_seqs * num_heads * head_dim * pairs


class Case:
    """Holds a workload's kernel, and block tables that alternate in a cache shared by all workloads of these heads."""

    def __init__(
        self, workload: Workload, kernel: CppKernel, caches: tuple[torch.Tensor, torch.Tensor], num_threads: int
    ):
        num_heads, _, head_dim = workload.heads
        num_seqs, num_new = workload.num_seqs, workload.num_new
        self.workload = workload
        q = torch.randn(num_seqs * num_new, num_heads, head_dim)
        out = torch.empty_like(q)
        starts = torch.arange(0, num_seqs * num_new + 1, num_new, dtype=torch.int32)
        lengths = torch.full((num_seqs,), workload.length, dtype=torch.int32)
        max_blocks = -(-workload.length // _BLOCK_SIZE)
        order = torch.randperm(len(caches[0])).int()
        num_tables = max(1, len(order) // (num_seqs * max_blocks))
        limits = AttentionLimits(len(q), num_seqs, workload.length, num_threads)
        attention = AttentionKernel(kernel, limits, Workspace())
        self._calls = []
        for tables in order.repeat(2)[: num_tables * num_seqs * max_blocks].view(num_tables, num_seqs, max_blocks):
            arguments = attention.arguments(q, *caches, tables.contiguous(), starts, lengths, out)
            slots = kernel.slots(arguments)
            self._calls.append((arguments, (ctypes.c_int64 * len(slots))(*slots)))
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.entry_point)
        self._turn = 0

    def time_once(self) -> float:
        self._turn = (self._turn + 1) % len(self._calls)
        _, slots = self._calls[self._turn]
        start = time.perf_counter()
        self._function(slots)
        return time.perf_counter() - start


def make_cases(workloads: list[Workload], loader: KernelLoader, arch: str) -> list[Case]:
    caches: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    cases = []
    for workload in workloads:
        num_heads, num_kv_heads, head_dim = workload.heads
        dtype = torch_dtype(workload.dtype)
        if (workload.heads, dtype) not in caches:
            num_blocks = _CACHE_BYTES // (_BLOCK_SIZE * num_kv_heads * head_dim * dtype.itemsize)
            k, v = empty_cache(num_blocks, _BLOCK_SIZE, num_kv_heads, head_dim, None, dtype=dtype)
            caches[workload.heads, dtype] = k.normal_(), v.normal_()
        shape = AttentionShape(num_heads, num_kv_heads, head_dim, _BLOCK_SIZE, workload.dtype, head_dim**-0.5)
        kernel = loader.load(attention_spec(shape, arch))
        assert isinstance(kernel, CppKernel)
        cases.append(Case(workload, kernel, caches[workload.heads, dtype], load_thread_pool(loader).num_threads))
    return cases


@dataclass(frozen=True)
class Sample:
    """Holds the better of two consecutive calls, and the limits before and after them."""

    seconds: float
    limits: tuple[Limits, Limits]

    @property
    def read(self) -> float:
        return (self.limits[0].read + self.limits[1].read) / 2

    @property
    def fp32(self) -> float:
        return (self.limits[0].fp32 + self.limits[1].fp32) / 2


def measure(cases: list[Case], machine: Machine, num_rounds: int) -> dict[str, list[Sample]]:
    samples = defaultdict(list)
    before = machine.measure()
    for _ in range(num_rounds):
        for case in cases:
            seconds = min(case.time_once(), case.time_once())
            after = machine.measure()
            samples[case.workload.name].append(Sample(seconds, (before, after)))
            before = after
    return samples


def summarise(cases: list[Case], samples: dict[str, list[Sample]]) -> dict[str, Any]:
    rows, everything = [], [each for taken in samples.values() for each in taken]
    for workload in (case.workload for case in cases):
        taken = samples[workload.name]
        steady = [each for each in taken if is_steady(*each.limits)] or taken
        rows.append(
            {
                "workload": workload.name,
                "us": round(1e6 * statistics.median(each.seconds for each in steady), 1),
                "read": round(statistics.median(workload.read_bytes / each.seconds / each.read for each in steady), 3),
                "peak": round(statistics.median(workload.operations / each.seconds / each.fp32 for each in steady), 3),
                "steady_samples": len(steady),
                "samples_us_gbs_gflops": [
                    [round(1e6 * each.seconds, 1), round(each.read / 1e9, 1), round(each.fp32 / 1e9, 1)]
                    for each in taken
                ],
            }
        )
    return {
        "read_gbs": round(statistics.median(each.read for each in everything) / 1e9, 1),
        "fp32_gflops": round(statistics.median(each.fp32 for each in everything) / 1e9, 1),
        "cases": rows,
    }


def heads(text: str) -> tuple[int, int, int]:
    num_heads, num_kv_heads, head_dim = (int(part) for part in text.split(","))
    return num_heads, num_kv_heads, head_dim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", type=heads, default=[(12, 4, 64), (32, 8, 64)], help="N,K,D")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 16, 64, 256, 1000, 4000], help="of decodes")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1], help="decoded at once")
    parser.add_argument("--chunk", nargs=2, type=int, default=(64, 2048), help="new tokens, and all; 0 0 for none")
    parser.add_argument("--num-threads", type=int, default=device.current("cpu").num_cores)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=new_file, help="write everything measured to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    here = device.current("cpu")
    arch = cpp_arch(here)
    loader = KernelLoader(CppBuilder(arch))
    pool = load_thread_pool(loader)
    pool.resize(options.num_threads)
    kinds = [(num_seqs, length, 1) for num_seqs, length in product(options.sequences, options.lengths)]
    if options.chunk[0]:
        kinds.append((1, options.chunk[1], options.chunk[0]))
    workloads = [Workload(*each, *kind) for *each, kind in product(options.heads, options.dtypes, kinds)]
    cases = make_cases(workloads, loader, arch)
    about = about_this_run(torch=torch.__version__, threads=pool.num_threads, arch=arch, block_size=_BLOCK_SIZE)
    found = summarise(cases, measure(cases, Machine(arch), options.rounds))
    print(
        f"{here.name}, {pool.num_threads} threads, {arch}: {found['read_gbs']} GB/s, "
        f"{found['fp32_gflops']} GFLOP/s in fp32"
    )
    print(f"{'sequences x new tokens of all':40}{'us':>10}{'read':>8}{'peak':>8}{'counted':>9}")
    for case in found["cases"]:
        print("{workload:40}{us:10.1f}{read:8.2f}{peak:8.2f}{steady_samples:9}".format(**case))
    if options.json:
        options.json.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
