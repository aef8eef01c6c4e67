"""The ways by which ranks with Triton kernels add, and a trial of which is fastest for each size of a message."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from fastgen.compile.backends.kernels import KernelSet
from fastgen.compile.backends.modules.collectives import SHOTS, AllReduce
from fastgen.compile.build.builder import Kernel
from fastgen.compile.capture.cuda_graph import GraphPool
from fastgen.compile.host.ranks import Ranks
from fastgen.compile.ops.overlap import overlapped
from fastgen.compile.ops.ranks.triton import SumPartsKernel, SymmetricSumKernel, sum_parts_spec, symmetric_sum_spec
from fastgen.compile.spec import KernelSpec, dtype_name

_log = logging.getLogger(__name__)
_NAMES = ("the library", "one shot", "two shots")  # by the number of shots through symmetric memory
_NUM_SUMS = 10  # of a captured step whose time is taken
_NUM_TURNS = 5


class RankSums:
    """Makes the sums over ranks of a backend, one for each dtype, of ``kernels`` for ``arch``."""

    def __init__(self, kernels: KernelSet, arch: str):
        self._kernels, self._arch = kernels, arch
        self._sums: dict[torch.dtype, AllReduce] = {}

    def all_reduce(self, ranks: Ranks, num_ranks: int, dtype: torch.dtype) -> AllReduce:
        """Returns the sum of numbers of ``dtype``, the same object each time."""
        if dtype not in self._sums:
            self._sums[dtype] = self._new(ranks, num_ranks, dtype)
        return self._sums[dtype]

    def _new(self, ranks: Ranks, num_ranks: int, dtype: torch.dtype) -> AllReduce:
        name, memory = dtype_name(dtype), ranks.symmetric
        sums = AllReduce(ranks, num_ranks, SumPartsKernel(self._kernel(sum_parts_spec(num_ranks, name))))
        if memory is not None:
            kernels = [self._kernel(symmetric_sum_spec(num_ranks, name, shots)) for shots in (1, 2)]
            sums.through_memory = SymmetricSumKernel(kernels, memory, ranks.index)
            sums.shots = {} if memory.is_measured else dict(SHOTS)
        return sums

    def _kernel(self, spec: KernelSpec) -> Kernel:
        return self._kernels.kernel(overlapped(spec, self._arch))

    def choose(
        self, ranks: Ranks, row_counts: Iterable[int], num_features: int, device: torch.device, pool: GraphPool
    ) -> None:
        """Chooses the way of each size of a message by :func:`choose_shots`, and closes the ``pool``."""
        with pool.fence.open():
            for dtype, sums in self._sums.items():
                choose_shots(sums, ranks, row_counts, num_features, torch.empty(0, dtype=dtype, device=device), pool)
        pool.close()


def choose_shots(
    sums: AllReduce, ranks: Ranks, row_counts: Iterable[int], num_features: int, like: Tensor, pool: GraphPool
) -> None:
    """Fills ``sums.shots`` for messages of ``row_counts`` rows of ``num_features`` numbers, of the dtype and device of
    ``like``. All ranks call it at once, each with a ``pool`` that captures nothing else.

    A way whose sum has other bits than the library's is not used. Ways take as long as on the slowest rank. All ranks
    get the same times, so they choose the same.
    """
    generator = torch.Generator().manual_seed(ranks.index)
    for num_rows in row_counts:
        numbers = torch.randn(num_rows, num_features, generator=generator).to(like)
        bits = numbers.nbytes.bit_length()
        if bits in sums.shots or not sums.has_room(numbers):
            continue
        expected = sums.by(0, numbers.clone())
        costs_s = []
        for way in range(len(_NAMES)):
            is_same = torch.equal(sums.by(way, numbers.clone()), expected)
            costs_s.append(_time_s(partial(sums.by, way, torch.zeros_like(numbers)), pool, like.device))
            if not is_same:
                costs_s[-1] = math.inf
        slowest = torch.tensor(costs_s, device=like.device)
        ranks.all_max(slowest)
        sums.shots[bits] = way = int(slowest.argmin())
        times = ", ".join(f"{each * 1e6:.1f}" for each in slowest.tolist())
        _log.info("%s bytes are added by %s, of %s with %s µs", numbers.nbytes, _NAMES[way], _NAMES, times)


def _time_s(add: Callable[[], object], pool: GraphPool, device: torch.device) -> float:
    """Returns how long ``add`` takes in a captured step, in seconds: the least of several turns."""

    def step() -> None:
        for _ in range(_NUM_SUMS):
            add()

    graph, times_s = pool.capture("sums", step), []
    for _ in range(_NUM_TURNS):
        _finish(device)
        began_s = time.perf_counter()
        graph.replay()
        _finish(device)
        times_s.append((time.perf_counter() - began_s) / _NUM_SUMS)
    return min(times_s)


def _finish(device: torch.device) -> None:
    """Waits until all that was launched is computed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
