"""Results of measurements are not overwritten."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from benchmarks.new_file import new_file

ROOT = Path(__file__).resolve().parents[2]
# Scripts that continue a file, keep what is in it by themselves, or write an archive of kernels.
OTHERS = {"whole_model", "ablations", "builds_in_turns", "mutate", "prebuilt"}
_ARGUMENT = re.compile(r'add_argument\("--(?:output|json)", type=(\w+)')


def test_a_file_that_is_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert new_file(str(file)) == file
    file.write_text("measured before")
    with pytest.raises(argparse.ArgumentTypeError, match=r"results\.json is there already.*name another file"):
        new_file(str(file))
    assert file.read_text() == "measured before"


def test_every_script_that_writes_results_refuses_one() -> None:
    scripts = [each for folder in ("benchmarks", "tests", "tools") for each in (ROOT / folder).rglob("*.py")]
    found = {each.stem: _ARGUMENT.findall(each.read_text()) for each in scripts if each != Path(__file__)}
    wrong = {name for name, types in found.items() if set(types) - {"new_file"}}
    assert wrong == OTHERS
    assert sum(map(len, found.values())) >= 22
