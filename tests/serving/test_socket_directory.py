"""Directories of sockets: those of killed servers are removed, those in use and those of others are not."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fastgen.serving.engine.socket_directory import SocketDirectory


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def in_use() -> SocketDirectory:
    directory = SocketDirectory()
    (directory.path / "engine-1").touch()
    return directory


def test_the_directory_of_a_killed_server_is_removed_by_the_next_one() -> None:
    killed = in_use()
    os.close(killed._lock)  # as the system does
    following = in_use()
    assert not killed.path.exists()
    following.remove()
    assert not following.path.exists()


def test_a_directory_in_use_stays() -> None:
    first, second = in_use(), in_use()
    third = SocketDirectory()
    assert first.path.exists()
    assert second.path.exists()
    for directory in (first, second, third):
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        directory.remove()


def test_what_is_no_abandoned_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fastgen-engine-file").touch()
    (tmp_path / "fastgen-engine-new").mkdir()  # not locked yet
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / "fastgen-engine-link").symlink_to(tmp_path / "elsewhere")
    before = {path.name for path in tmp_path.rglob("*")}
    SocketDirectory().remove()
    assert {path.name for path in tmp_path.rglob("*")} == before
    foreign = in_use()
    os.close(foreign._lock)
    monkeypatch.setattr(os, "getuid", lambda: foreign.path.stat().st_uid + 1)
    SocketDirectory().remove()
    assert foreign.path.exists()


def test_no_directory_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    killed, opened, closed = in_use(), list[int](), list[int]()
    os.close(killed._lock)
    open_file, close_file = os.open, os.close

    def note_open(*arguments: Any, **more: Any) -> int:
        opened.append(open_file(*arguments, **more))
        return opened[-1]

    def note_close(descriptor: int) -> None:
        closed.append(descriptor)
        close_file(descriptor)

    monkeypatch.setattr(os, "open", note_open)
    monkeypatch.setattr(os, "close", note_close)
    SocketDirectory().remove()
    assert not killed.path.exists()
    assert sorted(opened) == sorted(closed)
