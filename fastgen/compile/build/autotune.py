"""Chooses the fastest of several ways to compute the same on this device: measures at warm-up, and keeps the result.

An op lists its ways, the default first, and calls :meth:`Tuning.choose`. A known choice is taken: from a sealed bundle,
from the kernel cache, or from ``tuned_devices.json``, which ships the choices for devices that were measured. Otherwise
the ways are measured where there is a clock for the device and warm-up is not over; else the default is taken. A way
may win only if it is built with few spills and computes the same as the default.

Choices are in the kernel cache, one file each, named after everything that they depend on: the device's name, the
tools' versions, the sources of every way. So an outdated choice is never found, and a damaged one is measured again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import statistics
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fastgen.compile.build.builder import Builder
from fastgen.compile.build.cache import Entry, KernelCache, remove
from fastgen.compile.build.fence import Fence
from fastgen.compile.build.sources import body_hash
from fastgen.compile.spec import KernelSpec
from fastgen.errors import KernelError

Choice = Mapping[str, Any]
# Returns the seconds that a call takes.
Measure = Callable[[Callable[[], None]], float]

SHIPPED = Path(__file__).with_name("tuned_devices.json")
DIRECTORY = ".tuning"  # of the kernel cache, which removes with its entries all that begins with a dot
_GAIN = 0.97  # of the default's time on a GPU
_TOLERANCES = {torch.float32: 1e-4}  # of the largest number; sums in another order
_NUM_REPLAYS = 25
_MOST_SPILLED = 128  # bytes a thread; more is not worth measuring
_LONGEST_NAME = 100  # characters of a problem in a file's name, which file systems limit to 255 bytes
_TOLERANCE = 2e-2  # where they are rounded to 16 bits
_log = logging.getLogger(__name__)


class Loader(Protocol):
    """The part of a kernel loader that tuning uses."""

    builder: Builder
    cache: KernelCache
    fence: Fence

    def build(self, specs: Iterable[KernelSpec]) -> Sequence[Entry]:
        """See :meth:`fastgen.compile.build.loader.KernelLoader.build`."""


@dataclass(frozen=True)
class Way:
    """A way to compute an op. ``choice``, plain data, distinguishes it from the others; ``specs`` are its kernels.

    ``beside`` are kernels that it launches too, and whose sources may change without changing the choice. ``start``
    prepares it on the device and returns the call to be timed, and the tensor that the call fills.
    """

    choice: Choice
    specs: tuple[KernelSpec, ...]
    start: Callable[[], tuple[Callable[[], None], Tensor]]
    beside: tuple[KernelSpec, ...] = ()


@dataclass
class Tuning:
    """The choices of one engine. Without ``measure`` nothing is measured; ``known`` are a sealed bundle's choices.

    ``device_name`` is the measured device's, ``None`` where there is none; ``directory`` the kernel cache's. Another
    way than the default must take less than ``gain`` of its time, so that measuring again gives the same choice.
    """

    loader: Loader
    directory: Path | None = None
    device_name: str | None = None
    measure: Measure | None = None
    known: Mapping[str, Choice] = field(default_factory=dict)
    gain: float = _GAIN
    # Every choice so far, by problem.
    chosen: dict[str, Choice] = field(default_factory=dict)

    def choose(self, problem: str, ways: Sequence[Way], *, may_measure: bool) -> int:
        """Returns the index of the way to take; the first of ``ways`` is the default.

        ``problem`` names the computation and its sizes; the same problem always has the same ways.
        """
        choices = [way.choice for way in ways]
        if (known := self.chosen.get(problem)) is None:
            known = self._known(problem, ways)
            if known not in choices:
                known = choices[0]
                if may_measure and self.measure is not None and not self.loader.fence.closed:
                    known = self._fastest(problem, ways)
            self.chosen[problem] = known
        return choices.index(known)

    def _known(self, problem: str, ways: Sequence[Way]) -> Choice | None:
        if problem in self.known:
            return self.known[problem]
        if self.device_name is None:
            return None
        if (kept := self.kept(problem, ways)) is not None:
            choice: Choice = kept["choice"]
            return choice
        return shipped().get(self.device_name, {}).get(problem)

    def kept(self, problem: str, ways: Sequence[Way]) -> Mapping[str, Any] | None:
        """Returns what the kernel cache keeps of measuring these ways: their ``choice``, and the ``seconds`` that those
        which could be measured took, as pairs with their choices; ``None`` where it keeps nothing.
        """
        if self.directory is None:
            return None
        file, key = self._file(problem, ways)
        try:
            kept: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return kept if kept["key"] == key and kept.keys() >= {"choice", "seconds"} else None
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return None

    def _fastest(self, problem: str, ways: Sequence[Way]) -> Choice:
        """Measures the ways and keeps the result. A way that fails is skipped; if the default fails, it is taken
        without measuring the others. So tuning never keeps an engine from starting.
        """
        with suppress(KernelError):  # several at a time; which one fails shows below
            self.loader.build([spec for way in ways for spec in (*way.specs, *way.beside)])
        seconds: dict[int, float] = {}
        expected: Tensor | None = None
        for place, way in enumerate(ways):
            why = "what it computes is not finite"
            try:
                if place and any(_spills_much(entry) for entry in self.loader.build(way.specs)):
                    continue
                run, out = way.start()
                run()
                if expected is None:
                    expected = out.clone()
                if _same(out, expected):
                    assert self.measure is not None
                    seconds[place] = self.measure(run)
                else:
                    _log.debug("%s: %s is passed over: it gives another answer", problem, way.choice)
            except (KernelError, RuntimeError, ValueError) as error:
                why = str(error)
                _log.debug("%s: %s is passed over: %s", problem, way.choice, error)
            if 0 not in seconds:
                _log.warning("%s: the default cannot be measured, so it is taken as it is: %s", problem, why)
                return ways[0].choice
        best = min(seconds, key=lambda place: seconds[place])
        place = best if seconds[best] < self.gain * seconds[0] else 0
        self._keep(problem, ways, place, seconds)
        return ways[place].choice

    def _keep(self, problem: str, ways: Sequence[Way], place: int, seconds: Mapping[int, float]) -> None:
        if self.directory is None:
            return
        file, key = self._file(problem, ways)
        found = [[dict(ways[each].choice), seconds[each]] for each in seconds]
        kept = {"key": key, "choice": dict(ways[place].choice), "seconds": found}
        unfinished = file.with_name(f".{uuid.uuid4().hex}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            os.replace(unfinished, file)
        except OSError as error:
            remove(unfinished)
            _log.warning("what was measured of %s cannot be kept: %s", problem, error)

    def _file(self, problem: str, ways: Sequence[Way]) -> tuple[Path, dict[str, Any]]:
        """Returns the file of the choice, and everything that it depends on."""
        key = {
            "problem": problem,
            "device": self.device_name,
            "arch": self.loader.builder.arch,
            "versions": {**self.loader.builder.versions(), "torch": torch.__version__},
            "ways": [[dict(way.choice), [body_hash(spec) for spec in way.specs]] for way in ways],
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        assert self.directory is not None
        readable = re.sub(r"[^a-z0-9]+", "_", problem.lower())[:_LONGEST_NAME]
        return self.directory / DIRECTORY / f"{readable}-{digest}.json", key


def _spills_much(entry: Entry) -> bool:
    return int(entry.report.get("spill_bytes") or 0) > _MOST_SPILLED


def tuning_here(loader: Loader) -> Tuning:
    """Returns the tuning of this machine's GPU, if ``loader`` builds for it; else one that takes defaults.

    With ``FASTGEN_AUTOTUNE=0`` in the environment nothing is measured; known choices are taken nevertheless.
    """
    if loader.builder.launches_natively or not torch.cuda.is_available():
        return Tuning(loader)
    from fastgen.compile.build.triton import triton_arch
    from fastgen.compile.host.device import current

    device = current(f"cuda:{torch.cuda.current_device()}")
    if triton_arch(device) != loader.builder.arch:
        return Tuning(loader)
    return Tuning(loader, loader.cache.directory, device.name, _measure_on_gpu if measures_here() else None)


def measures_here() -> bool:
    """Returns whether unknown choices may be measured: ``$FASTGEN_AUTOTUNE`` is not 0."""
    return os.environ.get("FASTGEN_AUTOTUNE") != "0"


def _measure_on_gpu(run: Callable[[], None]) -> float:
    """Returns the median time of replays of a CUDA graph, which excludes launching from Python."""
    stream, graph = _measuring_stream(torch.cuda.current_device()), torch.cuda.CUDAGraph()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_NUM_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
        for mark in marks[:-1]:
            mark.record()
            graph.replay()
        marks[-1].record()
        torch.cuda.synchronize()
    graph.reset()
    milliseconds = [float(begin.elapsed_time(end)) for begin, end in itertools.pairwise(marks)]
    return statistics.median(milliseconds) / 1e3


@cache
def _measuring_stream(device_index: int) -> torch.cuda.Stream:
    """Returns the one stream of all measurements, since torch keeps memory for each stream on which its library
    multiplies.
    """
    return torch.cuda.Stream(device_index)  # type: ignore[no-untyped-call]


def _same(out: Tensor, expected: Tensor) -> bool:
    """Returns whether ``out`` is finite and equals ``expected``, up to what rounding and the order of sums change."""
    largest = expected.abs().amax().float()
    difference = (out.float() - expected.float()).abs().amax()
    return bool(largest.isfinite() and difference <= _TOLERANCES.get(out.dtype, _TOLERANCE) * largest)


def shipped() -> Mapping[str, Mapping[str, Choice]]:
    """Returns the shipped choices by device and problem."""
    devices: Mapping[str, Mapping[str, Choice]] = json.loads(SHIPPED.read_text(encoding="utf-8"))["devices"]
    return devices
