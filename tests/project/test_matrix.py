"""docs/recipe-matrix.md is what the last run recorded: the shipped recipes, the known proofs, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.result_files import RESULTS, build, files
from tests import matrix
from tests.matrix import MATRIX, MUTATIONS, PAGE, PROOFS, read_newest, read_records, render
from tests.shuffled import shipped_texts

# Transformers does not know the architecture.
NOT_MEASURED = {("internlm2", "verify"), ("internlm2", "engine")}


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == render(read_newest(MATRIX), read_newest(MUTATIONS)), "run `make matrix`"


def test_every_recipe_has_every_proof() -> None:
    cells = read_newest(MATRIX)["cells"]
    wanted = {(recipe, proof) for recipe in shipped_texts() for proof in PROOFS.keys() - {"mutations"}} - NOT_MEASURED
    assert {(recipe, proof) for recipe, of_recipe in cells.items() for proof in of_recipe} == wanted
    assert read_newest(MUTATIONS)["recipes"].keys() <= shipped_texts().keys()


def test_the_table_has_a_row_a_recipe_and_a_column_a_proof() -> None:
    header, _, *rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header] == ["recipe", *(proof.heading for proof in PROOFS.values())]
    assert [row[0].strip().strip("`") for row in rows] == sorted(shipped_texts())
    assert all(len(row) == len(header) and all(cell.strip() for cell in row) for row in rows)


@pytest.mark.parametrize("proof", ["parity", "shuffled"])
def test_no_difference_is_beyond_what_the_tests_allow(proof: str) -> None:
    for recipe, of_recipe in read_newest(MATRIX)["cells"].items():
        assert 0 < max(of_recipe[proof]) <= 1e-4, recipe


def test_a_recorded_run_becomes_cells(tmp_path: Path) -> None:
    file = tmp_path / "records"
    file.write_text('["b", "parity", 1e-5]\n["a", "bfloat16", [1.0, 2.0]]\n["b", "parity", 3e-5]\n')
    cells = read_records(file)
    assert cells == {"a": {"bfloat16": [[1.0, 2.0]]}, "b": {"parity": [1e-5, 3e-5]}}
    made = {"date": "d", "commit": "c", "machine": "m", "torch": "t", "transformers": "v"}
    page = render({"made": made, "cells": cells}, {"made": {"date": "h"}, "recipes": {"a": [10, 9, 8]}})
    assert "\nd, commit c, m, torch t, transformers v.\n" in page
    assert "\nh, commit not recorded.\n" in page
    (a, b) = re.findall(r"^\| `[ab]` .*$", page, re.M)
    assert [cell.strip() for cell in a.split("|")][1:-1] == [
        "`a`",
        "–",
        "–",
        "0.50",
        "–",
        "–",
        "–",
        "9 of 10, 8 at the node",
    ]
    assert "3.0e-05 (2)" in b


def test_a_run_is_kept_beside_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(files(RESULTS, MUTATIONS)[-1], tmp_path)
    records, page = tmp_path / "records", tmp_path / "page.md"
    monkeypatch.setattr(matrix, "RESULTS", tmp_path)
    monkeypatch.setattr(matrix, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["matrix", "--records", str(records)])
    for difference in (1e-5, 3e-5):
        records.write_text(f'["llama", "parity", {difference}]\n')
        matrix.main()
    first, second = (json.loads(file.read_text()) for file in files(tmp_path, MATRIX))
    assert [each["cells"] for each in (first, second)] == [{"llama": {"parity": [each]}} for each in (1e-5, 3e-5)]
    assert {"date", "commit", "processor", "cores", "torch", "transformers"} <= second["made"].keys()
    assert build(second["made"]) in page.read_text()
    assert "3.0e-05 (1)" in page.read_text()
