"""The machine's current limits, and the current rate of torch's own matrix product."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.cpu.machine_limits import Machine
from fastgen.compile.build.cpp import CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool

_NUM_SAMPLES = 20
_ROWS, _SIZE, _NUM_PRODUCTS = 512, 2048, 3


class Calibration:
    """Measures the limits in about a fifth of a second; its threads sleep in between."""

    def __init__(self, num_threads: int):
        arch = cpp_arch(device.current("cpu"))
        load_thread_pool(KernelLoader(CppBuilder(arch))).resize(num_threads)
        torch.set_num_threads(1)
        self._num_threads, self._machine = num_threads, Machine(arch)
        self._x, self._weight = torch.randn(_ROWS, _SIZE), torch.randn(_SIZE, _SIZE)

    def measure(self) -> dict[str, float]:
        """Returns ``read`` in bytes a second; ``fp32``, ``int8`` and ``mkl`` (torch's own) in operations a second."""
        samples = [vars(self._machine.measure()) for _ in range(_NUM_SAMPLES)]
        limits = {name: statistics.median(each[name] for each in samples) for name in samples[0]}
        torch.set_num_threads(self._num_threads)
        product_s = min(self._product_s() for _ in range(_NUM_PRODUCTS))
        torch.set_num_threads(1)
        return {name: float(f"{value:.4g}") for name, value in limits.items()} | {
            "mkl": float(f"{2 * _ROWS * _SIZE * _SIZE / product_s:.4g}")
        }

    def _product_s(self) -> float:
        start = time.perf_counter()
        torch.mm(self._x, self._weight.T)
        return time.perf_counter() - start
