"""Builds the kernels of the GPU benchmark ahead of time, into one archive: no GPU needs to be here.

`python -m benchmarks.gpu.prebuilt [--output FILE] [--target sm_90] [--parts a,b] [--device NAME]` lets each part make
its kernels on torch's `meta` device, builds them, and prints the archive's size and how to unpack it. Run it with the
Python and the Triton of the machine with the GPU: a kernel cache holds entries of one installation
(docs/kernels.md#the-cache). Kernels of the parts `tests`, `long_tests` and `sanitize` are not in it.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu import attention, elementwise, few_row_linear, moe, sampling
from benchmarks.gpu.llama import LLAMA_2_7B, llama_spec
from benchmarks.gpu.measuring import Bench, Limits, Row
from fastgen.compile.backends.choose import backend_of
from fastgen.compile.build.autotune import Tuning, Way
from fastgen.compile.build.builder import Kernel
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.build.triton_worker import parse_arch
from fastgen.compile.build.tuned import tuning_for
from fastgen.compile.host.device import Device
from fastgen.compile.ops.linear.tiling import usual_num_sms
from fastgen.compile.spec import KernelSpec
from fastgen.models.builder import build
from fastgen.runtime.config import DEFAULT_BLOCK_SIZE

META = torch.device("meta")
_PARTS: dict[str, Any] = {
    each.__name__.rpartition(".")[2]: each for each in (attention, elementwise, few_row_linear, moe, sampling)
}
MODEL = "model"  # the kernels of the engine of `decode`, `profile`, `splitfuse`, `start`, `transformers` and `http`
# The numbers of slots that those parts' engines have; attention's plan is built for each.
_SLOTS = (256, 64, 32)


class _Named:
    """Stands in for a kernel: launches nothing."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        pass


class Collector(KernelLoader):
    """Notes the kernels that it is asked for, and builds nothing until :meth:`build_all`."""

    def __init__(self, builder: TritonBuilder):
        super().__init__(builder)
        self.specs: dict[KernelSpec, None] = {}

    def load(self, spec: KernelSpec) -> Kernel:
        self.specs[spec] = None
        return _Named(spec)  # type: ignore[return-value]

    def build(self, specs: Any, progress: Any = None) -> list[Any]:
        self.specs.update(dict.fromkeys(specs))
        return []

    def build_all(self, progress: Callable[[int, int], None]) -> list[Any]:
        """Builds what was noted. Returns the entries."""
        return super().build(self.specs, progress)


class CollectingTuning(Tuning):
    """Takes what is known or the default, and notes the kernels of every way."""

    def choose(self, problem: str, ways: Any, *, may_measure: bool) -> int:
        every: list[Way] = list(ways)
        self.loader.build([spec for way in every for spec in (*way.specs, *way.beside)])
        return super().choose(problem, every, may_measure=False)


class CollectingBench(Bench):
    """Measures nothing: a part only makes its subjects."""

    @property
    def where(self) -> torch.device:
        return META

    def seconds(self, run: Callable[[], Any]) -> float:
        return 1.0

    def rotated_seconds(self, runs: list[Callable[[], Any]]) -> float:
        return 1.0

    def num_copies(self, num_bytes: int) -> int:
        return 1

    def attempt(self, case: str, measure: Callable[[], Row]) -> Row:
        row = super().attempt(case, measure)
        return {"case": case} if "error" in row else row  # what has no numbers fails, and its kernels are noted by then


def collect(loader: Collector, parts: list[str]) -> None:
    """Notes the kernels of these parts."""
    device = Device("cuda", "a GPU", 141 << 30, index=0, capability=(9, 0), num_sms=usual_num_sms(loader.builder.arch))
    bench = CollectingBench(device, loader, Limits(1.0, 1.0), toy=False)
    for name in parts:
        if name == MODEL:
            collect_model(loader)
        else:
            for _ in _PARTS[name].measure(bench):
                pass


def collect_model(loader: Collector) -> None:
    """Notes the kernels of a Llama-2-7B engine, and all those that its tuning would measure."""
    spec = llama_spec(LLAMA_2_7B)
    for max_num_seqs in _SLOTS:
        backend = backend_of(
            loader, max_rows=2048, max_num_seqs=max_num_seqs, num_sms=usual_num_sms(loader.builder.arch)
        )
        build(
            spec,
            dtype=LLAMA_2_7B.dtype,
            device=META,
            max_model_len=LLAMA_2_7B.max_positions,
            backend=backend,
            block_size=DEFAULT_BLOCK_SIZE["cuda"],
        )
        loader.build([*backend.specs(), *backend.engine_specs(spec.vocab_size)])


def write(loader: Collector, output: Path, progress: Callable[[int, int], None]) -> int:
    """Builds what was noted, and writes the entries and the kept choices of tuning into ``output``. Returns how many
    kernels there are."""
    entries = loader.build_all(progress)
    directory = loader.cache.directory
    with tarfile.open(output, "w:xz") as archive:
        for entry in sorted({entry.directory for entry in entries}):
            archive.add(entry, entry.name)
        if (directory / ".tuning").is_dir():
            archive.add(directory / ".tuning", ".tuning")
    return len(entries)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.prebuilt", description=__doc__.splitlines()[0])
    every = [MODEL, *_PARTS]
    parser.add_argument("--output", type=Path, default=Path("prebuilt.tar.xz"))
    parser.add_argument("--target", default="sm_90", help="the GPU's architecture")
    parser.add_argument("--device", help='take the choices tuned for this GPU, such as "NVIDIA H200"')
    parser.add_argument("--parts", default=",".join(every), help=f"of {', '.join(every)}; by default all")
    parser.add_argument("--list", action="store_true", help="print the kernels, and build nothing")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts.split(",") if name not in every]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(every)}")
    parse_arch(options.target)
    loader = Collector(TritonBuilder(options.target))
    known = Tuning(loader) if options.device is None else tuning_for(options.device, loader)
    loader.tuning = CollectingTuning(loader, known.directory, known.device_name)
    collect(loader, options.parts.split(","))
    if options.list:
        print("\n".join(sorted(spec.name for spec in loader.specs)))
        return 0
    count = write(loader, options.output, lambda done, total: print(f"\r{done} of {total}", end="", file=sys.stderr))
    size = options.output.stat().st_size / 2**20
    print(f"\n{options.output}: {count} kernels for {options.target}, {size:.1f} MiB")
    print(
        f"for Python {platform.python_version()} and Triton {triton.__version__} as installed here; to unpack it there:"
    )
    print(f'mkdir -p -m 700 "$FASTGEN_CACHE" && tar -xJf {options.output.name} -C "$FASTGEN_CACHE"')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
