"""``fastgen bench report`` and ``fastgen bench paper`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab.report.made_runs import fill


@pytest.mark.slow  # tests/lab/report draws the same
def test_a_report_is_written_and_the_table_printed(run, tmp_path: Path) -> None:
    fill(tmp_path)
    done = run("bench", "report", str(tmp_path), "--title", "of two policies")
    assert done.status == 0, done.err
    assert "splitfuse" in done.out
    assert "late.jsonl: invalid" in done.out
    assert "damaged.jsonl could not be read" in done.err
    assert "<title>of two policies</title>" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "throughput_latency.png").exists()


def test_an_empty_directory_has_no_report(run, tmp_path: Path) -> None:
    done = run("bench", "report", str(tmp_path))
    assert (done.status, done.out) == (1, "")
    assert "there is no run and no flight recording in it" in done.err


def test_a_reproduction_is_printed_and_kept(run, tmp_path: Path) -> None:
    done = run("bench", "paper", "chats", "--small", "--out", str(tmp_path / "chats.json"), "--pictures", str(tmp_path))
    assert done.status == 0, done.err
    assert "chats at once: 3584 / 313 = 11" in done.out
    assert json.loads((tmp_path / "chats.json").read_text())["reproduction"] == "chats"
    assert (tmp_path / "lab_chats.png").exists()


def test_a_measured_reproduction_needs_a_model(run) -> None:
    done = run("bench", "paper", "policies")
    assert done.status == 1
    assert "--model" in done.err
