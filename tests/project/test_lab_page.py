"""docs/lab.md can be followed: its commands lead from the question to the report, and its Python runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastgen.cli import app
from fastgen.lab.report.results import read_directory
from tests.pages import DOCS, blocks
from tests.project.test_docs import printed_by

PAGE = DOCS / "lab.md"
# What makes the walk short: a calibration of a few seconds, and a limit that the first levels of the search miss.
SHORTER = {"--seconds 60": "--seconds 5", "--goodput ttft:500 tpot:15": "--goodput ttft:500 tpot:0.01"}


@pytest.mark.slow  # tests/cli runs each of its commands
def test_the_walk_leads_to_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ (fastgen .*)$", PAGE.read_text(), re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["calibrate", "plan", "bench", "bench"]
    for command in commands:
        for long, short in SHORTER.items():
            command = command.replace(long, short)
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, f"{command}: {done.output}"
    results = read_directory("runs").results
    report = Path("runs/report.html").read_text()
    assert all(result.file in report for result in results)
    # On a busy machine a load generator may be late in every run. Such runs are in the tables, but in no picture.
    assert ("data:image/png;base64," in report) == any(result.usable for result in results)
    assert "<script" not in report


@pytest.mark.slow
def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks(PAGE, "python")
    monkeypatch.chdir(tmp_path)
    printed_by(code)
    assert "prefill_first" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "throughput_latency.png").exists()
