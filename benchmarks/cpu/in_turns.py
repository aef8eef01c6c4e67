"""Compares fastgen and another engine in turns: ``python -m benchmarks.cpu.in_turns MODELS --json FILE``.

The memory speed of a shared machine may double or halve within seconds. Rounds of whole processes, minutes apart, miss
this. Here two engines in fresh processes have the model loaded at the same time and run a workload in turns, until
enough turns of this build were steady (:mod:`benchmarks.cpu.evidence`). The figure is the median over these turns of
the one's speed over the other's. It needs memory for the model twice. Options, results and the numeric gate are those
of ``benchmarks.cpu.whole_model``. The page ``docs/performance.md`` compares engines by these results alone.
"""

from __future__ import annotations

import argparse

from benchmarks.cpu import workloads
from benchmarks.cpu.comparison import beside
from benchmarks.cpu.engine_process import EngineError
from benchmarks.cpu.engines.protocol import ADAPTERS, BITS
from benchmarks.cpu.evidence import LEAST_STEADY, Data, Figure, is_steady_turn
from benchmarks.cpu.gate import GateError
from benchmarks.cpu.results import Results
from benchmarks.cpu.whole_model import Engines, directory_of_logs, list_of, make_parser

OURS = "fastgen"


def measure(options: argparse.Namespace, results: Results, engines: Engines) -> None:
    """Pairs every format of fastgen with the format of every other engine that has as many bits."""
    for weight_format in ADAPTERS[OURS].formats:
        others = [
            (engine, other)
            for engine in options.engines
            for other in ADAPTERS[engine].formats
            if engine != OURS and weight_format in options.formats and BITS[other] == BITS[weight_format]
        ]
        for engine, other in others:
            for workload in options.workloads:
                measure_pair(options, results, engines, {OURS: weight_format, engine: other}, workload)


def measure_pair(
    options: argparse.Namespace, results: Results, engines: Engines, formats: dict[str, str], workload: str
) -> None:
    """Measures two engines in turns. ``formats`` has the format of fastgen and of the other engine, by engine."""
    _, other = formats
    key = {"model": engines.model.name, "engine": other, "format": formats[other], "workload": workload}
    if enough(results.turns_of_build(**key), options):
        return
    row = engines.row(other, formats[other])
    if lacking := engines.lacks(other, formats[other]):
        results.note_engine(row, absent=lacking)
        return
    print(f"{row} and {OURS}, {workload} in turns", flush=True)
    try:
        with engines.start(other, formats[other]) as theirs, engines.start(OURS, formats[OURS]) as ours:
            processes = {OURS: ours, other: theirs}
            for engine, process in processes.items():
                engines.prepare(process, engine, formats[engine], workload)
            engines.gate.release()
            while not enough(results.turns_of_build(**key), options):
                number = len(results.turns_of_build(**key))
                order = list(processes) if number % 2 == 0 else list(processes)[::-1]
                found = {engine: engines.measure(processes[engine], workload) for engine in order}
                results.add("turns", **key, turn=number, ours=found[OURS], theirs=found[other])
    except (EngineError, GateError) as error:
        engines.failed(row, error)
        return
    figure = beside(results.data, engines.model.name, other, formats[other], workload)
    if isinstance(figure, Figure):
        print(f"  {OURS} is {figure.value:.2f} times as fast ({figure.basis})", flush=True)
    else:
        print(f"  no ratio: {figure.reason}", flush=True)


def enough(turns: list[Data], options: argparse.Namespace) -> bool:
    """Returns true if as many turns were steady as are wanted, or no more turns may be made."""
    num_wanted: int = options.turns
    num_allowed: int = options.most_turns
    return sum(map(is_steady_turn, turns)) >= num_wanted or len(turns) >= num_allowed


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workloads", type=list_of(workloads.TIMED), default=["W1"])
    parser.add_argument("--turns", type=int, default=LEAST_STEADY, help="steady turns to be reached")
    parser.add_argument("--most-turns", type=int, default=4 * LEAST_STEADY, help="turns after which to give up")
    options = parser.parse_args()
    with directory_of_logs(options) as logs:
        results = Results(options.json, options.num_threads)
        measure(options, results, Engines(options, results, logs))


if __name__ == "__main__":
    main()
