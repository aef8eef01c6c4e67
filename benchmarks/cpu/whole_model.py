"""Whole models, fastgen beside other engines: ``python -m benchmarks.cpu.whole_model MODELS --json FILE``.

Every engine runs in fresh processes of its own environment, one at a time, engines taking turns in rounds. Before it is
timed its answers pass the numeric gate. Each run of a workload stands between two measurements of the machine's limits.
What the file has already is not measured again, so that a run may be done in parts or go on where it was stopped.

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
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cpu import workloads
from benchmarks.cpu.calibration import Calibration
from benchmarks.cpu.engine_process import EngineError, EngineProcess
from benchmarks.cpu.engines.protocol import ADAPTERS, BITS, Settings
from benchmarks.cpu.figures import figures
from benchmarks.cpu.gate import Gate, GateError
from benchmarks.cpu.models import SHAPES
from benchmarks.cpu.results import Results
from benchmarks.cpu.targets import outside_kernels
from fastgen.compile import device

STEPS = "steps"
"""Named like a workload: decode steps of fastgen alone, :mod:`benchmarks.cpu.decode_steps`."""
_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")


def find_interpreters(pythons: Sequence[str]) -> dict[str, str]:
    """By engine, the first interpreter that can import it."""
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
    """What vLLM asks to be preloaded, as far as it is installed."""
    root = Path(python).parent.parent
    places = [*root.glob("lib/*.so*"), *Path("/usr/lib").glob("*/*.so*")]
    found = {path.name: str(path) for path in reversed(places)}
    return [found[name] for name in _PRELOADED if name in found]


class Benchmark:
    """One model and everything that is measured with it."""

    def __init__(self, options: argparse.Namespace, results: Results, logs: Path):
        self._options, self._results, self._logs = options, results, logs
        self._model = options.models / options.model
        self._interpreters = find_interpreters([sys.executable, *options.python])
        if options.llama_server:
            self._interpreters["llama.cpp"] = sys.executable
        self._calibration = Calibration(options.num_threads)
        self._gate = Gate(self._model, options.num_threads)
        self._passed: dict[str, list[list[int]]] = {}
        self._failed: set[str] = set()

    def run(self) -> None:
        for number in range(self._options.rounds):
            for engine in self._options.engines:
                for weight_format, suffix in ADAPTERS[engine].formats.items():
                    if weight_format in self._options.formats:
                        self._run_row(engine, weight_format, self._model.with_name(self._model.name + suffix), number)
            self._gate.release()

    def _run_row(self, engine: str, weight_format: str, model: Path, number: int) -> None:
        key = {"model": self._model.name, "engine": engine, "format": weight_format, "round": number}
        row = f"{self._model.name} / {engine} / {weight_format}"
        if engine == "fastgen" and STEPS in self._options.workloads and not self._results.has_steps(**key):
            self._results.add("steps", **key, **self._steps(weight_format))
            for requests in (1, 16):
                share = outside_kernels(self._results.data, self._model.name, weight_format, requests)
                print(f"  {share:.1%} of a decode step of {requests} is without a kernel", flush=True)
        missing = [
            name for name in self._options.workloads
            if name != STEPS and not self._results.has_sample(**key, workload=name)
        ]  # fmt: skip
        if not missing or row in self._failed:
            return
        if engine not in self._interpreters or not model.exists():
            reason = f"{model.name} is not there" if engine in self._interpreters else "not installed"
            self._results.note_engine(row, absent=reason)
            return
        print(f"{row}, round {number}: {' '.join(missing)}", flush=True)
        try:
            self._time_row(key, row, model, missing)
        except (EngineError, GateError) as error:
            print(f"  {type(error).__name__}: {error}", flush=True)
            reason = str(error).replace(str(self._options.models.absolute()), "MODELS")[:300]
            self._results.note_engine(row, absent=f"{type(error).__name__}: {reason}")
            self._failed.add(row)

    def _time_row(self, key: dict[str, Any], row: str, model: Path, names: list[str]) -> None:
        engine, weight_format = key["engine"], key["format"]
        python = self._interpreters[engine]
        settings = Settings(model.absolute(), weight_format, self._options.num_threads, self._options.llama_server)
        log = self._logs / f"{row.replace(' ', '').replace('/', '.')}.log"
        with EngineProcess(python, engine, settings, log, preloads(python) if engine == "vllm-cpu" else ()) as process:
            self._results.note_engine(row, **process.about, load_seconds=round(process.load_seconds, 2))
            for name in names:
                requests = workloads.make(name)
                process.prepare(name)
                self._check(row, weight_format, process.run(workloads.GATE).tokens)
                before = self._calibration.measure()
                run = process.run(name)
                time.sleep(0.3)  # some engines' threads look for work for a while
                after = self._calibration.measure()
                if [len(each) for each in run.tokens] != [each.num_new for each in requests]:
                    raise EngineError(f"{name}: not as many tokens as were asked for")
                found = figures(requests, run)
                print(f"  {name} {found['seconds']:.2f} s", flush=True)
                self._results.add("samples", **key, workload=name, before=before, after=after, **found)

    def _check(self, row: str, weight_format: str, tokens: list[list[int]]) -> None:
        """The gate, unless these very answers have passed already."""
        if self._passed.get(row) != tokens:
            worst = self._gate.check(workloads.make(workloads.GATE), tokens, weight_format)
            self._passed[row] = tokens
            self._results.note_engine(row, gate_below=round(worst, 5))

    def _steps(self, weight_format: str) -> dict[str, Any]:
        print(f"{self._model.name} / fastgen / {weight_format}: decode steps", flush=True)
        command = [sys.executable, "-m", "benchmarks.cpu.decode_steps", str(self._model), weight_format]
        command += ["--num-threads", str(self._options.num_threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="the directory of the models")
    parser.add_argument("--json", type=Path, required=True, help="the file of results, continued where it is there")
    parser.add_argument("--model", choices=SHAPES, default=next(iter(SHAPES)))
    parser.add_argument("--workloads", type=_list_of((*workloads.TIMED, STEPS)), default=[*workloads.TIMED, STEPS])
    parser.add_argument("--engines", type=_list_of(ADAPTERS), default=list(ADAPTERS))
    parser.add_argument("--formats", type=_list_of(BITS), default=list(BITS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=device.current("cpu").num_cores)
    parser.add_argument("--python", action="append", default=[], help="an interpreter in which engines are installed")
    parser.add_argument("--llama-server", default=shutil.which("llama-server") or "", help="llama.cpp's server")
    parser.add_argument("--logs", type=Path, help="keep what the engines print in this directory")
    return parser.parse_args()


def _list_of(names: Sequence[str] | dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        given = text.split(",")
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected of {', '.join(names)}")
        return given

    return parse


def main() -> None:
    options = parse_arguments()
    with TemporaryDirectory() as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        Benchmark(options, Results(options.json, options.num_threads), logs).run()


if __name__ == "__main__":
    main()
