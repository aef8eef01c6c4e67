"""Progress bars: shown to people, and to nobody else."""

from __future__ import annotations

import io
import sys

import pytest

from fastgen.runtime.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("unit", "amount"), [("", "3/7"), ("B", "3/7 bytes")])
def test_a_terminal_is_told_how_far_it_is(monkeypatch: pytest.MonkeyPatch, unit: str, amount: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("weights", unit=unit) as update:  # type: ignore[arg-type]
        update(3, 7)
    assert "weights" in terminal.getvalue()
    assert amount in terminal.getvalue()


@pytest.mark.parametrize(("stream", "enabled"), [(io.StringIO(), True), (Terminal(), False)])
def test_nothing_is_shown_elsewhere(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, enabled: bool) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("weights", enabled=enabled) as update:
        update(3, 7)
    assert stream.getvalue() == ""
