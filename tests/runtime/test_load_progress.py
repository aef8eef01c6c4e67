"""Progress on a terminal while a model is loaded."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

import fastgen
from tests.runtime.checkpoints import save_checkpoint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("target", "builds"), [("torch", False), ("cpp", True)])
def test_bars_of_what_there_is_to_do(
    target: str, builds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint("llama", tmp_path)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    fastgen.load(tmp_path, target=target).close()
    assert "weights" in terminal.getvalue()
    assert ("kernels" in terminal.getvalue()) is builds
