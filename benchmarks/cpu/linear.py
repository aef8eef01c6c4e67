"""Compares linear layers with the machine's limits and with torch: ``python -m benchmarks.cpu.linear --help``.

Weights come from memory: each call reads another copy, and all copies together exceed the caches. Rounds alternate over
all cases, and each begins and ends with a measurement of the machine's limits. A round counts if both are the same,
since neighbours on a shared machine take bandwidth and cores for seconds at a time. Medians are printed:

    read     bytes of packed weights a second, over the read bandwidth
    peak     operations a second, over the fp32 rate (int8 products may exceed it)
    speedup  rows a second, over one row's
    torch    time of torch's fp32 product of the same shape, over ours
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import torch

from benchmarks.cpu.machine_limits import Limits, Machine, is_steady
from benchmarks.cpu.neighbour import neighbour_on
from benchmarks.cpu.results import about_this_run
from benchmarks.new_file import new_file
from fastgen.compile.build.cpp import CppBuilder, CppKernel, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.linear.cpp import LinearKernel, linear_spec
from fastgen.compile.weights.packed import PackedWeight, WeightFormat, formats_of

_FEW_ROWS = (1, 2, 4, 8, 16)
_COPIES_BYTES = 128 << 20


class Case:
    """Holds one format at one number of rows. All cases of a format take its weights in turn."""

    def __init__(self, kernel: CppKernel, turns: Iterator[PackedWeight], num_rows: int):
        weight = next(turns)
        self.num_rows, self.size_bytes = num_rows, weight.size_bytes
        self.operations = 2 * num_rows * weight.in_features * weight.out_features
        self.x, self.out = torch.randn(num_rows, weight.in_features), torch.empty(num_rows, weight.out_features)
        self._turns, self._launcher = turns, LinearKernel(kernel, num_rows, weight.in_features)
        library = ctypes.CDLL(str(kernel.source.with_suffix(".so")))
        self._function = getattr(library, kernel.spec.name)
        self._function.argtypes = [
            ctypes.c_void_p if argument.is_pointer else ctypes.c_int64 for argument in kernel.spec.arguments
        ]

    def time_once(self) -> float:
        """Times the native call alone, as in a step that is one native call."""
        arguments = self._launcher.arguments(self.x, next(self._turns), self.out)
        addresses = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        start = time.perf_counter()
        self._function(*addresses)
        return time.perf_counter() - start


class TorchCase:
    """Holds torch's own product in fp32."""

    def __init__(self, num_rows: int, out_features: int, in_features: int):
        self.x, self.weight = torch.randn(num_rows, in_features), torch.randn(out_features, in_features)
        self.out = torch.empty(num_rows, out_features)

    def time_once(self) -> float:
        start = time.perf_counter()
        torch.mm(self.x, self.weight.T, out=self.out)
        return time.perf_counter() - start


def make_cases(
    formats: list[WeightFormat], rows: list[int], shape: tuple[int, int], arch: str, loader: KernelLoader
) -> dict[tuple[str, int], Case]:
    weight = torch.randn(shape)
    cases: dict[tuple[str, int], Case] = {}
    for weight_format in formats:
        kernel = loader.load(linear_spec(weight_format, arch))
        assert isinstance(kernel, CppKernel)
        first = PackedWeight(weight_format, *shape, arch)
        first.write(0, weight)
        copies = [first]
        while len(copies) * first.size_bytes < _COPIES_BYTES:
            copies.append(PackedWeight(weight_format, *shape, arch))
            copies[-1].panels.copy_(first.panels)
            copies[-1].scale.copy_(first.scale)
        turns = cycle(copies)
        cases |= {(weight_format, num_rows): Case(kernel, turns, num_rows) for num_rows in rows}
    return cases


