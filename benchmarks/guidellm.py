"""Puts the load generator guidellm on a server: ``python -m benchmarks.guidellm --guidellm PATH --output FILE``.

guidellm (0.7 or newer, https://github.com/vllm-project/guidellm) lives in an environment of its own; ``PATH`` is its
program. The server of a built-in model answers eight streams of it for half a minute, first at ``/v1/completions`` and
then at ``/v1/chat/completions``. Kept are guidellm's own counts of requests that succeeded, failed or were cut off at
the end, its version, the machine and the commit. It is a check that a foreign client is content, and no comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cpu.results import commit, now
from benchmarks.new_file import new_file
from benchmarks.serving import served
from fastgen.lab.machine import processor
from fastgen.models.checkpoint.builtins import BUILTINS

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
NUM_STREAMS, SECONDS = 8, 30
NUM_PROMPT, NUM_ANSWER = 64, 64


def command(program: str, port: int, model: str, endpoint: str, report: Path) -> list[str]:
    """Returns the call of guidellm. Its tokenizer is the model's own, so nothing is downloaded."""
    backend = f"kind=openai_http,target=http://127.0.0.1:{port},model={model},request_format={endpoint}"
    return [
        program, "run", "--disable-console",
        "--backend", backend,
        "--data", f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_ANSWER}",
        "--tokenizer", f"kind=huggingface_auto,model={BUILTINS[model]}",
        "--profile", f"kind=concurrent,streams={NUM_STREAMS}",
        "--constraint", f"kind=max_duration,seconds={SECONDS}",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip


def totals(report: Any) -> dict[str, int]:
    """Returns the counts of requests in guidellm's report. Raises ``ValueError`` if it has none, or several."""
    found = list(_values(report, "request_totals"))
    if len(found) != 1:
        raise ValueError(f"guidellm's report has {len(found)} entries request_totals, not 1")
    return dict(found[0])


def _values(data: Any, name: str) -> Iterator[Any]:
    """Yields every value of the key ``name`` in nested data, since its place differs between versions."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key == name:
                yield value
            else:
                yield from _values(value, name)
    elif isinstance(data, list):
        for each in data:
            yield from _values(each, name)


def run(program: str, model: str) -> dict[str, dict[str, int]]:
    """Returns the counts by endpoint. Raises ``subprocess.CalledProcessError`` if guidellm fails."""
    found = {}
    with served(model, flags=()) as port, tempfile.TemporaryDirectory() as directory:
        for number, endpoint in enumerate(ENDPOINTS):
            report = Path(directory, f"{number}.json")
            offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
            subprocess.run(command(program, port, model, endpoint, report), check=True, env=offline)
            found[endpoint] = totals(json.loads(report.read_text()))
            print(f"{model}{endpoint}: {found[endpoint]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", default=shutil.which("guidellm") or "guidellm", help="the program")
    parser.add_argument("--model", default="tiny-llama", choices=sorted(BUILTINS))
    parser.add_argument("--output", type=new_file, required=True)
    options = parser.parse_args()
    done = subprocess.run([options.guidellm, "--version"], capture_output=True, text=True, check=True)
    about = {"machine": processor(), "cores": os.cpu_count(), "date": now(), "commit": commit()}
    about |= {"guidellm": done.stdout.strip(), "streams": NUM_STREAMS, "seconds": SECONDS}
    requests = run(options.guidellm, options.model)
    options.output.write_text(json.dumps(about | {"model": options.model, "requests": requests}, indent=1) + "\n")


if __name__ == "__main__":
    main()
