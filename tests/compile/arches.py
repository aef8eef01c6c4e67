"""The C++ instruction sets whose kernels tests run on this machine, and a loader for each."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch, runnable_arches
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool

CPU = device.current("cpu")
HERE = cpp_arch(CPU)
# Those whose instructions this machine has.
NATIVE = CPP_ARCHES[CPP_ARCHES.index(HERE) :]
# Those whose instructions are emulated.
EMULATED = tuple(arch for arch in runnable_arches(CPU) if arch not in NATIVE)
ARCHES = (*EMULATED, *NATIVE)

_LANES = {"avx2": 8, "portable": 4}  # all others have 16
# The best instruction set of each width. Kernels without dots of bytes or bf16 have the same source on all sets of one
# width (`test_arches.py`), so one of them is enough for the fast tests.
WIDTHS = tuple({_LANES.get(arch, 16): arch for arch in reversed(NATIVE)}.values())


def in_each_width(arches: Iterable[str] = ARCHES) -> list[Any]:
    """Returns instruction sets as parameters of a test, all but :data:`WIDTHS` for the slow tests alone."""
    return [pytest.param(arch, marks=[] if arch in WIDTHS else pytest.mark.slow) for arch in arches]


@cache
def loader(arch: str) -> KernelLoader:
    loader = KernelLoader(CppBuilder(arch))
    load_thread_pool(loader)
    return loader
