"""The time from the start of a process to a model's first token, with an empty and with a filled kernel cache.

Every sample is a process of its own. *Cold* ones get an empty kernel cache, *warm* ones the cache of a process before
them. In both cases the system may hold the checkpoint's files in memory: emptying that needs an administrator.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from fastgen.errors import FastgenError
from fastgen.lab.metrics.figures import Figure
from fastgen.runtime.progress import progress_bar

Cache = Literal["cold", "warm"]
# What a process reports, in this order; each time is from the start of the process.
PHASES = ("imported", "loaded", "first_token")
NUM_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Startup:
    """The samples of both kinds: for each the seconds from the start of its process to each of :data:`PHASES`."""

    cold: tuple[Mapping[str, float], ...]
    warm: tuple[Mapping[str, float], ...]
    interrupted: bool = False

    def figure(self, cache: Cache, phase: str) -> Figure:
        """Returns the median of a phase and the range of its samples. The range covers the true median with a
        probability of ``1 - 2 ** (1 - n)``: 94 % for 5 samples, none for one."""
        values = [sample[phase] for sample in (self.cold if cache == "cold" else self.warm)]
        if not values:
            return Figure(None)
        return Figure(statistics.median(values), (min(values), max(values)) if len(values) > 1 else None)

    def as_json(self) -> dict[str, Any]:
        """Returns it with the names of ``vllm bench startup``, whose start-up ends when the model is loaded."""
        found: dict[str, Any] = {"interrupted": self.interrupted}
        for cache, samples in (("cold", self.cold), ("warm", self.warm)):
            times = [sample["loaded"] for sample in samples]
            found[f"avg_{cache}_startup_time"] = statistics.fmean(times) if times else None
            found[f"{cache}_startup_times"] = times
            found[f"{cache}_samples"] = [dict(sample) for sample in samples]
        return found


def startup(load: Mapping[str, Any], *, num_cold: int = 3, num_warm: int = 5) -> Startup:
    """Starts processes that load a model with the arguments ``load`` of :func:`fastgen.load`, the cold ones first.

    Ctrl-C ends it with what was measured.

    :raises FastgenError: if a process fails, with its own message.
    """
    found: dict[Cache, list[Mapping[str, float]]] = {"cold": [], "warm": []}
    cold: list[Cache] = ["cold"] * num_cold
    caches = cold + ["warm"] * num_warm
    is_interrupted = False
    with TemporaryDirectory(prefix="fastgen-startup-") as directory, progress_bar("processes") as progress:
        if num_warm and not num_cold:
            _sample(load, Path(directory, "warm"))  # fills the cache
        for number, cache in enumerate(caches):
            # The last cold process fills the cache of the warm ones.
            is_own = cache == "cold" and number != num_cold - 1
            try:
                found[cache].append(_sample(load, Path(directory, f"cold-{number}" if is_own else "warm")))
            except KeyboardInterrupt:
                is_interrupted = True
                break
            progress(number + 1, len(caches))
    return Startup(tuple(found["cold"]), tuple(found["warm"]), is_interrupted)


def _sample(load: Mapping[str, Any], cache: Path) -> dict[str, float]:
    began = time.perf_counter()
    with _process(load, cache) as process:
        assert process.stdout is not None
        times: dict[str, float] = {}
        for line in process.stdout:
            report = json.loads(line)
            if "error" in report:
                raise FastgenError(f"a process could not load the model: {report['error']}")
            times[report["phase"]] = time.perf_counter() - began
        status = process.wait()
    if list(times) != list(PHASES):
        raise FastgenError(f"a process ended with status {status} before its first token")
    return times


@contextmanager
def _process(load: Mapping[str, Any], cache: Path) -> Iterator[subprocess.Popen[str]]:
    """Yields a process of :mod:`fastgen.lab.experiments.startup_process`, which is gone when the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fastgen.lab.experiments.startup_process", json.dumps(load, default=str)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FASTGEN_CACHE": str(cache)},
    )
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
