"""Runs the tests of Triton kernels that are slow where kernels are interpreted: wide sweeps, whole models of every
family, an engine under mixed requests."""

from __future__ import annotations

from benchmarks.gpu import gpu_tests
from benchmarks.gpu.measuring import Bench, Rows


def measure(bench: Bench) -> Rows:
    yield from gpu_tests.measure(bench, "kernels and slow")
