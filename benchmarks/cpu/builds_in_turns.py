"""Two builds of fastgen side by side: ``python -m benchmarks.cpu.builds_in_turns MODELS BASE --json FILE``.

Compares the working tree with the commit ``BASE``. In each turn both builds load the model in fresh processes and run
every workload, one build after the other; turns alternate which build is first. Both must give the same tokens before
anything is timed. A turn keeps the seconds of each workload, the seconds that loading took, and the peak memory after
loading and at the end. The printed ratio is the median over turns of the base's seconds over the working tree's, so
above 1 the working tree is faster.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cpu import workloads
from benchmarks.cpu.engine_process import EngineProcess
from benchmarks.cpu.engines.protocol import Settings
from benchmarks.cpu.models import SHAPES
from benchmarks.cpu.results import Results
from benchmarks.cpu.whole_model import list_of
from fastgen.compile.host import device

ROOT = Path(__file__).parents[2]
BUILDS = ("base", "here")
FORMATS = ("fp32", "bf16", "int8", "int4")


def commit_of(revision: str) -> str:
    return _git("rev-parse", "--verify", "--short=12", f"{revision}^{{commit}}").strip()


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Yields a directory with the files of a commit, which is removed at the end."""
    with TemporaryDirectory() as scratch:
        archive = Path(scratch) / "tree.tar"
        _git("archive", "--output", str(archive), commit)
        tree = Path(scratch) / "tree"
        tree.mkdir()
        subprocess.run(["tar", "--extract", "--file", str(archive), "--directory", str(tree)], check=True)
        yield tree


def measure_turn(trees: dict[str, Path], settings: Settings, names: list[str], number: int) -> dict[str, Any]:
    """Runs both builds once. Raises :class:`benchmarks.cpu.engine_process.EngineError`."""
    order = BUILDS if number % 2 == 0 else BUILDS[::-1]
    found: dict[str, Any] = {build: {} for build in BUILDS}
    with TemporaryDirectory() as logs, ExitStack() as stack:
        processes = {}
        for build in order:
            log = Path(logs) / f"{build}.log"
            process = EngineProcess(sys.executable, "fastgen", settings, log, root=trees[build])
            processes[build] = stack.enter_context(process)
            gate = process.run(workloads.GATE)
            found[build] = {
                "load_s": round(process.load_seconds, 3),
                "loaded_peak_bytes": gate.peak_bytes,
                "gate": gate.tokens,
            }
        if found["base"].pop("gate") != found["here"].pop("gate"):
            raise SystemExit(f"{settings.weight_format}: the builds do not give the same tokens")
        for name in names:
            for build in order:
                run = processes[build].run(name)
                found[build][f"{name}_s"] = round(run.seconds, 4)
                found[build]["peak_bytes"] = run.peak_bytes
    return found


def ratios(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Returns by figure the median over turns of the base's value over the working tree's."""
    names = turns[0]["here"].keys() & turns[0]["base"].keys()
    return {
        name: statistics.median(turn["base"][name] / turn["here"][name] for turn in turns) for name in sorted(names)
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="the directory of the models, as benchmarks.cpu.models writes it")
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--json", type=Path, required=True, help="the file of results, continued where it is there")
    parser.add_argument("--model", choices=SHAPES, default=next(iter(SHAPES)))
    parser.add_argument("--formats", type=list_of(FORMATS), default=["fp32", "int8"])
    parser.add_argument("--workloads", type=list_of(workloads.TIMED), default=list(workloads.TIMED))
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--num-threads", type=int, default=device.current("cpu").num_cores)
    options = parser.parse_args()
    results = Results(options.json, options.num_threads)
    builds = {"base": commit_of(options.base), "here": _git("describe", "--always", "--dirty", "--abbrev=12").strip()}
    model = (options.models / options.model).absolute()
    with tree_of(builds["base"]) as base:
        for weight_format in options.formats:
            key = {"model": options.model, "format": weight_format, "builds": builds}
            settings = Settings(model, weight_format, options.num_threads)
            for number in range(results.num_turns(**key), options.turns):
                found = measure_turn({"base": base, "here": ROOT}, settings, options.workloads, number)
                results.add("turns", **key, turn=number, **found)
            turns = [turn for turn in results.data["turns"] if key.items() <= turn.items()]
            print(f"{options.model}, {weight_format}, {len(turns)} turns of {builds['base']} and {builds['here']}")
            for name, ratio in ratios(turns).items():
                print(f"  {name:18} {ratio:6.3f}", flush=True)


if __name__ == "__main__":
    main()
