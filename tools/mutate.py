"""Finds out which small mistakes the fast tests would miss.

    python -m tools.mutate --output FILE [--number 50] [--seed 1] [--under fastgen/runtime] [--resume]

Draws single mutations (``tools/mutations.py``) of engine, kernels and server. Each is made in a copy of the working
tree, and the fast tests nearest to the file run there (``tools/nearest_tests.py``), as many as take ``--seconds``
together. FILE gets a line of JSON for each mutation: its diff, the verdict, and the test that rejected it.

The verdict is ``rejected`` (a test failed, or the process of the tests died), ``too slow`` (which rejects it too), or
``survived``. A survivor is judged by a person: it changes nothing that anyone could see, or a test is missing.
``--resume`` continues FILE with the mutations that it lacks; ``--again NUMBER`` runs one of FILE's mutations once more,
for example with another ``--seconds`` or after a test was written.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.mutations import Mutation, is_valid, mutations_of
from tools.nearest_tests import Nearest

ROOT = Path(__file__).resolve().parents[1]
# Parts of the product that are drawn equally often, whatever their size: the patterns of their files.
AREAS = {
    "engine": ("fastgen/runtime/**/*.py", "fastgen/layers/*.py"),
    "C++ kernels": ("fastgen/compile/**/*.cpp.j2", "fastgen/compile/**/*.h"),
    "Triton kernels": ("fastgen/compile/**/*.py.j2",),
    "kernels' launches": ("fastgen/compile/ops/*/*.py", "fastgen/compile/weights/*.py", "fastgen/compile/capture/*.py"),
    "server": ("fastgen/serving/**/*.py",),
}
_PATIENCE = 4  # times as long as the tests take without a mutation, and then
_SPARE_S = 30  # so many seconds more, since the machine may be busy
_MOST_FILES = 10  # of tests that one mutation runs
_REJECTED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)
# Arguments of every run. Tests that compare digests of rendered kernels reject any change, right or wrong.
_PYTEST = ("-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", "-p", "no:xdist")


class Drawn(NamedTuple):
    """A mutation of one file."""

    area: str
    path: str
    mutation: Mutation


class Outcome(NamedTuple):
    """What a run of tests said. ``test`` is the first that failed."""

    verdict: str
    test: str
    seconds: float


def draw(root: Path, rng: random.Random, under: str = "") -> Iterator[Drawn]:
    """Yields different mutations of files below ``under`` without end: a part of the product, then a kind of change,
    then a place, each equally likely."""
    files = {area: _files(root, patterns, under) for area, patterns in AREAS.items()}
    texts = {path: (root / path).read_text(encoding="utf-8") for paths in files.values() for path in paths}
    choices: dict[str, dict[str, list[Drawn]]] = {}
    for area, paths in files.items():
        for path in paths:
            for mutation in mutations_of(path, texts[path]):
                choices.setdefault(area, {}).setdefault(mutation.operator, []).append(Drawn(area, path, mutation))
    seen: set[Drawn] = set()
    num_left = sum(len(each) for by_operator in choices.values() for each in by_operator.values())
    while len(seen) < num_left:
        by_operator = choices[rng.choice(sorted(choices))]
        drawn = rng.choice(by_operator[rng.choice(sorted(by_operator))])
        if drawn not in seen:
            seen.add(drawn)
            if is_valid(drawn.path, drawn.mutation.apply(texts[drawn.path])):
                yield drawn


def _files(root: Path, patterns: tuple[str, ...], under: str) -> list[str]:
    found = {str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern)}
    return sorted(path for path in found if path.startswith(under))


class Workbench:
    """A copy of the working tree in ``directory``, in which mutations are made and tests run.

    Kernels are built into a cache there, so that a mutated one never comes into the user's.
    """

    def __init__(self, root: Path, directory: Path):
        self.tree, self._cache = directory / "tree", directory / "kernels"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.tree / name)
        self._took_s: dict[str, float] = {}

    def run(self, tests: list[str], limit_s: float) -> Outcome:
        """Runs the fast ones of ``tests`` until the first fails."""
        environment = os.environ | {"PYTHONPATH": str(self.tree), "FASTGEN_CACHE": str(self._cache)}
        command = [sys.executable, "-B", "-m", "pytest", *_PYTEST, *tests]
        began_s = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self.tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that what the tests start ends with them
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return Outcome("too slow", "", time.monotonic() - began_s)
        took_s = time.monotonic() - began_s
        if process.returncode in (0, 5):  # 5: all of them are slow
            return Outcome("survived", "", took_s)
        found = _REJECTED.search(output)
        return Outcome("rejected", found[1] if found else f"the tests' process ended with {process.returncode}", took_s)

    def seconds_of(self, test: str) -> float:
        """Returns how long a test file takes without a mutation; infinity where it fails, so that it is left out."""
        if test not in self._took_s:
            outcome = self.run([test], limit_s=600)
            self._took_s[test] = outcome.seconds if outcome.verdict == "survived" else float("inf")
        return self._took_s[test]

    def try_out(self, drawn: Drawn, candidates: list[str], seconds: float) -> dict[str, Any]:
        """Makes a mutation, runs the nearest tests, undoes it, and returns its line of the record."""
        tests, total_s = [], 0.0
        for test in candidates[:_MOST_FILES]:
            took_s = self.seconds_of(test) if total_s < seconds else float("inf")
            if total_s + took_s <= seconds or (not tests and took_s < float("inf")):
                tests.append(test)
                total_s += took_s
        file = self.tree / drawn.path
        before = file.read_text(encoding="utf-8")
        after = drawn.mutation.apply(before)
        file.write_text(after, encoding="utf-8")
        try:
            outcome = self.run(tests, _PATIENCE * total_s + _SPARE_S) if tests else Outcome("no test", "", 0.0)
        finally:
            file.write_text(before, encoding="utf-8")
        return {
            "area": drawn.area,
            "file": drawn.path,
            "line": before.count("\n", 0, drawn.mutation.start) + 1,
            "operator": drawn.mutation.operator,
            "verdict": outcome.verdict,
            "test": outcome.test,
            "seconds": round(outcome.seconds, 1),
            "tests": tests,
            "diff": "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "", "", n=1)).split(
                "\n", 2
            )[2],
        }


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the tests' process and all that it started."""
    os.killpg(process.pid, 9)
    process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file of JSON lines, one for each mutation")
    parser.add_argument("--number", type=int, default=50, help="how many mutations FILE has in the end")
    parser.add_argument("--seed", type=int, default=1, help="which ones are drawn")
    parser.add_argument("--under", default="", help="only files whose path begins like this")
    parser.add_argument("--seconds", type=float, default=60, help="how long the tests of one mutation take")
    parser.add_argument("--resume", action="store_true", help="continue FILE")
    parser.add_argument("--again", type=int, metavar="NUMBER", help="run this mutation of FILE once more, and print it")
    options = parser.parse_args()
    lines = options.output.read_text(encoding="utf-8").splitlines() if options.output.exists() else []
    if lines and not options.resume and options.again is None:
        parser.error(f"{options.output} exists; --resume continues it")
    nearest = Nearest(ROOT)
    with tempfile.TemporaryDirectory(prefix="fastgen-mutate-") as directory:
        bench = Workbench(ROOT, Path(directory))
        for number, drawn in enumerate(draw(ROOT, random.Random(options.seed), options.under)):
            if number == options.number and options.again is None:
                break
            if (number < len(lines)) if options.again is None else (number != options.again):
                continue
            line = {"number": number, **bench.try_out(drawn, nearest.tests(drawn.path), options.seconds)}
            print(f"{number}: {line['verdict']} {line['file']}:{line['line']} {line['test']}", flush=True)
            if options.again is not None:
                print(line["diff"])
                break
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
