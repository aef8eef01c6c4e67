"""Shared by the parts of the GPU benchmark: the device, its clock, and its limits.

A *part* is a module of this folder with a function ``measure(bench)`` that yields rows, plain dictionaries: a ``case``
by name, ``seconds``, and the fraction of the machine's own limits that this is.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import triton

from benchmarks.cpu.results import commit
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder, triton_arch
from fastgen.compile.host import device as devices
from fastgen.lab.machine import processor
from fastgen.version import __version__

Row = dict[str, Any]
Rows = Iterator[Row]

_CACHE_BYTES = 512 << 20  # more than any GPU caches
_REPEATED_MS = 20  # that a case is replayed for, ten times over
_CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")


@dataclass(frozen=True)
class Limits:
    """Holds what this machine reaches: bytes read and written a second by a copy, FLOP/s of a large bf16 GEMM. A copy
    is the driver's or a kernel's, whichever is faster.
    """

    copy_bytes_per_s: float
    gemm_flops_per_s: float


@dataclass(frozen=True)
class Bench:
    """Holds the device that a part measures. ``toy`` runs the code on a CPU with interpreted kernels, where times mean
    nothing.
    """

    device: devices.Device
    loader: KernelLoader
    limits: Limits
    toy: bool

    @property
    def where(self) -> torch.device:
        return self.device.torch_device

    @property
    def gate_runs(self) -> int:
        """Returns how often a gate runs a kernel, which must give the same bits each time."""
        return 2 if self.toy else 20

    @property
    def num_sms(self) -> int:
        return self.device.num_sms or 2

    def seconds(self, run: Callable[[], Any]) -> float:
        """Returns the median time of a call, replayed from a CUDA graph so that launches from Python do not count."""
        if self.toy:
            return once(run)
        return _replayed_seconds(run)

    def rotated_seconds(self, runs: list[Callable[[], Any]]) -> float:
        """Returns the median time of one of ``runs``, which do the same in buffers of their own, in sequence."""

        def run_all() -> None:
            for run in runs:
                run()

        run_all()
        return self.seconds(run_all) / len(runs)

    def num_copies(self, num_bytes: int) -> int:
        """Returns how many buffers of that size it takes so that caches do not hold them until the next round."""
        return 2 if self.toy else 1 + min(64, _CACHE_BYTES // num_bytes)

    def attempt(self, case: str, measure: Callable[[], Row]) -> Row:
        """Returns the row of a case, or a row with the reason why there is none."""
        try:
            return {"case": case, **measure()}
        except Exception as error:
            return {"case": case, "error": f"{type(error).__name__}: {error}"}
        finally:
            if not self.toy:
                torch.cuda.empty_cache()

    def attempt_gate(self, what: str, check: Callable[[], float]) -> Row:
        """Returns the row of the numeric gate of ``what``: the largest difference, or why it is not passed."""
        return self.attempt(f"numeric gate, {what}", lambda: {"difference": check()})


def make_bench(*, toy: bool) -> Bench:
    if toy:
        return Bench(devices.current("cpu"), KernelLoader(TritonBuilder("interpret")), Limits(1e9, 1e9), toy=True)
    device = devices.current("cuda")
    devices.accumulate_in_fp32()
    limits = _machine_limits()
    torch.cuda.empty_cache()
    return Bench(device, KernelLoader(TritonBuilder(triton_arch(device))), limits, toy=False)


def _machine_limits() -> Limits:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    words, target_words = source.view(torch.int32), target.view(torch.int32)
    copies = (lambda: target.copy_(source), lambda: torch.bitwise_not(words, out=target_words))

    return Limits(
        copy_bytes_per_s=2 * source.numel() / min(map(_replayed_seconds, copies)),
        gemm_flops_per_s=2 * 8192**3 / _replayed_seconds(lambda: torch.mm(a, b, out=product)),
    )


def _replayed_seconds(run: Callable[[], Any]) -> float:
    """See :meth:`Bench.seconds`. The library runs it on a stream of its own, which waits for nothing that was launched
    before: what ``run`` reads, ids and addresses of memory among it, must be there by then."""
    torch.cuda.synchronize()
    return float(triton.testing.do_bench_cudagraph(run, rep=_REPEATED_MS, return_mode="median")) / 1e3


def once(run: Callable[[], Any]) -> float:
    """Returns the seconds of one call on the host's clock."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextmanager
def clocked(owner: Any, name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds of calls of ``owner.name`` within the block, the device's work included, under ``name``."""
    call = getattr(owner, name)

    def clocked_call(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*given, **named)
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    setattr(owner, name, clocked_call)
    try:
        yield
    finally:
        setattr(owner, name, call)


def about_machine(*, toy: bool) -> Row:
    """Returns the date, the build, the machine and the versions of the software."""
    device = devices.current("cpu" if toy else "cuda")
    packages = {"fastgen": __version__} | {each: _version(each) for each in ("torch", "triton", "transformers")}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "device": device.name,
        "capability": device.capability,
        "num_sms": device.num_sms,
        "memory_bytes": device.memory_bytes,
        "toy": toy,
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **packages},
    }


def clocks() -> dict[str, str] | None:
    """Returns clocks, power and temperature of the first GPU in MHz, W and °C; ``None`` where its driver has none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(_CLOCKS, (value.strip() for value in found.split(",")), strict=False))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
