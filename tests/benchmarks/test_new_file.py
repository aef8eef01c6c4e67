"""Results of measurements are not overwritten, and say when, where and of which build they were made."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from benchmarks.cpu.results import Results, about_this_run, commit
from benchmarks.new_file import new_file
from fastgen.lab.machine import machine_facts

ROOT = Path(__file__).resolve().parents[2]
# Scripts that continue a file, keep what is in it by themselves, or write an archive of kernels.
OTHERS = {
    *(f"benchmarks/cpu/{each}.py" for each in ("whole_model", "ablations", "builds_in_turns")),
    *("tools/mutate.py", "benchmarks/gpu/prebuilt.py"),
}
_ARGUMENT = re.compile(r'add_argument\("--(?:output|json)", type=(\w+)')
_WRITES_RESULTS = re.compile(r'add_argument\(\s*"--(?:output|json|results|figures)"|(?<!def )next_file\(')
_RECORDS_A_COMMIT = re.compile(
    r"\b(?:commit|about_this_run|about_machine|machine_facts)\(|from benchmarks\.cpu\.results import Results\b"
)
# An archive of kernels has no figures. Lines of mutations are judged by hand, into a record that names the commit.
WITHOUT_COMMIT = {"benchmarks/gpu/prebuilt.py", "tools/mutate.py"}


def test_a_file_that_is_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert new_file(str(file)) == file
    file.write_text("measured before")
    with pytest.raises(argparse.ArgumentTypeError, match=r"results\.json is there already.*name another file"):
        new_file(str(file))
    assert file.read_text() == "measured before"


def scripts() -> dict[str, str]:
    """Returns the text of every script that may write results, by its path in the repository."""
    files = [each for folder in ("benchmarks", "tests", "tools") for each in (ROOT / folder).rglob("*.py")]
    return {str(each.relative_to(ROOT)): each.read_text() for each in files if not each.stem.startswith("test_")}


def test_every_script_that_writes_results_refuses_one() -> None:
    found = {name: _ARGUMENT.findall(text) for name, text in scripts().items()}
    wrong = {name for name, types in found.items() if set(types) - {"new_file"}}
    assert wrong == OTHERS
    assert sum(map(len, found.values())) >= 22


def test_every_script_that_writes_results_records_the_commit() -> None:
    writing = {name: text for name, text in scripts().items() if _WRITES_RESULTS.search(text)}
    assert {"tests/matrix.py", "tests/compile/ahead_of_time.py", "benchmarks/gpu/__main__.py"} <= writing.keys()
    assert {name for name, text in writing.items() if not _RECORDS_A_COMMIT.search(text)} == WITHOUT_COMMIT


def test_what_scripts_record_has_date_machine_and_commit(tmp_path: Path) -> None:
    assert {"date", "machine", "cores", "commit"} <= about_this_run().keys()
    assert {"processor", "cores", "commit"} <= machine_facts().keys()
    results = Results(tmp_path / "results.json", num_threads=1)
    results.add("samples", seconds=1.0)
    assert {"machine", "cores"} <= results.data["about"].keys()
    assert {"date", "commit", "seconds"} == results.data["samples"][0].keys()


@pytest.mark.parametrize("lacking", ["git", "a repository"])
def test_a_copy_without_git_is_of_the_commit_that_the_caller_names(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*(("PATH", str(tmp_path)) if lacking == "git" else ("GIT_DIR", str(tmp_path))))
    monkeypatch.delenv("FASTGEN_COMMIT", raising=False)
    assert commit() == ""
    monkeypatch.setenv("FASTGEN_COMMIT", "abc1234")
    assert commit() == "abc1234"
