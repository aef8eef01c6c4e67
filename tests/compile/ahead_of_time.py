"""Builds every distinct kernel of every shipped recipe for every GPU target, and stores what the compiler reports.

    python -m tests.compile.ahead_of_time [--targets sm_90,gfx942] [--minutes 60]

takes each recipe at a published configuration, with weights as they come and in each format of ``quantize=``, and
builds the kernels that are not in :data:`RESULTS` yet. The file is written after every few kernels, so the command may
be stopped and continues there. Kernels that were built by other versions of the tools or from another source are built
again, so builds by another Triton go to another file (``--results``), such as :data:`OLDEST`.

``--render`` writes the table of docs/kernels.md from the results and builds nothing. The table says how many of today's
kernels were built from today's source, and a test fails while it does not. ``make test-all`` ends with an hour of
building what is missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.cpu.results import commit
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.sources import body_hash
from fastgen.compile.build.triton import TRITON_ARCHES, TritonBuilder
from fastgen.compile.spec import KernelSpec
from fastgen.compile.weights.formats import QUANTIZED
from fastgen.lab.machine import processor
from fastgen.models.kernels import kernel_specs
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import ModelSpec
from tests.recipe_tools.published import CONFIGS

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results" / "kernels_aot_2026-11-21.json"
# Built by the oldest Triton that is allowed.
OLDEST: Final = ROOT / "benchmarks" / "results" / "kernels_oldest_triton_2026-11-27_3.json"
PAGE: Final = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- built ahead of time: begin -->\n", "<!-- built ahead of time: end -->\n"
_KEPT: Final = ("registers", "spill_bytes", "shared_bytes", "shared_limit_bytes", "matrix_instructions", "occupancy")
_AT_ONCE: Final = 4  # kernels between two writes of the results
_FIRST: Final = ("attention", "grouped_linear", "few_row_linear", "qkv", "latent_kv")  # where registers are scarce

Found = dict[str, Any]
# By target: the hash of a kernel's source, by the kernel's digest.
Sources = Mapping[str, Mapping[str, str]]


def models(configs: Iterable[dict[str, Any]]) -> list[ModelSpec]:
    return [resolve(find_recipe(config), config) for config in configs]


def wanted(arch: str, models: Iterable[ModelSpec]) -> dict[KernelSpec, list[str]]:
    """Returns the distinct kernels that ``models`` need in bf16, with weights in bf16 and in every other format, and
    the recipes that need each."""
    loader = KernelLoader(TritonBuilder(arch), num_jobs=1)
    recipes: dict[KernelSpec, list[str]] = defaultdict(list)
    for model, weight_format in itertools.product(models, (None, *QUANTIZED["triton"])):
        for spec in kernel_specs(model, loader, torch.bfloat16, weight_format=weight_format):
            if model.recipe not in recipes[spec]:
                recipes[spec].append(model.recipe)
    return recipes


def problems(arch: str, spec: KernelSpec, found: Found) -> list[str]:
    """Lists a build's problems: spills, too much shared memory, no tensor-core instruction where one is expected."""
    wrong = [f"spills {found['spill_bytes']} bytes"] if found["spill_bytes"] else []
    if found["shared_limit_bytes"] is not None and found["shared_bytes"] > found["shared_limit_bytes"]:
        wrong.append(f"takes {found['shared_bytes']} of {found['shared_limit_bytes']} bytes of shared memory")
    if (expected := matrix_instruction(arch, spec)) and not found["matrix_instructions"].get(expected):
        wrong.append(f"has no {expected}")
    return wrong


def matrix_instruction(arch: str, spec: KernelSpec) -> str | None:
    """Returns the tensor-core instruction that a kernel must contain, or ``None``.

    On ``sm_90`` attention for prompts must use Hopper's ``wgmma``. Products of 16 rows or more must use either kind.
    """
    if arch not in ("sm_80", "sm_90") or spec.parameters.get("dtype") == "fp32":
        return None
    if spec.op == "attention" and spec.parameters["kind"] == "chunks":
        block_m = spec.parameters["block_m"]
        assert isinstance(block_m, int)
        return "wgmma" if arch == "sm_90" and block_m >= 64 else "mma"
    if spec.op == "few_row_linear":
        block_n = spec.parameters["block_n"]
        assert isinstance(block_n, int)
        return "wgmma" if arch == "sm_90" and block_n >= 64 else "mma"  # outputs are the rows of its products
    return None


def source(spec: KernelSpec) -> str:
    """Returns a short hash of the kernel's source, without what names the recipes that need it."""
    return body_hash(spec)[:16]


def sources_of_today() -> Sources:
    """Returns, by target, the source's hash of every kernel that a recipe needs, by the kernel's digest."""
    published = models(config for _, config in CONFIGS.values())
    return {arch: {spec.digest: source(spec) for spec in wanted(arch, published)} for arch in TRITON_ARCHES}


