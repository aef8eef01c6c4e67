"""docs/status.md says what the recorded measurements say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jinja2
import pytest

from tools.status import PAGE, RESULTS, newest, render


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == render(), "run `python -m tools.status`"


def test_a_newer_measurement_changes_the_page(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    kills = newest(RESULTS, "serving_storm")
    kills["kills"]["kills"] = 12_345
    (tmp_path / "serving_storm_2999-01-01.json").write_text(json.dumps(kills))
    page = render(tmp_path)
    assert "The engine was killed 12345 times" in page
    assert "serving_storm_2999-01-01.json" in page


def test_a_figure_that_was_not_measured_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    soak = newest(RESULTS, "soak")
    del soak["date"]
    (tmp_path / "soak_2999-01-01.json").write_text(json.dumps(soak))
    with pytest.raises(jinja2.UndefinedError, match="date"):
        render(tmp_path)


def test_files_of_another_kind_are_not_taken() -> None:
    assert "serving_20" in newest(RESULTS, "serving")["link"]
    assert "token_gaps_20" in newest(RESULTS, "token_gaps")["link"]