def measure(
    cases: dict[tuple[str, int], Case], machine: Machine, num_threads: int, num_rounds: int
) -> tuple[list[tuple[Limits, Limits]], dict[Any, list[float]]]:
    """Returns for each round the limits before and after, and for each case the better of two consecutive calls."""
    limits, times = [], defaultdict(list)
    by_torch = {
        num_rows: TorchCase(num_rows, case.out.shape[1], case.x.shape[1]) for (_, num_rows), case in cases.items()
    }
    for _ in range(num_rounds):
        before = machine.measure()
        for key, case in cases.items():
            times[key].append(min(case.time_once(), case.time_once()))
        after = machine.measure()
        limits.append((before, after))
        torch.set_num_threads(num_threads)
        for num_rows, torch_case in by_torch.items():
            times["torch", num_rows].append(min(torch_case.time_once(), torch_case.time_once()))
        torch.set_num_threads(1)
        time.sleep(0.02)  # until torch's threads have stopped spinning
    return limits, times


def summarise(
    cases: dict[tuple[str, int], Case], limits: list[tuple[Limits, Limits]], times: dict[Any, list[float]]
) -> dict[str, Any]:
    read = [(before.read + after.read) / 2 for before, after in limits]
    fp32 = [(before.fp32 + after.fp32) / 2 for before, after in limits]
    steady = [i for i, each in enumerate(limits) if is_steady(*each)] or list(range(len(limits)))

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    rows = []
    for (name, num_rows), case in cases.items():
        took = times[name, num_rows]
        one = times[name, min(rows_ for name_, rows_ in cases if name_ == name)]
        size = case.size_bytes
        rows.append(
            {
                "format": name,
                "rows": num_rows,
                "us": round(1e6 * statistics.median(took[i] for i in steady), 1),
                "read": median([size / took[i] / read[i] for i in steady]),
                "peak": median([case.operations / took[i] / fp32[i] for i in steady]),
                "speedup": median([num_rows * one[i] / took[i] for i in steady]),
                "torch": median([times["torch", num_rows][i] / took[i] for i in steady]),
            }
        )
    return {
        "read_gbs": round(statistics.median(read[i] for i in steady) / 1e9, 1),
        "fp32_gflops": round(statistics.median(fp32[i] for i in steady) / 1e9, 1),
        "rounds": len(limits),
        "steady_rounds": len(steady),
        "cases": rows,
        "samples": {
            f"{name}/{num_rows}": [round(1e6 * each, 1) for each in took] for (name, num_rows), took in times.items()
        },
        "read_samples": [[round(each.read / 1e9, 2) for each in pair] for pair in limits],
        "fp32_samples": [[round(each.fp32 / 1e9, 1) for each in pair] for pair in limits],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=list(formats_of(cpp_arch(device.current("cpu")))))
    parser.add_argument("--rows", nargs="+", type=int, default=[*_FEW_ROWS, 64, 512])
    parser.add_argument("--shape", nargs=2, type=int, default=(2048, 2048), help="out_features in_features")
    parser.add_argument("--num-threads", type=int, default=device.current("cpu").num_cores)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--busy-core", type=int, help="keep this core busy with another process")
    parser.add_argument("--json", type=new_file, help="write everything measured to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    here = device.current("cpu")
    arch = cpp_arch(here)
    loader = KernelLoader(CppBuilder(arch))
    pool = load_thread_pool(loader)
    pool.resize(options.num_threads)
    cases = make_cases(options.formats, options.rows, tuple(options.shape), arch, loader)
    about = about_this_run(
        torch=torch.__version__,
        threads=pool.num_threads,
        arch=arch,
        shape=list(options.shape),
        busy_core=options.busy_core,
    )
    machine = Machine(arch)
    with nullcontext() if options.busy_core is None else neighbour_on(options.busy_core) as neighbour:
        if neighbour is not None:
            neighbour.resume()
        found = summarise(cases, *measure(cases, machine, options.num_threads, options.rounds))
    print(
        f"{here.name}, {pool.num_threads} threads, {arch}: {found['read_gbs']} GB/s, {found['fp32_gflops']} GFLOP/s in "
        f"fp32; {found['steady_rounds']} of {found['rounds']} rounds counted"
    )
    print(f"{'format':17}{'rows':>5}{'us':>10}{'read':>8}{'peak':>8}{'speedup':>9}{'torch':>8}")
    for case in found["cases"]:
        print("{format:17}{rows:5}{us:10.1f}{read:8.2f}{peak:8.2f}{speedup:9.2f}{torch:8.2f}".format(**case))
    if options.json:
        options.json.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