class Results:
    """Holds the builds by target and digest: the kernel, its recipes, its source's hash and the compiler's report.

    ``runs`` has the date, commit and machine of every run that added kernels, from 2026-11-28 on.
    """

    def __init__(self, file: Path):
        self.file = file
        self._run = {"date": _today(), "commit": commit(), "processor": processor(), "cores": os.cpu_count()}
        self.data: dict[str, Any] = {"date": "", "versions": {}, "distinct": {}, "kernels": {}}
        if file.exists():
            self.data = json.loads(file.read_text(encoding="utf-8"))

    def begin(self, arch: str, specs: dict[KernelSpec, list[str]]) -> list[KernelSpec]:
        """Returns the kernels that are still to be built, and drops those that no recipe needs any more."""
        versions = {"triton": TritonBuilder(arch).versions()["triton"]}
        if self.data["versions"].get(arch) != versions:
            self.data["versions"][arch], self.data["kernels"][arch] = versions, {}
        self.data["distinct"][arch] = len(specs)
        built = self.data["kernels"][arch]
        kept = {spec.digest: source(spec) for spec in specs}
        self.data["kernels"][arch] = {key: each for key, each in built.items() if kept.get(key) == each["source"]}
        return sorted((each for each in specs if each.digest not in self.data["kernels"][arch]), key=_order)

    def add(self, arch: str, spec: KernelSpec, recipes: list[str], report: Found) -> None:
        wrong = problems(arch, spec, report)
        runs = self.data.setdefault("runs", [])
        if self._run not in runs:
            runs.append(self._run)
        self.data["kernels"][arch][spec.digest] = {
            "name": spec.name,
            "op": spec.op,
            "recipes": recipes,
            "source": source(spec),
            **{key: report[key] for key in _KEPT},
            **({"problems": wrong} if wrong else {}),
        }

    def write(self) -> None:
        """Replaces the file atomically, with a line for each kernel."""
        self.data["date"] = _today()
        kernels = ",\n".join(
            f'  "{arch}": {{\n'
            + ",\n".join(f'   "{digest}": {json.dumps(each)}' for digest, each in sorted(found.items()))
            + "\n  }"
            for arch, found in sorted(self.data["kernels"].items())
        )
        head = {key: value for key, value in self.data.items() if key != "kernels"}
        unfinished = self.file.with_name(f".{self.file.name}.unfinished")
        unfinished.write_text(json.dumps(head, indent=1)[:-2] + f',\n "kernels": {{\n{kernels}\n }}\n}}\n')
        os.replace(unfinished, self.file)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def build(arches: list[str], seconds: float, results: Results) -> Iterator[str]:
    """Builds the missing kernels, alternating between the targets, and yields a line after every few kernels."""
    end = time.monotonic() + seconds
    published = models(config for _, config in CONFIGS.values())
    recipes = {arch: wanted(arch, published) for arch in arches}
    waiting = {arch: _batches(results.begin(arch, recipes[arch])) for arch in arches}
    results.write()
    loaders = {arch: KernelLoader(TritonBuilder(arch), num_jobs=1) for arch in arches}
    for arch, batch in itertools.chain.from_iterable(
        itertools.zip_longest(*([(arch, batch) for batch in waiting[arch]] for arch in arches), fillvalue=("", []))
    ):
        if not batch:
            continue
        if time.monotonic() > end:
            return
        for spec, entry in zip(batch, loaders[arch].build(batch), strict=True):
            results.add(arch, spec, recipes[arch][spec], dict(entry.report))
        results.write()
        yield f"{arch}: {len(results.data['kernels'][arch])} of {results.data['distinct'][arch]}"


def _batches(specs: list[KernelSpec]) -> list[list[KernelSpec]]:
    return [specs[first : first + _AT_ONCE] for first in range(0, len(specs), _AT_ONCE)]


def _order(spec: KernelSpec) -> tuple[int, str]:
    return (_FIRST.index(spec.op) if spec.op in _FIRST else len(_FIRST), spec.digest)


def table(results: Results, today: Sources) -> str:
    """Returns a table with a row for each target: how many of the kernels needed ``today`` are built from today's
    source, and how many builds have which problem."""
    lines = [
        "| target | kernels needed | built from today's source | spilling | over its shared memory | without the "
        "tensor-core instruction asked for | most registers | most shared memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arch in TRITON_ARCHES:
        needed, built = today.get(arch, {}), results.data["kernels"].get(arch, {})
        num_current = sum(built.get(digest, {}).get("source") == source for digest, source in needed.items())
        kernels = list(built.values())
        wrong = Counter(problem.split()[0] for each in kernels for problem in each.get("problems", ()))
        most = {key: max((each[key] for each in kernels), default=0) for key in ("registers", "shared_bytes")}
        lines.append(
            f"| `{arch}` | {len(needed)} | {num_current} | {wrong['spills']} | "
            f"{wrong['takes']} | {wrong['has']} | {most['registers']} | {most['shared_bytes'] / 1024:.0f} KiB |"
        )
    versions = ", ".join(sorted({each["triton"] for each in results.data["versions"].values()}))
    return "\n".join([*lines, "", f"Built by Triton {versions}, {results.data['date']}.", ""])


def page(text: str, results: Results, today: Sources) -> str:
    """Returns the text of docs/kernels.md with its table replaced."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}{table(results, today)}{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TRITON_ARCHES))
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of results that is continued")
    parser.add_argument("--render", action="store_true", help="only write the table of docs/kernels.md")
    options = parser.parse_args()
    results = Results(options.results)
    if not options.render:
        for line in build(options.targets.split(","), 60 * options.minutes, results):
            print(line, flush=True)
    if options.results == RESULTS:
        text = page(PAGE.read_text(encoding="utf-8"), results, sources_of_today())
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
