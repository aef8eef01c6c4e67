"""Shows how the generated kernels of the working tree differ from those of a commit.

    python -m tools.kernel_diff HEAD [--target triton] [--arch sm_90,avx2] [--recipe llama,mixtral]

Every kernel of every shipped recipe is rendered at small sizes, in each weight format that the target multiplies, once
by the working tree and once by the commit, which is exported into a temporary directory. A hunk that many kernels have
in common is printed once, with their number and one of their names. It needs neither a compiler nor a GPU.

Exit status: 0 where nothing differs, 1 where something does, 2 for an error. The oldest commit that can be rendered is
the one of November 2026 in which ``tests/compile/golden.py`` got its function ``small``.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[1]
_RENDER = Path(__file__).with_name("render_kernels.py")
# What of a commit its kernels are rendered from, as far as it has it. The list of published configurations is in the
# tests of the recipe matrix, whose files of results the benchmarks name.
_RENDERED_FROM = ("fastgen", "recipes", "tests", "tools", "benchmarks/result_files.py")
_TARGETS = {
    "triton": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942"),
    "cpp": ("amx", "avx512bf16", "avx512vnni", "avx512", "avx2", "portable"),
}
_CONTEXT = 2  # lines around a change
_ALIKE = 0.6  # share of lines that a kernel keeps under another name; with fewer it is one gone and one new
_SHOWN_NAMES = 12
_PLACEHOLDER = "<kernel>"  # for a kernel's own name, so that the same change of two kernels is the same hunk


class KernelDiffError(Exception):
    """An error that the command prints as one line."""


class Kernel(NamedTuple):
    """A rendered kernel, as one recipe needs it."""

    arch: str
    recipe: str
    weight_format: str
    template: str
    name: str
    text: str

    @property
    def plain_text(self) -> str:
        return self.text.replace(self.name, _PLACEHOLDER)

    @property
    def label(self) -> str:
        return f"{self.name} on {self.arch}"

    @property
    def build(self) -> tuple[str, str, str]:
        return self.arch, self.recipe, self.weight_format


class Hunk(NamedTuple):
    """A change that some kernels have in common: its removed and added lines, shown as in the first of them."""

    shown: tuple[str, ...]
    kernels: list[Kernel]


class Difference(NamedTuple):
    """Everything that differs between two sets of kernels."""

    hunks: list[Hunk]
    new: list[Kernel]
    gone: list[Kernel]
    renamed: list[tuple[Kernel, Kernel]]

    def __bool__(self) -> bool:
        return any(self)


def compare(before: Iterable[Kernel], after: Iterable[Kernel]) -> Difference:
    """Pairs the kernels of each recipe, architecture and weight format, by name or by content, and diffs the pairs."""
    new: dict[str, Kernel] = {}
    gone: dict[str, Kernel] = {}
    pairs: dict[tuple[str, str, str, str], tuple[Kernel, Kernel]] = {}
    olds, news = _by_build(before), _by_build(after)
    for build in dict.fromkeys([*olds, *news]):
        found, only_old, only_new = _pair(olds.get(build, []), news.get(build, []))
        for old, current in found:
            pairs.setdefault((old.label, old.text, current.label, current.text), (old, current))
        for each in only_old:
            gone.setdefault(each.label, each)
        for each in only_new:
            new.setdefault(each.label, each)
    hunks: dict[tuple[str, ...], Hunk] = {}
    for old, current in pairs.values():
        for shown in _hunks(old.plain_text, current.plain_text) if old.plain_text != current.plain_text else ():
            changed = tuple(line for line in shown if line[0] in "+-")
            hunks.setdefault(changed, Hunk(shown, [])).kernels.append(current)
    renamed = {old.label: (old, current) for old, current in pairs.values() if old.name != current.name}
    return Difference(
        sorted(hunks.values(), key=lambda hunk: -len(hunk.kernels)),
        list(new.values()),
        list(gone.values()),
        list(renamed.values()),
    )


def report(difference: Difference) -> Iterator[str]:
    """The lines to print; none where nothing differs."""
    for hunk in difference.hunks:
        first, count = hunk.kernels[0], len(hunk.kernels)
        arches = ", ".join(dict.fromkeys(each.arch for each in hunk.kernels))
        where = (
            f"in 1 kernel: {first.label}" if count == 1 else f"in {count} kernels of {arches}, such as {first.label}"
        )
        yield f"@@ {where} ({first.recipe}, {first.weight_format}) @@"
        yield from hunk.shown
        yield ""
    yield from _listed("renamed", [f"{old.name} -> {current.name}" for old, current in difference.renamed])
    yield from _listed("new", [each.name for each in difference.new])
    yield from _listed("gone", [each.name for each in difference.gone])


def kernels_of(tree: Path, arches: list[str], recipes: list[str], scratch: Path) -> list[Kernel]:
    """Renders the kernels of a source tree in a process that imports fastgen from there."""
    output = scratch / "kernels.json"
    selection = json.dumps({"arches": arches, "recipes": recipes})
    command = [sys.executable, str(_RENDER), selection, str(output)]
    environment = {key: value for key, value in os.environ.items() if key != "FASTGEN_RECIPES"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelDiffError(f"rendering the kernels of {tree} failed:\n{done.stderr.strip()}")
    found = json.loads(output.read_text(encoding="utf-8"))
    return [Kernel._make([*row, found["texts"][text]]) for *row, text in found["kernels"]]


def export(commit: str, directory: Path) -> None:
    """Unpacks what rendering needs of a commit into ``directory``."""
    try:
        commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}").decode().strip()
    except KernelDiffError:
        raise KernelDiffError(f"this repository has no commit {commit!r}") from None
    paths = _git("ls-tree", "--name-only", commit, "--", *_RENDERED_FROM).decode().split()
    archive = _git("archive", "--format=tar", commit, *paths)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="data")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with: a hash, a branch, HEAD~2, …")
    parser.add_argument("--target", choices=list(_TARGETS), help="only the architectures of this target")
    parser.add_argument("--arch", type=_names, default=[], help="only these architectures, separated by commas")
    parser.add_argument("--recipe", type=_names, default=[], help="only these recipes, separated by commas")
    options = parser.parse_args()
    try:
        return _run(options.base, _arches(options.target, options.arch), options.recipe)
    except KernelDiffError as error:
        print(f"kernel_diff: {error}", file=sys.stderr)
        return 2


def _run(base: str, arches: list[str], recipes: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="kernel_diff-") as scratch:
        directory = Path(scratch, "base")
        export(base, directory)
        known = {file.stem for tree in (_ROOT, directory) for file in (tree / "recipes").glob("*.yaml")}
        if unknown := [name for name in recipes if name not in known]:
            raise KernelDiffError(f"recipe {unknown[0]!r}: expected some of {', '.join(sorted(known))}")
        before, after = (kernels_of(tree, arches, recipes, Path(scratch)) for tree in (directory, _ROOT))
    difference = compare(before, after)
    for line in report(difference):
        print(line)
    distinct = len({(each.arch, each.name, each.text) for each in after})
    print(
        f"{distinct} kernels: {len(difference.hunks)} hunks differ" if difference else f"{distinct} kernels: the same"
    )
    return 1 if difference else 0


def _arches(target: str | None, arches: list[str]) -> list[str]:
    known = _TARGETS[target] if target else [arch for each in _TARGETS.values() for arch in each]
    if unknown := [arch for arch in arches if arch not in known]:
        raise KernelDiffError(f"architecture {unknown[0]!r}: expected some of {', '.join(known)}")
    return arches or list(known)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, check=False)
    if done.returncode:
        raise KernelDiffError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _by_build(kernels: Iterable[Kernel]) -> dict[tuple[str, str, str], list[Kernel]]:
    found: dict[tuple[str, str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        found[kernel.build].append(kernel)
    return found


def _pair(olds: list[Kernel], news: list[Kernel]) -> tuple[list[tuple[Kernel, Kernel]], list[Kernel], list[Kernel]]:
    """Returns the pairs of one build, then what has no counterpart among ``olds`` and among ``news``.

    Of several kernels of one name, those of the same text go together first.
    """
    pairs: list[tuple[Kernel, Kernel]] = []
    only_old, only_new = list(olds), list(news)

    def take(old: Kernel, new: Kernel) -> None:
        pairs.append((old, new))
        only_old.remove(old)
        only_new.remove(new)

    same = set(news)
    for old in olds:
        if old in same:
            take(old, old)
    for old in list(only_old):
        if new := next((each for each in only_new if each.name == old.name), None):
            take(old, new)
    candidates = [
        (likeness, old, new)
        for old in only_old
        for new in only_new
        if old.template == new.template and (likeness := _likeness(old.plain_text, new.plain_text)) >= _ALIKE
    ]
    for _, old, new in sorted(candidates, key=lambda each: -each[0]):
        if old in only_old and new in only_new:
            take(old, new)
    return pairs, only_old, only_new


@cache
def _likeness(one: str, other: str) -> float:
    """The share of lines that two texts have in common, 0 to 1."""
    ones, others = Counter(one.splitlines()), Counter(other.splitlines())
    return 2 * (ones & others).total() / max(1, ones.total() + others.total())


@cache
def _hunks(before: str, after: str) -> list[tuple[str, ...]]:
    hunks: list[list[str]] = []
    for line in list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=_CONTEXT))[2:]:
        if line.startswith("@@"):
            hunks.append([])
        else:
            hunks[-1].append(line)
    return [tuple(hunk) for hunk in hunks]


def _listed(word: str, names: list[str]) -> Iterator[str]:
    distinct = sorted(Counter(names).items())
    if not distinct:
        return
    yield f"{word}: {len(names)} kernels of {len(distinct)} names"
    for name, count in distinct[:_SHOWN_NAMES]:
        yield f"  {name}" + (f" on {count} architectures" if count > 1 else "")
    if len(distinct) > _SHOWN_NAMES:
        yield f"  … and {len(distinct) - _SHOWN_NAMES} more"


if __name__ == "__main__":
    sys.exit(main())
