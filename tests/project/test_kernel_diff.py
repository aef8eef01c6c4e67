"""The tool that shows how generated kernels differ between a commit and the working tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import kernel_diff
from tools.kernel_diff import Kernel, compare, report

ROOT = Path(__file__).resolve().parents[2]
LINES = [f"line {number}" for number in range(20)]


def kernel(name: str, lines: list[str], *, arch: str = "sm_90", recipe: str = "llama") -> Kernel:
    return Kernel(arch, recipe, "bf16", "triton/norm", name, "\n".join([f"def {name}():", *lines]))


def changed(lines: list[str], index: int, line: str) -> list[str]:
    return [*lines[:index], line, *lines[index + 1 :]]


def test_equal_kernels_have_no_difference() -> None:
    kernels = [kernel("norm", LINES), kernel("norm", LINES, recipe="opt")]
    assert not compare(kernels, list(kernels))
    assert list(report(compare(kernels, list(kernels)))) == []


def test_a_change_that_kernels_have_in_common_is_shown_once_with_their_number() -> None:
    names, arches = ["norm_a", "norm_b"], ["sm_80", "sm_90"]
    before = [kernel(name, LINES, arch=arch, recipe=recipe) for name in names for arch in arches for recipe in "xy"]
    after = [each._replace(text=each.text.replace("line 10", "line ten")) for each in before]
    (hunk,) = compare(before, after).hunks
    assert len(hunk.kernels) == 4  # of two recipes that need the same kernel one counts
    assert hunk.shown == (" line 8", " line 9", "-line 10", "+line ten", " line 11", " line 12")
    first, *_ = report(compare(before, after))
    assert first == "@@ in 4 kernels of sm_80, sm_90, such as norm_a on sm_80 (x, bf16) @@"


def test_hunks_of_more_kernels_come_first() -> None:
    before = [kernel("norm_a", LINES), kernel("norm_b", LINES)]
    after = [
        kernel("norm_a", changed(changed(LINES, 3, "rare"), 15, "common")),
        kernel("norm_b", changed(LINES, 15, "common")),
    ]
    assert [len(hunk.kernels) for hunk in compare(before, after).hunks] == [2, 1]


def test_a_kernel_of_another_name_and_the_same_text_is_renamed() -> None:
    found = compare([kernel("norm_pairs", LINES)], [kernel("norm_bf16_dot", LINES)])
    assert list(report(found)) == ["renamed: 1 kernels of 1 names", "  norm_pairs -> norm_bf16_dot"]


def test_a_renamed_kernel_s_changes_are_shown_too() -> None:
    found = compare([kernel("old", LINES)], [kernel("new", changed(LINES, 5, "changed"))])
    assert [(old.name, new.name) for old, new in found.renamed] == [("old", "new")]
    assert [len(hunk.kernels) for hunk in found.hunks] == [1]


def test_kernels_with_little_in_common_are_gone_and_new() -> None:
    found = compare([kernel("old", LINES)], [kernel("new", ["something", "else"])])
    assert list(report(found)) == ["new: 1 kernels of 1 names", "  new", "gone: 1 kernels of 1 names", "  old"]


def test_two_kernels_of_one_name_are_told_apart_by_their_text() -> None:
    first, second = kernel("norm", LINES), kernel("norm", changed(LINES, 2, "other"))
    assert not compare([first, second], [second, first])


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with this tree's sources as its only commit, and one change of a template that is not committed."""
    tree = tmp_path_factory.mktemp("kernel_diff") / "tree"
    for name in ("fastgen", "recipes", "tests", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    (tree / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "result_files.py", tree / "benchmarks")
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "-A", "-f"), (*who, "commit", "-q", "-m", "all")):
        subprocess.run(["git", *command], cwd=tree, check=True)
    (template,) = (tree / "fastgen" / "compile").rglob("norm.py.j2")
    template.write_text(template.read_text(encoding="utf-8") + "# the last line\n", encoding="utf-8")
    return tree


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.kernel_diff", *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_changed_template_is_one_hunk_with_the_number_of_its_kernels(repository: Path) -> None:
    done = run(repository, "HEAD", "--arch", "sm_90", "--recipe", "llama,opt")
    assert done.returncode == 1, done.stderr
    # llama: RMS norm with and without a residual; opt: layer norm likewise
    assert done.stdout.count("@@ in ") == 1
    assert "@@ in 4 kernels of sm_90, such as " in done.stdout
    assert "\n+# the last line\n" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" kernels: 1 hunks differ")


def test_an_unknown_commit_architecture_or_recipe_is_an_error_of_one_line(repository: Path) -> None:
    for arguments, message in (
        (["nowhere"], "this repository has no commit 'nowhere'"),
        (["HEAD", "--arch", "sm_1"], "architecture 'sm_1': expected some of sm_80, "),
        (["HEAD", "--target", "cpp", "--arch", "sm_90"], "architecture 'sm_90': expected some of amx, avx512bf16, "),
        (["HEAD", "--recipe", "lama"], "recipe 'lama': expected some of bloom, "),
    ):
        done = run(repository, *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith(f"kernel_diff: {message}")
        assert len(done.stderr.splitlines()) == 1


def test_the_tool_knows_every_architecture() -> None:
    from tests.compile.kernel_sources import ARCHES

    assert kernel_diff._TARGETS == ARCHES
