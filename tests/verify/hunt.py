"""The mutation hunt: checks for every single mistake in every shipped recipe whether ``verify`` finds and locates it.

``python -m tests.verify.hunt`` judges all mutants and writes docs/verify-mutations.md and a new file of the figures for
the matrix of proofs. Earlier verdicts are kept in the directory ``--work`` and used again, unless the package, the
recipes or the mistakes have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.results import commit
from benchmarks.new_file import new_file
from benchmarks.result_files import RESULTS, next_file
from fastgen.lab.machine import processor
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.registry.registry import list_recipes
from fastgen.verify.cases import Cases
from fastgen.verify.run import Verifier
from tests.matrix import MUTATIONS
from tests.verify import mutation_report
from tests.verify.family import Family
from tests.verify.internlm2 import InternLM2ForCausalLM
from tests.verify.mutations import Mutant, mutants
from tests.verify.survivors import Survivors

# The default of `fastgen verify`.
NUM_CONFIGS = 20

# For architectures that transformers does not know.
REFERENCES = {"internlm2": InternLM2ForCausalLM}

_ROOT = Path(__file__).parents[2]
_HEAVY = ("deepseek_v2", "deepseek_v3")  # they take longest, so they start first


def shipped() -> dict[str, Recipe]:
    return {each.recipe.name: each.recipe for each in list_recipes() if each.origin == "built-in"}


def mutants_of(recipe: Recipe) -> list[Mutant]:
    return list(mutants(recipe, Family(recipe, REFERENCES.get(recipe.name)).specs))


def names_it(named: str, touched: Sequence[str]) -> bool:
    """Returns whether the named node is one that was changed, is below it, or at most two levels above it."""
    node = named.split(".")
    for path in (one.split(".") for one in touched):
        common = min(len(node), len(path))
        if node[:common] == path[:common] and len(path) - len(node) <= 2:
            return True
    return False


class Hunt:
    """Judges mutants of one recipe; what they share is made once."""

    def __init__(self, recipe: Recipe, directory: Path, num_configs: int = NUM_CONFIGS):
        cases = Cases(directory, num_configs=num_configs, seed=0, model_class=REFERENCES.get(recipe.name))
        self.verifier = Verifier(cases)
        for case in cases.of(recipe):
            comparison = self.verifier.comparer.compare(recipe, case)
            assert comparison.disagreement is None, comparison.disagreement
        self.survivors = Survivors(recipe, cases, self.verifier.comparer)

    def verdict(self, mutant: Mutant) -> dict[str, Any]:
        """Returns ``right`` or ``misnamed`` if verify rejects it, else the verdict of :class:`Survivors`."""
        named = ""
        try:
            finding = self.verifier.verify(mutant.recipe).finding
        except Exception as error:  # verify has to answer for every mistake
            verdict, why = "missed", f"verify itself fails: {type(error).__name__}: {error}"
        else:
            if finding is None:
                verdict, why = self.survivors.fate(mutant.recipe)
            else:
                named = finding.node.path if finding.node else ""
                verdict, why = "right" if names_it(named, mutant.paths) else "misnamed", finding.message
        return {"what": mutant.what, "kind": mutant.kind, "verdict": verdict, "named": named, "why": why}


def judge(name: str, work: Path) -> None:
    """Judges the mutants of one recipe that have no line in its file in ``work``."""
    torch.set_num_threads(1)
    recipe, file = shipped()[name], work / f"{name}.jsonl"
    done = {each["what"] for each in judged(file)}
    left = [mutant for mutant in mutants_of(recipe) if mutant.what not in done]
    if not left:
        return
    with tempfile.TemporaryDirectory() as directory, file.open("a") as out:
        hunt = Hunt(recipe, Path(directory))
        for mutant in left:
            print(json.dumps(hunt.verdict(mutant)), file=out, flush=True)


def judged(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def state() -> str:
    """Returns a digest of everything that a verdict depends on."""
    files = [
        *(_ROOT / "fastgen").rglob("*.py"),
        *(_ROOT / "recipes").glob("*.yaml"),
        *Path(__file__).parent.glob("*.py"),
    ]
    content = b"\0".join(file.read_bytes() for file in sorted(files))
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def report(names: Sequence[str], work: Path, page: Path) -> list[mutation_report.Row]:
    """Writes the results in ``work`` for the recipes ``names``."""
    rows, verdicts = [], {}
    for name in names:
        found = mutants_of(shipped()[name])
        by_what = {each["what"]: each for each in judged(work / f"{name}.jsonl")}
        verdicts[name] = [by_what[mutant.what] for mutant in found]
        rows.append(mutation_report.row(name, verdicts[name], found))
    mutation_report.write(rows, verdicts, page)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fastgen-hunt")
    parser.add_argument("--page", type=Path, default=mutation_report.PAGE)
    parser.add_argument("--figures", type=new_file, help="by default a file of today in benchmarks/results")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("recipes", nargs="*", help="judge these only, and write no page")
    options = parser.parse_args()
    # Of the build that begins, whatever is committed meanwhile.
    made = {"date": datetime.now(UTC).date().isoformat(), "commit": commit()}
    made |= {"processor": processor(), "cores": os.cpu_count()}
    work = options.work / state()
    work.mkdir(parents=True, exist_ok=True)
    names = options.recipes or sorted(shipped(), key=lambda name: (name not in _HEAVY, name))
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        for task in [pool.apply_async(judge, (name, work)) for name in names]:
            task.get()
    if not options.recipes:
        rows = report(sorted(shipped()), work, options.page)
        figures = {row.recipe: [row.num_judged, row.num_rejected, row.num_right] for row in rows}
        file = options.figures or next_file(RESULTS, MUTATIONS, made["date"])
        file.write_text(json.dumps({"made": made, "recipes": figures}, indent=1) + "\n")
        print(mutation_report.total(rows))


if __name__ == "__main__":
    main()
