"""docs/serving.md is true: its flags are the command's, its Python and its curl lines run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import typer

from fastgen.arguments import arguments_of
from fastgen.cli import app
from fastgen.runtime.requests import response_format
from fastgen.runtime.sampling import kept_formats, mask_threads, structured_output
from fastgen.serving import service
from fastgen.serving.admission import request_limits
from fastgen.serving.admission.bodies import MAX_LARGEST_BODIES
from fastgen.serving.admission.request_memory import GRPC_PARTS
from fastgen.serving.engine import recent_requests
from fastgen.serving.http import tls, unsent
from fastgen.serving.http.openai.messages import MAX_PARTS
from fastgen.serving.http.openai.requests import MAX_PROMPTS
from fastgen.serving.isolated.encoding import encoder
from fastgen.serving.isolated.grammars import queue, trial
from fastgen.serving.isolated.templates import renderer
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


def test_the_table_of_bounds_without_a_flag_has_their_numbers() -> None:
    rows = {}
    for line in section(PAGE, "Safety").partition("**Bounds without a flag**")[2].strip().splitlines()[4:]:
        _, what, most, *_ = (cell.strip() for cell in line.split("|"))
        rows[what.partition(":")[0].partition(";")[0]] = [float(each.replace(",", "")) for each in most.split("; ")]
    mib = 1 << 20

    def isolated(process: ModuleType, *sizes: float, waiting: int) -> list[float]:
        return [process.MAX_CPU_S, process.MAX_MEMORY_BYTES / mib, *sizes, process.MAX_PROCESSES, waiting]

    assert rows == {
        "prompts of a call": [MAX_PROMPTS],
        "answers of a call": [request_limits.MAX_CALL_ANSWERS],
        "completions of a prompt": [request_limits.MAX_N, request_limits.MAX_BEAMS],
        "answers beyond the first of each request, of all open requests": [request_limits.MAX_MORE_ANSWERS],
        "token ids of all prompts of a call": [request_limits.MAX_TOKEN_IDS],
        "messages of a conversation": [request_limits.MAX_MESSAGES, MAX_PARTS],
        "stop strings": [
            request_limits.MAX_STOP_STRINGS,
            request_limits.MAX_STOP_CHARACTERS,
            request_limits.MAX_STOP_TOKEN_IDS,
        ],
        "biases of tokens": [request_limits.MAX_BIASES],
        "alternatives of a token": [request_limits.MAX_LOGPROBS],
        "log-probabilities of a request": [request_limits.MAX_REQUEST_LOGPROBS, request_limits.MAX_OPEN_LOGPROBS],
        "memory for log-probabilities": [
            100 / request_limits.LOGPROBS_SHARE,
            request_limits.LOGPROB_BYTES,
            request_limits.LOGPROBS_TOKEN_BYTES,
        ],
        "characters of prompts that the answers of a call repeat": [request_limits.MAX_ECHOED_CHARACTERS],
        "MiB of answers by HTTP that wait for their clients": [unsent.MAX_UNSENT_BYTES / mib],
        "memory for bodies": [MAX_LARGEST_BODIES, GRPC_PARTS * MAX_LARGEST_BODIES],
        "a schema as a text, in characters": [response_format.MAX_CHARACTERS],
        "TLS handshakes by HTTP": [100 * tls._SHARE, tls._MAX_KEY_UPDATES],
        "token ids of which texts are made at once": [service._MAX_IDS_IN_TEXTS, service._FEW_IDS],
        "lexer states of a compiled format": [structured_output._LIMITS["max_lexer_states"]],
        "kept formats": [kept_formats.MAX_KEPT, kept_formats.MOST_BYTES / mib],
        "formats of open requests": [
            100 / kept_formats._SHARE_IN_USE,
            kept_formats.FORMAT_BYTES / mib,
            kept_formats.MOST_GROWTH,
        ],
        "masks while requests wait for a slot": [
            1000 * mask_threads.FAST_MASK_CPU_S,
            1000 * mask_threads.MAX_DUE_CPU_S,
            mask_threads.MAX_SLOW_CPU_S,
            100 * mask_threads.MAX_SLOW_SHARE,
        ],
        "compiling a format": isolated(trial, waiting=queue.MAX_WAITING),
        "remembered results of compiling a format": [trial._MAX_KEPT, trial._MAX_REASON],
        "rendering a conversation": isolated(renderer, renderer.MAX_CHARACTERS, waiting=renderer.MAX_WAITING),
        "encoding a text by a process": isolated(encoder, waiting=encoder.MAX_WAITING),
        "requests whose recording is remembered": [recent_requests.MAX_REMEMBERED],
    }


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
