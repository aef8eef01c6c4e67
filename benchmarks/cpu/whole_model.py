"""Compares fastgen with other engines on whole models: ``python -m benchmarks.cpu.whole_model MODELS --json FILE``.

Every engine runs in fresh processes of its own environment, one at a time, in rounds. Before an engine is timed, its
answers pass the numeric gate. Each run of a workload lies between two measurements of the machine's limits. Results
that the file has already are not measured again, so a run may be done in parts or continue where it was stopped.

Engines are found in the interpreters that are given, by what can be imported there:

    python -m benchmarks.cpu.whole_model models --json benchmarks/results/cpu_models.json \\
        --python envs/transformers/bin/python --python envs/vllm/bin/python --llama-server llama.cpp/bin/llama-server

``models`` is where ``benchmarks.cpu.models`` and ``benchmarks.cpu.convert`` put their files. ``benchmarks.cpu.report``
makes a page of the results.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cpu import workloads
from benchmarks.cpu.calibration import Calibration
from benchmarks.cpu.engine_process import EngineError, EngineProcess
from benchmarks.cpu.engines.protocol import ADAPTERS, BITS, Settings
from benchmarks.cpu.evidence import Figure
from benchmarks.cpu.figures import figures
from benchmarks.cpu.gate import Gate, GateError
from benchmarks.cpu.models import SHAPES
from benchmarks.cpu.results import Results
from benchmarks.cpu.targets import outside_kernels
from fastgen.compile.host import device

# Named like a workload: decode steps of fastgen alone, :mod:`benchmarks.cpu.decode_steps`.
STEPS = "steps"
_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")


def find_interpreters(pythons: Sequence[str]) -> dict[str, str]:
    """Returns for each engine the first interpreter that can import it."""
    found: dict[str, str] = {}
    for python in pythons:
        names = sorted({adapter.needs for adapter in ADAPTERS.values() if adapter.needs})
        code = f"import importlib.util as u; print(*(n for n in {names} if u.find_spec(n)))"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        for engine, adapter in ADAPTERS.items():
            if adapter.needs in done.stdout.split():
                found.setdefault(engine, python)
    return found


def preloads(python: str) -> list[str]:
    """Returns the libraries that vLLM wants preloaded, as far as they are installed."""
    root = Path(python).parent.parent
    places = [*root.glob("lib/*.so*"), *Path("/usr/lib").glob("*/*.so*")]
    found = {path.name: str(path) for path in reversed(places)}
    return [found[name] for name in _PRELOADED if name in found]


class Engines:
    """Holds one model and the engines that run it; each of their answers has passed the gate."""

    def __init__(self, options: argparse.Namespace, results: Results, logs: Path):
        self._options, self._results, self._logs = options, results, logs
        self.model: Path = options.models / options.model
        self._interpreters = find_interpreters([sys.executable, *options.python])
        if options.llama_server:
            self._interpreters["llama.cpp"] = sys.executable
        self._calibration = Calibration(options.num_threads)
        self.gate = Gate(self.model, options.num_threads)
        self._passed: dict[str, list[list[int]]] = {}

    def row(self, engine: str, weight_format: str) -> str:
        """Returns the name of an engine with a format in the results."""
        return f"{self.model.name} / {engine} / {weight_format}"

    def path(self, engine: str, weight_format: str) -> Path:
        """Returns the path of the weights."""
        return self.model.with_name(self.model.name + ADAPTERS[engine].formats[weight_format])

    def lacks(self, engine: str, weight_format: str) -> str | None:
        """Returns the reason why an engine cannot be measured, or an empty text."""
        if engine not in self._interpreters:
            return "not installed"
        path = self.path(engine, weight_format)
        return None if path.exists() else f"{path.name} is not there"

    def start(self, engine: str, weight_format: str) -> EngineProcess:
        """Starts a process with the model loaded. Raises :class:`EngineError`."""
        python, row = self._interpreters[engine], self.row(engine, weight_format)
        model = self.path(engine, weight_format).absolute()
        settings = Settings(model, weight_format, self._options.num_threads, self._options.llama_server)
        log = self._logs / f"{row.replace(' ', '').replace('/', '.')}.log"
        process = EngineProcess(python, engine, settings, log, preloads(python) if engine == "vllm-cpu" else ())
        self._results.note_engine(row, **process.about, load_seconds=round(process.load_seconds, 2))
        return process

    def prepare(self, process: EngineProcess, engine: str, weight_format: str, workload: str) -> None:
        """Prepares a workload, and checks the gate unless these very answers have passed it. Raises
        :class:`GateError`."""
        process.prepare(workload)
        row, tokens = self.row(engine, weight_format), process.run(workloads.GATE).tokens
        if self._passed.get(row) != tokens:
            worst = self.gate.check(workloads.make(workloads.GATE), tokens, weight_format)
            self._passed[row] = tokens
            self._results.note_engine(row, gate_below=round(worst, 5))

    def measure(self, process: EngineProcess, workload: str) -> dict[str, Any]:
        """Measures a run between two measurements of the machine's limits."""
        requests = workloads.make(workload)
        before = self._calibration.measure()
        run = process.run(workload)
        time.sleep(0.3)  # some engines' threads spin for a while
        after = self._calibration.measure()
        if [len(each) for each in run.tokens] != [each.num_new for each in requests]:
            raise EngineError(f"{workload}: not as many tokens as were asked for")
        return {"before": before, "after": after, **figures(requests, run)}

    def failed(self, row: str, error: Exception) -> None:
        print(f"  {type(error).__name__}: {error}", flush=True)
        reason = str(error).replace(str(self._options.models.absolute()), "MODELS")[:300]
        self._results.note_engine(row, absent=f"{type(error).__name__}: {reason}")


