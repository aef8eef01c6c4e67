"""Captures launches of C++ kernels and replays them elsewhere.

The replay uses kernels that were built with other flags or for another machine. It runs in a process of its own, in
memory of exactly the size of the arguments.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.cpp import CppBuilder, CppKernel
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.capture.recording import recording
from fastgen.compile.capture.tape import tape_spec
from fastgen.compile.host.thread_pool import thread_pool_spec
from fastgen.compile.spec import Argument, KernelSpec, torch_dtype

# Between two numbers of 16 bits, relative: one rounding may tip over.
UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-10}


@dataclass(frozen=True)
class Memory:
    """Holds bytes that arguments of one launch share, before and after it. ``shift`` is their address modulo 16."""

    begin: int
    before: bytes
    after: bytes
    # The argument that it is written as, unless it is only read or room to work in.
    written: Argument | None

    @property
    def shift(self) -> int:
        return self.begin % 16

    def difference(self, found: bytes, tolerance: float) -> float:
        """Returns how far the computed numbers are from the captured ones, as a fraction of the largest number.

        It is 0 within ``tolerance``, and for memory that is not read later. Integers must be equal.
        """
        if self.written is None or found == self.after:
            return 0.0
        dtype = torch_dtype(self.written.dtype)
        if not dtype.is_floating_point or not tolerance:
            return float("inf")
        one, other = (torch.frombuffer(bytearray(each), dtype=dtype).double() for each in (self.after, found))
        is_finite = one.isfinite()
        if not torch.equal(one[~is_finite].nan_to_num(), other[~is_finite].nan_to_num()):
            return float("inf")
        one, other = one[is_finite], other[is_finite]
        error = (one - other).abs() - UNITS.get(self.written.dtype, 0.0) * one.abs()
        worst = float(error.max() / one.abs().max().clamp_min(1e-30))
        return 0.0 if worst <= tolerance else worst


@dataclass(frozen=True)
class CapturedLaunch:
    spec: KernelSpec
    memories: list[Memory]
    # For each argument a memory's index and a place in it, or −1 and the number's bits.
    slots: list[tuple[int, int]]

    def packed(self, kernel_index: int) -> bytes:
        """As ``replay.cpp`` reads it: words of 64 bits, and each memory's bytes behind its two."""
        parts = [_words(kernel_index, len(self.memories))]
        for memory in self.memories:
            parts += [_words(len(memory.before), memory.shift), memory.before]
        return b"".join([*parts, _words(len(self.slots)), *(_words(*slot) for slot in self.slots)])


class Capture:
    """A recorder that runs launches and stores them with the contents of memory before and after."""

    def __init__(self) -> None:
        self.launches: list[CapturedLaunch] = []

    def launch(self, kernel: CppKernel, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        declared = list(zip(kernel.spec.arguments, arguments, strict=True))
        tensors = [(argument, given) for argument, given in declared if isinstance(given, Tensor) and given.data_ptr()]
        ranges = _merged([_range(tensor) for _, tensor in tensors])
        before = [ctypes.string_at(begin, end - begin) for begin, end in ranges]
        slots = []
        for bits, (argument, given) in zip(kernel.slots(arguments), declared, strict=True):
            home = -1 if not argument.is_pointer or not bits else _home(_range(given), ranges)
            slots.append((home, bits if home < 0 else bits - ranges[home][0]))
        kernel.launch(grid, *arguments)
        written: list[Argument | None] = [None] * len(ranges)
        for argument, tensor in tensors:
            if argument.kind == "out" and not argument.name.startswith("workspace"):
                written[_home(_range(tensor), ranges)] = argument
        memories = [
            Memory(begin, bytes_before, ctypes.string_at(begin, end - begin), as_what)
            for (begin, end), bytes_before, as_what in zip(ranges, before, written, strict=True)
        ]
        self.launches.append(CapturedLaunch(kernel.spec, memories, slots))

    def library_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        function(*args, **kwargs)


@contextmanager
def captured() -> Iterator[list[CapturedLaunch]]:
    """Captures the launches within the block."""
    capture = Capture()
    with recording(capture):
        yield capture.launches


class FlaggedBuilder(CppBuilder):
    """A builder with additional flags. Other processes load what it builds."""

    def __init__(self, arch: str, flags: Sequence[str] = (), compiler: str = ""):
        super().__init__(arch, compiler)
        self.flags = (*self.flags, *flags)


class Replayer:
    """Replays captured launches with the kernels of ``builder``; ``prefix`` is a command that runs its programs."""

    def __init__(self, builder: CppBuilder, directory: Path, prefix: Sequence[str] = ()):
        self._builder, self._directory, self._prefix = builder, directory, prefix
        self.loader = KernelLoader(builder, cache=KernelCache(directory / "kernels"))

    def run(self, launches: Sequence[CapturedLaunch], *, tolerance: float = 0.0) -> None:
        """Asserts that the program ends well, says nothing, and computes the same: bitwise, or within ``tolerance`` of
        the largest number where one is given."""
        specs = list(dict.fromkeys(launch.spec for launch in launches))
        functions = ["fastgen_set_num_threads", tape_spec().name, *(f"{spec.name}_from_slots" for spec in specs)]
        entries = self.loader.build([thread_pool_spec(), tape_spec(), *specs])
        pairs = zip((entry.source.with_suffix(".so") for entry in entries), functions, strict=True)
        kernels, captured, results = (self._directory / name for name in ("kernels.txt", "launches", "results"))
        kernels.write_text("".join(f"{library}\n{function}\n" for library, function in pairs))
        with captured.open("wb") as file:
            file.write(_words(len(launches)))
            file.writelines(launch.packed(specs.index(launch.spec)) for launch in launches)
        command = [*self._prefix, *map(str, (self._program, kernels, captured, results))]
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # kernels allocate nothing
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", check=False, timeout=1200
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr
        with results.open("rb") as file:
            for launch in launches:
                for memory in launch.memories:
                    difference = memory.difference(file.read(len(memory.before)), tolerance)
                    assert not difference, f"{launch.spec}: {memory.written} differs by {difference:.1e}"
            assert not file.read()

    @cached_property
    def _program(self) -> Path:
        program = self._directory / "replay"
        if program.exists():
            return program
        flags = [flag for flag in self._builder.flags if flag not in ("-shared", "-fno-exceptions")]
        source = Path(__file__).with_name("replay.cpp")
        command = [self._builder.compiler, *flags, str(source), "-o", str(program), "-pthread", "-ldl"]
        subprocess.run(command, check=True)
        return program


def _range(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor's first byte and of the byte after its last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + count * tensor.itemsize


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges ranges that overlap."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(set(ranges)):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _home(inner: tuple[int, int], ranges: list[tuple[int, int]]) -> int:
    return next(i for i, (begin, end) in enumerate(ranges) if begin <= inner[0] and inner[1] <= end)


def _words(*words: int) -> bytes:
    return struct.pack(f"={len(words)}q", *words)
