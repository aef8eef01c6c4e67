"""The command with standard streams that are closed or full: one line, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fast import cases

COMMAND = [sys.executable, "-c", "from fastgen.cli import main; main()"]


def shell(arguments: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """``fastgen`` with these arguments, its streams redirected by a shell: only that can close them."""
    line = f'"$@" {arguments} {redirection}'
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        ["bash", "-c", line, "bash", *COMMAND], input="hello\n", capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(
    ("arguments", "redirection", "message"),
    [
        ("generate tiny-llama -", "<&-", "standard input is closed, so there is nothing to read"),
        ("chat tiny-llama", "<&-", "standard input is closed, so there is nothing to read"),
        ("generate tiny-llama hi", ">&-", "standard output is closed"),
        ("recipe list", ">&-", "standard output is closed"),
        ("recipe schema", ">/dev/full", "standard input or output fails: No space left on device"),
        ("--version", ">/dev/full", "standard input or output fails: No space left on device"),
        *(
            pytest.param(
                f"{command} --max-new-tokens 2",
                ">/dev/full",
                "standard input or output fails: No space left",
                marks=pytest.mark.slow,
            )
            for command in ("generate tiny-llama hi", "chat tiny-llama")
        ),
    ],
)
def test_a_stream_that_is_closed_or_full_is_told_in_one_line(arguments: str, redirection: str, message: str) -> None:
    done = shell(arguments, redirection)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"fastgen: {message}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "redirection",
    cases(
        ["2>&-", "2>/dev/full", ">&- 2>&-", ">/dev/full 2>&-", ">/dev/full 2>/dev/full"],
        fast=["2>/dev/full", ">&- 2>&-"],
    ),
)
def test_without_a_place_for_errors_the_status_tells(redirection: str) -> None:
    done = shell("recipe show absent", redirection)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_without_stderr_what_was_asked_for_is_printed() -> None:
    done = shell("--version", "2>&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fastgen ")


@pytest.mark.parametrize("arguments", ["--version", "recipe schema"])  # less and more than the buffer holds
def test_a_reader_who_left_is_no_error_to_tell_of(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*COMMAND, *arguments.split()], stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_ctrl_c_while_the_command_is_imported_shows_no_traceback() -> None:
    program = (
        "import builtins\n"
        "from fastgen.__main__ import main\n"
        "plain = builtins.__import__\n"
        "def interrupted(name, *more, **others):\n"
        "    if name == 'fastgen.cli.bench':\n"
        "        raise KeyboardInterrupt\n"
        "    return plain(name, *more, **others)\n"
        "builtins.__import__ = interrupted\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_warning_is_one_sentence_and_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path))
    done = shell("kernels list tiny-llama", "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fastgen: warning: kernels cannot be kept in {tmp_path} (other users may write to it;")
    assert done.returncode == 0
