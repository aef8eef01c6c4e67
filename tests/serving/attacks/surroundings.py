"""A server in surroundings that are as bad as they may be: what it reads is hostile, what it writes is not taken, and
others have left things in its place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastgen.models.checkpoint.builtins import BUILTINS
from tests.serving.attacks.harness import MODEL
from tests.serving.attacks.helpers import CUBIC
from tests.serving.server_process import ServerProcess, served_by_shell

# A directory that a server left which was killed.
LEFT = "fastgen-engine-left"


def hostile_checkpoint(directory: Path) -> Path:
    """Writes the built-in model with a tokenizer that takes too long for some texts, and is as before for others."""
    checkpoint = shutil.copytree(BUILTINS[MODEL], directory / "checkpoint")
    file = checkpoint / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": CUBIC}, "behavior": "Isolated", "invert": False}
    before = [] if tokenizer["pre_tokenizer"] is None else [tokenizer["pre_tokenizer"]]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, *before]}
    file.write_text(json.dumps(tokenizer))
    return checkpoint


def spoil_deployments(directory: Path) -> None:
    """Puts what is no file of a server into a new directory of deployments."""
    directory.mkdir(mode=0o700)
    (directory / "directory.json").mkdir()
    os.mkfifo(directory / "fifo.json")
    (directory / "deep.json").write_text("[" * 50_000)
    (directory / "text.json").write_text("no JSON")


@contextmanager
def badly_placed(directory: Path, *flags: str, max_files: int | None = None) -> Iterator[ServerProcess]:
    """Runs a server with ``flags`` until the block is left, and then must end with status 0.

    Its standard input is closed and its output full. It logs requests to a pipe that nobody reads. Its checkpoint has a
    hostile tokenizer. The list of deployments has what is no server's, and the directory of temporary files what a
    killed server has left. It may open ``max_files`` files.
    """
    spoil_deployments(directory / "deployments")
    (directory / "temporary" / LEFT).mkdir(parents=True)
    (directory / "temporary" / LEFT / "engine-1").touch()
    checkpoint = hostile_checkpoint(directory)
    reading, writing = os.pipe()
    limit = "" if max_files is None else f"ulimit -n {max_files}; "
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FASTGEN_DEPLOYMENTS", str(directory / "deployments"))
            patch.setenv("TMPDIR", str(directory / "temporary"))
            shell = f'{limit}exec "$@" <&- >/dev/full'
            given = ("--name", MODEL, "--log-requests", *flags)
            with served_by_shell(shell, str(checkpoint), *given, stderr=writing) as server:
                yield server
    finally:
        os.close(writing)
        os.close(reading)