class Benchmark:
    """Measures everything with one model."""

    def __init__(self, options: argparse.Namespace, results: Results, logs: Path):
        self._options, self._results = options, results
        self._engines = Engines(options, results, logs)
        self._model = self._engines.model
        self._failed: set[str] = set()

    def run(self) -> None:
        for number in range(self._options.rounds):
            for engine in self._options.engines:
                for weight_format in ADAPTERS[engine].formats:
                    if weight_format in self._options.formats:
                        self._run_row(engine, weight_format, number)
            self._engines.gate.release()

    def _run_row(self, engine: str, weight_format: str, number: int) -> None:
        key = {"model": self._model.name, "engine": engine, "format": weight_format, "round": number}
        row = self._engines.row(engine, weight_format)
        if engine == "fastgen" and STEPS in self._options.workloads and not self._results.has_steps(**key):
            self._results.add("steps", **key, **self._steps(weight_format))
            for requests in (1, 16):
                share = outside_kernels(self._results.data, self._model.name, weight_format, requests)
                shown = f"{share.value:.1%}" if isinstance(share, Figure) else f"an unknown share ({share.reason})"
                print(f"  {shown} of a decode step of {requests} is without a kernel", flush=True)
        missing = [
            name for name in self._options.workloads
            if name != STEPS and not self._results.has_sample(**key, workload=name)
        ]  # fmt: skip
        if not missing or row in self._failed:
            return
        if lacking := self._engines.lacks(engine, weight_format):
            self._results.note_engine(row, absent=lacking)
            return
        print(f"{row}, round {number}: {' '.join(missing)}", flush=True)
        try:
            with self._engines.start(engine, weight_format) as process:
                for name in missing:
                    self._engines.prepare(process, engine, weight_format, name)
                    found = self._engines.measure(process, name)
                    print(f"  {name} {found['seconds']:.2f} s", flush=True)
                    self._results.add("samples", **key, workload=name, **found)
        except (EngineError, GateError) as error:
            self._engines.failed(row, error)
            self._failed.add(row)

    def _steps(self, weight_format: str) -> dict[str, Any]:
        print(f"{self._model.name} / fastgen / {weight_format}: decode steps", flush=True)
        command = [sys.executable, "-m", "benchmarks.cpu.decode_steps", str(self._model), weight_format]
        command += ["--num-threads", str(self._options.num_threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that all measurements of whole models share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="the directory of the models")
    parser.add_argument("--json", type=Path, required=True, help="the file of results, continued where it is there")
    parser.add_argument("--model", choices=SHAPES, default=next(iter(SHAPES)))
    parser.add_argument("--engines", type=list_of(ADAPTERS), default=list(ADAPTERS))
    parser.add_argument("--formats", type=list_of(BITS), default=list(BITS))
    parser.add_argument("--num-threads", type=int, default=device.current("cpu").num_cores)
    parser.add_argument("--python", action="append", default=[], help="an interpreter in which engines are installed")
    parser.add_argument("--llama-server", default=shutil.which("llama-server") or "", help="llama.cpp's server")
    parser.add_argument("--logs", type=Path, help="keep what the engines print in this directory")
    return parser


def list_of(names: Sequence[str] | dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        given = text.split(",")
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected of {', '.join(names)}")
        return given

    return parse


@contextmanager
def directory_of_logs(options: argparse.Namespace) -> Iterator[Path]:
    with TemporaryDirectory() as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        yield logs


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workloads", type=list_of((*workloads.TIMED, STEPS)), default=[*workloads.TIMED, STEPS])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with directory_of_logs(options) as logs:
        Benchmark(options, Results(options.json, options.num_threads), logs).run()


if __name__ == "__main__":
    main()
