"""A report shows every run of a directory, marks what must not be used, and needs nothing beside its one file."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fastgen.errors import InvalidArgumentError, RecordingError
from fastgen.lab.report.html import write_report
from fastgen.lab.report.results import read_directory
from tests.lab.report.made_runs import fill


class Page(HTMLParser):
    """Collects tags, what they refer to, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    fill(directory)
    return directory


@pytest.fixture(scope="module")
def written(runs: Path) -> Path:
    write_report(read_directory(runs), runs / "report.html", title="a title & more")
    return runs


def test_the_file_refers_to_nothing_outside_itself(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert all(each.startswith("data:image/png;base64,") for each in page.references)
    assert "url(" not in (written / "report.html").read_text()


def test_every_picture_is_inside_and_beside_the_report(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    inside = {base64.b64decode(each.partition(",")[2]) for each in page.references}
    beside = {each.name: each.read_bytes() for each in written.glob("*.png")}
    assert set(beside.values()) == inside
    assert set(beside) == {
        f"{name}.png"
        for name in (
            "throughput_latency",
            "effective_throughput",
            "token_gaps",
            "latency_tokens",
            "latency_sequences",
            "throughput_tokens",
            "steps",
            "cache",
        )
    }


def test_runs_that_must_not_be_used_are_marked(written: Path) -> None:
    text = " ".join(Page((written / "report.html").read_text()).text.split())
    assert "invalid requests were sent up to 2.1 s late" in text
    assert "interrupted it was stopped before all requests were answered" in text
    assert re.search(r"unread damaged\.jsonl: .*damaged\.jsonl:\d+: the line has no end", text)
    assert "notes.jsonl" not in text


def test_raw_files_machines_and_counts_are_named(written: Path) -> None:
    text = " ".join(Page((written / "report.html").read_text()).text.split())
    for name in ("splitfuse_16.jsonl", "orca_1.jsonl", "late.jsonl", "stopped.jsonl", "orca_flight.jsonl"):
        assert name in text
    assert "39 of 40" in text
    assert "<b>made</b>" in text  # a fact of a file, and no markup
    assert "docs/lab-metrics.md" in text


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="there is no run and no flight recording in it"):
        read_directory(tmp_path)


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(InvalidArgumentError, match="is not a directory; name the one that"):
            read_directory(path)


def test_a_report_that_cannot_be_written_says_why(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.lab.report.html.pictures", lambda collection: [])  # they take seconds
    with pytest.raises(RecordingError, match="the report cannot be written: No such file"):
        write_report(read_directory(runs), tmp_path / "missing" / "report.html")


def test_without_matplotlib_the_extra_is_named(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidArgumentError, match=r"needs matplotlib.*pip install 'fastgen-llm\[bench\]'"):
        write_report(read_directory(runs), tmp_path / "report.html")
