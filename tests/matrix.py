"""The matrix recipes × proofs: what the tests recorded of each recipe, and the page made of it.

``python -m tests.matrix`` (``make matrix``) runs the tests that prove recipes, each of which records what it measured
(the fixture ``record``), and writes a new file of results and docs/recipe-matrix.md. ``--records FILE`` takes what a
run of all tests with ``--matrix FILE`` recorded, as ``make test-all`` does. ``--render`` only makes the page, of the
newest results. Nothing on the page is written by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from benchmarks.result_files import RESULTS, build, files, next_file

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipe-matrix.md"
# Kinds of results.
MATRIX, MUTATIONS = "recipe_matrix", "verify_mutations"
TESTS = (
    *("test_parity.py", "test_parity_more.py", "test_shuffled_names.py", "test_recipes_verified.py"),
    *("test_recipe_published.py", "test_recipe_published_families.py"),
)

Values = list[Any]
# What was recorded, by recipe and proof.
Cells = dict[str, dict[str, Values]]


class Record(Protocol):
    """Notes that ``proof`` held for ``recipe``, and what was measured."""

    def __call__(self, recipe: str, proof: str, value: Any) -> None: ...


@dataclass(frozen=True)
class Proof:
    """A column: its heading, what it says of the values recorded, and what it means."""

    heading: str
    cell: Callable[[Values], str]
    meaning: str


def _count(values: Values) -> str:
    return str(len(values))


def _largest(values: Values) -> str:
    return f"{max(values):.1e} ({len(values)})"


def _ratio(values: Values) -> str:
    return f"{max(ours / theirs for ours, theirs in values):.2f}"


def _compared(values: Values) -> str:
    return f"{sum(num for num, _ in values):,} ({max(largest for _, largest in values):.1e})"


def _caught(values: Values) -> str:
    ((num_mutants, num_rejected, num_right),) = values
    return f"{num_rejected} of {num_mutants}, {num_right} at the node"


PROOFS: dict[str, Proof] = {
    "published": Proof(
        "published sizes", _count, "published configurations that resolve to the published parameter count"
    ),
    "parity": Proof(
        "parity, fp32",
        _largest,
        "largest difference of a log-probability from transformers, over prompts and greedy answers (drawn models)",
    ),
    "bfloat16": Proof(
        "bf16 error",
        _ratio,
        "error of bf16 log-probabilities against exact ones, at the median position, as a multiple of transformers' "
        "own; the largest",
    ),
    "verify": Proof(
        "verify",
        _compared,
        "comparisons of `fastgen verify` with nodes, tensors and numbers of transformers' models (largest difference, "
        "in units of the value's root mean square)",
    ),
    "engine": Proof(
        "ragged, chunked, captured",
        _compared,
        "comparisons of log-probabilities: prompts alone, together, and in chunks at each captured size up to 64 "
        "(largest difference)",
    ),
    "shuffled": Proof(
        "names shuffled",
        _largest,
        "parity again, with the names of recipes, architectures and model types exchanged: largest difference "
        "(drawn models)",
    ),
    "mutations": Proof(
        "mistakes caught",
        _caught,
        "single mistakes made by machine that `fastgen verify` rejects, and how many at the changed node or near it",
    ),
}


def read_records(file: Path) -> Cells:
    cells: Cells = defaultdict(lambda: defaultdict(list))
    for line in file.read_text().splitlines():
        recipe, proof, value = json.loads(line)
        cells[recipe][proof].append(value)
    # Sorted, since tests that run in several processes record in any order.
    return {
        recipe: {proof: sorted(of_recipe[proof]) for proof in sorted(of_recipe)}
        for recipe, of_recipe in sorted(cells.items())
    }


def render(results: Mapping[str, Any], mutations: Mapping[str, Any]) -> str:
    """The page. ``mutations`` has for each of the ``recipes`` that were hunted how many mistakes there were, how many
    were rejected and how many at the node that was touched."""
    made, hunted = results["made"], mutations["made"]
    caught = mutations["recipes"]
    cells = {
        recipe: of_recipe | ({"mutations": [caught[recipe]]} if recipe in caught else {})
        for recipe, of_recipe in results["cells"].items()
    }
    lines = [
        "# Recipes and their proofs",
        "",
        "This page lists every shipped recipe and what the tests measured. `make matrix` and `make test-all` write it",
        "from their records:",
        f"{made['date']}, {build(made)}, {made['machine']}, "
        f"torch {made['torch']}, transformers {made['transformers']}.",
        f"The column *{PROOFS['mutations'].heading}* is of a run of its own, of `python -m tests.verify.hunt`:",
        f"{hunted['date']}, {build(hunted)}.",
        "",
        *(f"- **{proof.heading}**: {proof.meaning}." for proof in PROOFS.values()),
        "",
        "A dash means not measured. InternLM2 is not part of transformers. Its parity is that of a Llama whose weights",
        "are stored as InternLM2 stores them, and `fastgen verify` has nothing to compare it with.",
        "",
        f"| recipe | {' | '.join(proof.heading for proof in PROOFS.values())} |",
        f"|---|{'---|' * len(PROOFS)}",
    ]
    for recipe, of_recipe in cells.items():
        row = [proof.cell(of_recipe[key]) if key in of_recipe else "–" for key, proof in PROOFS.items()]
        lines.append(f"| `{recipe}` | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def read_newest(kind: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(files(RESULTS, kind)[-1].read_text())
    return content


def run_tests() -> Cells:
    """Runs the tests that record, and returns what they recorded. Ends the program where one of them fails."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "records.jsonl"
        tests = [str(ROOT / "tests" / "models" / name) for name in TESTS]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--hypothesis-profile=fresh", "--matrix", str(file), *tests],
            cwd=ROOT,
            check=False,
        )
        if done.returncode:
            sys.exit(done.returncode)
        return read_records(file)


def dated(cells: Cells) -> dict[str, Any]:
    """Returns the results of today: ``cells``, with the date, build, machine and versions that made them."""
    import torch
    import transformers

    from benchmarks.cpu.results import commit
    from fastgen.lab.machine import processor

    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "machine": f"{platform.system()} on {platform.machine()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {"made": made, "cells": cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, help="what a run of the tests with --matrix recorded")
    parser.add_argument("--render", action="store_true", help="only write the page")
    options = parser.parse_args()
    if not options.render:
        cells = read_records(options.records) if options.records else run_tests()
        results = dated(cells)
        next_file(RESULTS, MATRIX, results["made"]["date"]).write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(render(read_newest(MATRIX), read_newest(MUTATIONS)))


if __name__ == "__main__":
    main()
