"""The output of ``fastgen bench``: a small table, raw records, and the summary as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fastgen.cli.bench_options import OutputOptions
from fastgen.errors import InvalidArgumentError

if TYPE_CHECKING:
    from fastgen.lab.experiments.latency import Latency
    from fastgen.lab.experiments.search import Found
    from fastgen.lab.experiments.startup import Startup
    from fastgen.lab.metrics.figures import Figure
    from fastgen.lab.metrics.summary import Summary
    from fastgen.lab.records import Run

# The exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130
_COLUMNS = ("mean", "median", "p90", "p95", "p99")
_UNKNOWN = "–"


class Output:
    """The directory for results, made before anything is measured; nothing is written without one."""

    def __init__(self, given: OutputOptions):
        self._directory = given.output or (Path() if given.save_result else None)
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidArgumentError(f"--output {self._directory} cannot be made: {error.strerror}") from None

    def write(self, command: str, runs: Mapping[str, Run], summary: Mapping[str, Any]) -> None:
        """Writes ``COMMAND-TIME.json`` and for each run ``COMMAND-TIME-NAME.jsonl``, and prints their names to
        stderr. The one run without a name is ``COMMAND-TIME.jsonl``."""
        if self._directory is None:
            return
        from fastgen.lab.records import write_run

        stem = f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
        for name, run in runs.items():
            file = self._directory / f"{stem}{'-' if name else ''}{name}.jsonl"
            write_run(run, file)
            print(f"records: {file}", file=sys.stderr)
        file = self._directory / f"{stem}.json"
        try:
            file.write_text(json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            raise InvalidArgumentError(f"{file} cannot be written: {error.strerror}") from None
        print(f"summary: {file}", file=sys.stderr)


def end(runs: Sequence[Run], *, interrupted: bool = False) -> None:
    """Prints to stderr what limits the use of ``runs``. After Ctrl-C, ends the command with its exit status."""
    invalid = next((run.header.invalid for run in runs if run.header.invalid is not None), None)
    if invalid is not None:
        print(f"fastgen: INVALID, do not use these figures: {invalid}", file=sys.stderr)
    if interrupted or any(run.header.interrupted for run in runs):
        print("fastgen: interrupted: the figures are of what was measured until then", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


def summary_text(summary: Summary) -> str:
    """Returns the figures of a run as a table for people, with intervals of 95 % in brackets."""
    from fastgen.lab.metrics.figures import LATENCIES

    latencies = [[name.upper(), *(_shown(summary[f"{column}_{name}_ms"]) for column in _COLUMNS)] for name in LATENCIES]
    rates = [
        ["requests/s", _shown(summary["request_throughput"])],
        ["output tokens/s", _shown(summary["output_throughput"])],
        ["all tokens/s", _shown(summary["total_token_throughput"])],
    ]
    if summary.slo:
        limits = ", ".join(f"{name.removesuffix('_ms')} {value:g}" for name, value in summary.slo.items())
        rates.append(["good requests/s", f"{_shown(summary['request_goodput'])}  ({limits})"])
        rates.append(["good requests", _percent(summary["good_share"])])
    completed, failed = (int(summary[name].value or 0) for name in ("completed", "failed"))
    lines = [
        f"{completed:,} requests answered, {failed:,} failed, in {summary['duration'].value or 0:.1f} s; "
        f"at most {int(summary['max_concurrent_requests'].value or 0):,} at once",
        "",
        *columns([["ms", *_COLUMNS], *latencies]),
        "",
        *columns(rates),
    ]
    if lag_s := summary.about.get("lag_s"):
        lags = (f"{label} {1000 * lag_s[name]:.1f} ms" for name, label in _LAGS.items() if name in lag_s)
        lines += ["", f"load generator: {', '.join(lags)}"]
    if any(_UNKNOWN in row for row in latencies):
        lines += ["", f"{_UNKNOWN}: too few samples to say"]
    return "\n".join(lines)


_LAGS = {"p99": "P99 of its delay in sending", "loop_p99": "in reading"}


def turns_text(summaries: Mapping[str, Summary]) -> str:
    """Returns a row of figures for each of several runs, such as one for each policy."""
    names = {
        "requests/s": "request_throughput",
        "output tokens/s": "output_throughput",
        "TTFT median": "median_ttft_ms",
        "TTFT p90": "p90_ttft_ms",
        "ITL median": "median_itl_ms",
        "ITL p99": "p99_itl_ms",
        "E2EL mean": "mean_e2el_ms",
    }
    if any(summary.slo for summary in summaries.values()):
        names["good/s"] = "request_goodput"
    rows = [[row, *(_shown(summary[name]) for name in names.values())] for row, summary in summaries.items()]
    return "\n".join(columns([["", *names], *rows]))


def latency_text(found: Latency) -> str:
    """Returns the latency of a batch, in milliseconds."""
    figures = found.figures
    names = ("mean", "median", "p90", "p99")
    row = [_shown(figures[name], scale=1000) for name in names]
    fastest, slowest = min(found.latencies_s, default=0.0), max(found.latencies_s, default=0.0)
    lines = [
        f"{len(found.latencies_s)} batches, from {1000 * fastest:,.1f} to {1000 * slowest:,.1f} ms",
        "",
        *columns([["ms", *names], ["a batch", *row]]),
    ]
    if failed := len(found.runs) - len(found.latencies_s):
        lines += ["", f"{failed} batches had requests that failed"]
    return "\n".join(lines)


def startup_text(found: Startup) -> str:
    """Returns the times from the start of a process, in seconds: the median of each phase, and the range."""
    from fastgen.lab.experiments.startup import PHASES

    rows = [
        ["cold kernel cache", str(len(found.cold)), *(_shown(found.figure("cold", phase)) for phase in PHASES)],
        ["warm kernel cache", str(len(found.warm)), *(_shown(found.figure("warm", phase)) for phase in PHASES)],
    ]
    header = ["s", "processes", *(phase.replace("_", " ") for phase in PHASES)]
    return "\n".join([*columns([header, *rows]), "", "Median [least, most], from the start of the process."])


def search_text(found: Found, unit: str) -> str:
    """Returns the levels of a search and its answer. ``unit`` is what a level counts."""
    from fastgen.lab.metrics.figures import Figure

    rows = [
        [
            _level(level.value),
            f"{level.num_good} of {level.num_requests}",
            _percent(Figure(level.num_good / level.num_requests, level.interval)),
            level.verdict,
        ]
        for level in sorted(found.levels, key=lambda level: level.value)
    ]
    limits = ", ".join(f"{name.removesuffix('_ms')} {value:g}" for name, value in found.slo.as_json().items())
    needed = f"{100 * found.share:g} % of requests within {limits}"
    lines = [*columns([[unit, "good", "share", ""], *rows]), ""]
    if found.kept is None:
        lines.append(f"No load was found that keeps {needed}.")
        if found.levels:
            lines += [f"With {unit} = {_level(found.lowest.value)}, {each}." for each in found.shortfalls]
    elif found.missed is None:
        lines.append(f"{unit} = {_level(found.kept)} keeps {needed}; no higher load was shown to miss it.")
    else:
        lines.append(f"{unit} = {_level(found.kept)} keeps {needed}; {_level(found.missed)} misses it.")
    return "\n".join(lines)


def _level(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines in which the cells of a column stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shown(figure: Figure, *, scale: float = 1.0) -> str:
    def shown(value: float) -> str:
        return _number(scale * value)

    return _UNKNOWN if figure.value is None else shown(figure.value) + _range(figure.interval, shown)


def _percent(figure: Figure) -> str:
    def shown(share: float) -> str:
        return f"{100 * share:.1f} %"

    return _UNKNOWN if figure.value is None else shown(figure.value) + _range(figure.interval, shown)


def _range(interval: tuple[float, float] | None, shown: Any) -> str:
    return "" if interval is None else f" [{shown(interval[0])}, {shown(interval[1])}]"


def _number(value: float) -> str:
    """Returns ``value`` with three significant digits, or all digits before the point."""
    for limit, digits in ((1, 3), (10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def print_json(value: Mapping[str, Any]) -> None:
    """Prints a JSON object."""
    print(json.dumps(value, allow_nan=False))
