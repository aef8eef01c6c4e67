"""Chooses by a measurement how a CPU multiplies bf16: by its bf16 dots, or widened to fp32.

Cores differ in this: AMD's Zen 4 multiplies twice as many numbers a cycle by ``vdpbf16ps`` as by fused additions in
fp32, and Intel's cores half as many. Both ways are instruction sets that kernels are built for, ``avx512bf16`` and
``avx512vnni``; their kernels are the same but for this. They round differently, so the choice holds for a whole
machine: for every model in bf16, any number of rows, and attention too. A CPU with a matrix unit has no such choice.

It is measured once for a kernel cache (see :mod:`fastgen.compile.build.autotune`), with many rows. Few rows take as
long as memory takes to read the weights, which are of the same size either way.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen.compile.build.autotune import Measure, Tuning, Way, measures_here
from fastgen.compile.build.cpp import CppBuilder, cpp_arch, runnable_arches
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.device import Device
from fastgen.compile.host.thread_pool import ThreadPool, load_thread_pool
from fastgen.compile.ops.linear.cpp import LinearKernel, linear_spec
from fastgen.compile.weights.packed import WeightFormat

DOTS, WIDENED = "avx512bf16", "avx512vnni"
# The instruction sets to choose from, the default first, and the format of weights by which each is measured. Both are
# built for the first, since the second one's kernels have the same source there.
_FORMATS: dict[str, WeightFormat] = {DOTS: "bf16_dot", WIDENED: "bf16"}
PROBLEM = "products of bf16 by the CPU"
_GAIN = 0.9  # of the dots' time; widened products must be faster than that, else the dots are taken
_NUM_ROWS, _NUM_FEATURES = 192, 1024
_NUM_TURNS = 15


@dataclass(frozen=True)
class Bf16Choice:
    """The instruction set that kernels of models in bf16 are built for, and why."""

    arch: str
    reason: str


class InTurns:
    """Times calls by the processor's time of this thread, which does not count while others run.

    The first call is timed alone. Each later one takes turns with it, so that both have the same clock rate and the
    same neighbours; the median of the ratios is not moved by turns in which one of them was held up.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time):
        self._clock = clock
        self._first: Callable[[], None] | None = None
        self._first_s = 0.0

    def __call__(self, run: Callable[[], None]) -> float:
        """Returns the seconds that ``run`` takes."""
        if self._first is None:
            self._first = run
            self._first_s = statistics.median(self._seconds(run) for _ in range(_NUM_TURNS))
            return self._first_s
        ratios = [self._seconds(run) / self._seconds(self._first) for _ in range(_NUM_TURNS)]
        return statistics.median(ratios) * self._first_s

    def _seconds(self, run: Callable[[], None]) -> float:
        begin = self._clock()
        run()
        return max(self._clock() - begin, 1e-9)  # a coarse clock may stand still


def bf16_choice(
    device: Device, *, measures: bool = False, loader: KernelLoader | None = None, measure: Measure | None = None
) -> Bf16Choice | None:
    """Returns how a CPU multiplies bf16; ``None`` where it has no choice: without bf16 dots, or with a matrix unit.

    A known choice is taken. With ``measures`` an unknown one is measured, in much less than a second beside the
    building of two kernels, and kept; otherwise it is the dots. ``$FASTGEN_CPP_ARCH`` comes before both, and with
    ``FASTGEN_AUTOTUNE=0`` nothing is measured. ``loader`` and ``measure`` replace those of this machine. Raises
    :class:`fastgen.errors.CompilerNotFoundError`: what is known depends on the compiler.
    """
    arch = cpp_arch(device)
    if os.environ.get("FASTGEN_CPP_ARCH") and DOTS in runnable_arches(device) and arch in _FORMATS:
        return Bf16Choice(arch, "FASTGEN_CPP_ARCH")
    if arch != DOTS:
        return None
    loader = loader or KernelLoader(CppBuilder(DOTS))
    clock = (measure or InTurns()) if measures and measures_here() else None
    tuning = Tuning(loader, loader.cache.directory, device.name, clock, gain=_GAIN)
    ways = [
        Way({"arch": each}, (linear_spec(_FORMATS[each], DOTS),), partial(_start, each, loader)) for each in _FORMATS
    ]
    if clock is None or tuning.kept(PROBLEM, ways) is not None:
        place = tuning.choose(PROBLEM, ways, may_measure=False)
    else:
        # One of several processes measures, and the others find its choice.
        with loader.cache.locked("bf16"), _on_one_thread(load_thread_pool(loader)):
            place = tuning.choose(PROBLEM, ways, may_measure=True)
    return Bf16Choice(str(ways[place].choice["arch"]), _reason(place, tuning.kept(PROBLEM, ways)))


@contextmanager
def _on_one_thread(pool: ThreadPool) -> Iterator[None]:
    num_threads = pool.num_threads
    pool.resize(1)
    try:
        yield
    finally:
        pool.resize(num_threads)


def _start(arch: str, loader: KernelLoader) -> tuple[Callable[[], None], Tensor]:
    """Returns the product of many rows. The numbers are bf16, so that both ways compute the same."""
    kernel = LinearKernel(loader.load(linear_spec(_FORMATS[arch], DOTS)), _NUM_ROWS, _NUM_FEATURES)
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(count, _NUM_FEATURES, generator=generator).bfloat16() for count in (_NUM_ROWS, _NUM_FEATURES)
    )
    packed, rows, out = kernel.pack(*weight.shape), x.float(), torch.empty(_NUM_ROWS, _NUM_FEATURES)
    packed.write(0, weight)
    return partial(kernel, rows, packed, out), out


def _reason(place: int, kept: Mapping[str, Any] | None) -> str:
    """Says why the choice is the one at ``place``, by what was ``kept`` of measuring it."""
    if kept is None:
        return "not measured"
    seconds = [each for _, each in kept["seconds"]]
    if len(seconds) < len(_FORMATS):
        return "measured"
    other = [*_FORMATS][1 - place]
    return f"measured: {seconds[1 - place] / seconds[place]:.2f} times as fast as {other}"
