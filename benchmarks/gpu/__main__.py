"""Runs all GPU measurements by one command: `python -m benchmarks.gpu [--parts a,b] [--json FILE] [--minutes 9]`.

Each part runs in a process of its own, so that a part that fails, hangs or loses the GPU's context affects no other.
The file is complete after every row, so rows that were written before the time ran out, or before Ctrl-C, remain. The
last lines are a table of the goals, and name the parts that were left out. The exit status is 0 if every floor is
reached, 1 if one is missed or a case failed, and 3 if something was not measured. `--judge FILE…` prints the table of
earlier results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measuring import Row, about_machine, clocks
from benchmarks.gpu.part import PARTS
from benchmarks.gpu.verdict import MISSED, PASSED, errors, verdict
from benchmarks.new_file import new_file

_LEAST_SECONDS = 15.0  # with less left, no part starts


class Results:
    """Holds the results, and writes them to ``file`` (if given) after every row."""

    def __init__(self, file: Path | None, about: Row):
        self._file = file
        self.data: dict[str, Any] = {"about": about, "parts": {}}

    def begin(self, part: str) -> None:
        self.data["parts"][part] = {"rows": []}

    def add(self, part: str, row: Row) -> None:
        """Adds a row with a case, or facts about the part."""
        kept = self.data["parts"][part]
        if "case" in row:
            kept["rows"].append(row)
        else:
            kept.update(row)
        self.write()

    def write(self) -> None:
        """Replaces the file atomically."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._file.with_name(f".{self._file.name}.unfinished")
        unfinished.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self._file)


def run_part(name: str, seconds: float, results: Results, command: list[str]) -> None:
    """Runs ``command``, which prints rows, and ends it after a number of seconds."""
    results.begin(name)
    start = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=said, text=True, env=environment, start_new_session=True
        )
        over = threading.Timer(seconds, _end, [process])
        over.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                _take(line, name, results)
            process.wait()
        finally:
            over.cancel()
            if process.poll() is None:  # Ctrl-C
                _end(process)
                process.wait()
        facts: Row = {"seconds": round(time.monotonic() - start, 1)}
        if process.returncode:
            is_late = facts["seconds"] >= seconds
            facts["ended"] = "by the time limit" if is_late else f"with status {process.returncode}"
            said.seek(0)
            facts["said"] = said.read()[-2000:]
        results.add(name, facts)


def _take(line: str, part: str, results: Results) -> None:
    try:
        row = json.loads(line)
    except ValueError:  # something that a library printed
        return
    results.add(part, row)
    print(f"{part}: {describe(row)}", flush=True)


def describe(row: Row) -> str:
    """Returns a row as one line: its time, fractions of the limits, rates and ratios."""
    if "limits" in row:
        copy, gemm = row["limits"]["copy_bytes_per_s"], row["limits"]["gemm_flops_per_s"]
        return f"copy {copy / 1e12:.2f} TB/s, bf16 GEMM {gemm / 1e12:.0f} TFLOP/s"
    for key in ("error", "left_out"):
        if key in row:
            return f"{row.get('case', 'failed')}: {row[key]}"
    parts = [f"{row['seconds'] * 1e3:,.3f} ms"] if "seconds" in row else []
    parts += [f"{row[key]:.2f} of {key.removeprefix('fraction_of_')}" for key in row if key.startswith("fraction_of_")]
    known = [
        *("requests_per_s", "ratio", "difference", "margin", "idle_seconds", "eager_seconds", "seconds_per_graph"),
        *("gap_seconds", "launches", "tests"),
    ]
    numbers = {key: row[key] for key in known if isinstance(row.get(key), (int, float))}  # percentiles are not shown
    parts += [f"{key.replace('_', ' ')} {number:.4g}" for key, number in numbers.items()]
    return f"{row.get('case', '')}: {', '.join(parts)}"


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process and the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _chosen(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return names


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=_chosen, default=list(PARTS), help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--json", type=new_file, help="where the results go")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which what is measured stays and all ends")
    parser.add_argument("--toy", action="store_true", help="run the code on a CPU, interpreted, at sizes of a toy")
    parser.add_argument("--judge", type=Path, nargs="+", metavar="FILE", help="compare earlier results with the goals")
    options = parser.parse_args(arguments)
    if options.judge:
        return judge(options.judge)
    if not options.toy and not torch.cuda.is_available():
        print("there is no GPU here to measure; --toy runs the code without one", file=sys.stderr)
        return 2
    os.environ["TRITON_INTERPRET"] = "1" if options.toy else "0"
    deadline = time.monotonic() + 60 * options.minutes
    results = Results(options.json, {**about_machine(toy=options.toy), "clocks": None if options.toy else clocks()})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit from outside is like Ctrl-C
    try:
        for name in options.parts:
            left = deadline - time.monotonic()
            if left < (0.0 if options.toy else _LEAST_SECONDS):
                results.data["parts"][name] = {"ended": "not begun: the time is over"}
                continue
            command = [sys.executable, "-m", "benchmarks.gpu.part", name, *(["--toy"] if options.toy else [])]
            run_part(name, share(name, options.parts, left), results, command)
    except KeyboardInterrupt:
        return 130
    finally:
        results.write()
        print(left_out(results.data["parts"], options.parts), end="", flush=True)
    text, status = verdict(results.data["parts"], results.data["about"]["device"], wanted=options.parts)
    print(text, end="", flush=True)
    if options.toy:  # its times mean nothing
        return MISSED if errors(results.data["parts"]) else PASSED
    return status


def share(name: str, wanted: list[str], left: float) -> float:
    """Returns the seconds that a part may take of those that are ``left``. It gets what the later ones should not need,
    or its share if there is not enough for all."""
    later = sum(PARTS[each][1] for each in wanted[wanted.index(name) + 1 :])
    own = PARTS[name][1]
    return max(left - later, left * own / (own + later))


def judge(files: list[Path]) -> int:
    """Prints the verdict over results in several files of one machine; of a part the last file that has it counts."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    parts = {name: part for each in results for name, part in each["parts"].items()}
    text, status = verdict(parts, results[-1]["about"]["device"], wanted=list(PARTS))
    print(text, end="")
    return status


def left_out(parts: dict[str, Any], wanted: list[str]) -> str:
    """Returns a line for each of the ``wanted`` parts that did not finish, and the command that runs these."""
    lines, names = [], []
    for name in wanted:
        kept = parts.get(name, {"ended": "not begun"})
        ended = kept.get("ended", "" if "seconds" in kept else "broken off")
        if ended:
            names.append(name)
            lines.append(f"{name}: {ended}, {len(kept.get('rows', ()))} rows\n")
    if names:
        lines.append(f"to run them alone, into a file of their own: --parts {','.join(names)}\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
