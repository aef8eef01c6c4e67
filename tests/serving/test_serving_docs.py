"""docs/serving.md is true: its flags are the command's, its Python and its curl lines run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import typer

from fastgen.arguments import arguments_of
from fastgen.cli import app
from fastgen.serving.lmi.translate import KEYS
from fastgen.serving.options import ServeOptions
from tests.pages import DOCS, blocks, section
from tests.serving.server_process import ServerProcess

PAGE, LOADING = DOCS / "serving.md", (DOCS / "arguments.md").read_text()


def test_the_flags_of_the_page_and_of_loading_are_those_of_the_command() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    real = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts) if flag.startswith("--")}
    rows = [line.split("|")[1] for line in (section(PAGE, "Flags") + LOADING).splitlines() if line.startswith("| `--")]
    assert set(re.findall(r"`(--[\w-]+)`", " ".join(rows))) == real


def test_every_argument_of_serving_has_its_flag() -> None:
    rows = " ".join(line.split("|")[1] for line in section(PAGE, "Flags").splitlines() if line.startswith("| `--"))
    named = {flag.removeprefix("--").replace("-", "_") for flag in re.findall(r"`(--[\w-]+)`", rows)}
    named |= set(re.findall(r"\(`(\w+)`\)", rows))
    assert {argument.name for argument in arguments_of(ServeOptions)} <= named


def test_every_key_of_lmi_is_in_the_table() -> None:
    rows = " ".join(
        line.split("|")[1] for line in section(PAGE, "SageMaker and LMI").splitlines() if line.startswith("| `")
    )
    assert set(re.findall(r"`([\w.]+)`", rows)) == set(KEYS)


def test_the_python_of_the_page_runs(tmp_path: Path) -> None:
    (code,) = blocks(PAGE, "python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 20


def test_the_curl_lines_of_the_page_run(server: ServerProcess) -> None:
    (shown,) = blocks(PAGE, "sh")
    commands = [line for line in shown.replace("\\\n", " ").splitlines() if line]
    assert len(commands) == 3
    for command in commands:
        program, *arguments = shlex.split(command.replace("http://127.0.0.1:8000", server.address))
        assert program == "curl"
        done = subprocess.run([program, "-sS", "--fail", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        if "stream" in command:
            assert done.stdout.endswith("data: [DONE]\n\n")
        else:
            assert "error" not in json.loads(done.stdout)
