"""Finds out which small mistakes the fast tests would miss.

    python -m tools.mutate --output FILE [--number 50] [--seed 1] [--under fastgen/runtime] [--resume]

Draws single mutations (``tools/mutations.py``) of engine, kernels and server. Each is made in a copy of the working
tree, and the fast tests nearest to the file run there (``tools/nearest_tests.py``) until one fails, or until they have
taken ``--seconds`` of the processor. FILE gets a line of JSON for each mutation: its diff, the verdict, and the test
that rejected it. That test is known to pass without the mutation.

The verdict is ``rejected`` (a test failed, or the tests' process died), ``too slow`` (the tests got stuck, which is a
rejection too), or ``survived``. A person judges each survivor: either the change cannot be seen, or a test is missing.
``--resume`` continues FILE with the mutations that it lacks; ``--again NUMBER`` runs one of FILE's mutations once more,
for example with another ``--seconds`` or after a test was written.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
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
_MOST_FILES = 12  # of tests that one mutation runs
_PATIENCE = 4  # times as much of the processor as tests should take until they are stuck
_STUCK_S = 900  # by the clock, for tests that wait for ever; the machine may be busy
_REJECTED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)
_PASSED = re.compile(r"\b(\d+) passed")
_NONE_RAN = 5  # pytest's exit status where all tests are slow
_INTERRUPTED = 2  # and where the budget is spent, or a test file cannot be imported
_PYTEST = (
    "-x",
    "-q",
    "-m",
    "not slow and not gpu",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "tools.pytest_budget",
)


class Drawn(NamedTuple):
    """A mutation of one file."""

    area: str
    path: str
    mutation: Mutation


class Outcome(NamedTuple):
    """The result of a run of tests. ``test`` is the first that failed."""

    verdict: str
    test: str
    num_passed: int


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
        self._known_to_pass: set[str] = set()
        self._failing: list[str] = []

    def run(self, tests: list[str], seconds: float) -> Outcome:
        """Runs the fast ones of ``tests`` until the first fails or the ``seconds`` of the processor are spent."""
        tools = Path(__file__).resolve().parents[1]
        environment = os.environ | {"PYTHONPATH": f"{self.tree}{os.pathsep}{tools}", "FASTGEN_CACHE": str(self._cache)}
        left_out = [f"--deselect={test}" for test in self._failing]
        process = subprocess.Popen(
            [sys.executable, "-B", "-m", "pytest", *_PYTEST, "--budget", str(seconds), *left_out, *tests],
            cwd=self.tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that what the tests start ends with them
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (int(_PATIENCE * seconds) + 60,) * 2),
        )
        try:
            output, _ = process.communicate(timeout=_STUCK_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Outcome("too slow", "", 0)
        passed, failed = _PASSED.search(output), _REJECTED.search(output)
        num_passed = int(passed[1]) if passed else 0
        is_spent = process.returncode == _INTERRUPTED and "the budget is spent" in output
        if failed is None and (process.returncode in (0, _NONE_RAN) or is_spent):
            return Outcome("survived", "", num_passed)
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return Outcome("too slow", "", num_passed)
        return Outcome("rejected", failed[1] if failed else f"pytest ends with {process.returncode}", num_passed)

    def passes(self, outcome: Outcome, tests: list[str]) -> bool:
        """Returns whether what rejected a mutation passes without it. A test that does not is left out from now on.

        :raises RuntimeError: if pytest itself fails without a mutation, so that no verdict would mean anything.
        """
        cause = outcome.test
        if not cause or cause in self._known_to_pass:
            return True
        if "::" in cause:
            if self.run([cause], seconds=600).verdict != "survived":
                self._failing.append(cause)
                return False
        elif "::" not in (unchanged := self.run(tests, seconds=1)).test and unchanged.verdict == "rejected":
            raise RuntimeError(f"{unchanged.test} without a mutation: {' '.join(tests)}")
        self._known_to_pass.add(cause)
        return True

    def try_out(self, drawn: Drawn, tests: list[str], seconds: float) -> dict[str, Any]:
        """Makes a mutation, runs the tests, undoes it, and returns its line of the record."""
        file = self.tree / drawn.path
        before = file.read_text(encoding="utf-8")
        after = drawn.mutation.apply(before)
        while True:
            file.write_text(after, encoding="utf-8")
            try:
                outcome = self.run(tests, seconds)
            finally:
                file.write_text(before, encoding="utf-8")
            if self.passes(outcome, tests):
                break
        lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), n=1)
        return {
            "area": drawn.area,
            "file": drawn.path,
            "line": before.count("\n", 0, drawn.mutation.start) + 1,
            "operator": drawn.mutation.operator,
            "verdict": outcome.verdict,
            "test": outcome.test,
            "num_passed": outcome.num_passed,
            "tests": tests,
            "diff": "".join(itertools.islice(lines, 2, None)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file of JSON lines, one for each mutation")
    parser.add_argument("--number", type=int, default=50, help="how many mutations FILE has in the end")
    parser.add_argument("--seed", type=int, default=1, help="which ones are drawn")
    parser.add_argument("--under", default="", help="only files whose path begins like this")
    parser.add_argument("--seconds", type=float, default=60, help="of the processor, for the tests of one mutation")
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
            line = {"number": number, **bench.try_out(drawn, nearest.tests(drawn.path)[:_MOST_FILES], options.seconds)}
            print(f"{number}: {line['verdict']} {line['file']}:{line['line']} {line['test']}", flush=True)
            if options.again is not None:
                print(line["diff"])
                break
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
