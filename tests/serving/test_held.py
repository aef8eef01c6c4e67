"""The search for leftovers of killed engines finds each kind where there is one."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serving.held import Held, shared_memory, still_there
from tests.serving.started import started_by


def test_shared_memory_that_is_left_is_found() -> None:
    file = Path("/dev/shm") / f"fastgen-test-{os.getpid()}"
    with file.open("wb+") as opened:
        opened.truncate(mmap.PAGESIZE)
        with mmap.mmap(opened.fileno(), mmap.PAGESIZE):
            found = shared_memory(os.getpid())
    assert str(file) in found
    assert str(file) in still_there(found)
    file.unlink()
    assert str(file) not in still_there(found)


BEFORE = Held(10, ("engine",), 1)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (Held(10, ("engine",), 1), []),
        (Held(9, ("engine",), 1), []),
        (Held(12, ("engine",), 1), ["2 more files are open than before"]),
        (Held(10, ("engine", "engine"), 1), ["there are other processes than before"]),
        (Held(10, ("engine",), 2), ["there are 2 sockets in place of 1"]),
    ],
)
def test_what_is_held_beyond_before_is_named(after: Held, words: list[str]) -> None:
    found = after.beyond(BEFORE)
    assert [each[: len(word)] for each, word in zip(found, words, strict=True)] == words


def test_processes_and_sockets_are_those_of_the_commands(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"engine-{number}").touch()
    address = f"ipc://{tmp_path}/engine-2"
    command = [sys.executable, "-c", "print(flush=True); input()", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # before it runs, it has no command
        found = Held.of(3, [process.pid])
        process.kill()
    assert (found.num_files, found.num_sockets) == (3, 2)
    assert "engine-N" in found.processes[0]


def test_what_other_threads_start_counts_too() -> None:
    program = (
        "import subprocess, sys, threading\n"
        "start = lambda: subprocess.Popen([sys.executable, '-c', 'input()'])\n"
        "threading.Thread(target=start).start()\n"
        "print(flush=True); input()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        end_s = time.monotonic() + 30.0
        while not (found := started_by(process.pid, "input()")):
            assert time.monotonic() < end_s
        process.communicate(b"\n\n")
    assert len(found) == 1
