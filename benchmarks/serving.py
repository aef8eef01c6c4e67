"""What HTTP adds to the library: throughput and the time to the first token of both, in one run.

``python -m benchmarks.serving [--models MODELS] [--rounds N] [--output FILE]`` takes turns, a fresh process each:
``LLM`` in its own process, and ``fastgen serve`` with a client of bare sockets beside it. Both get the same token ids,
one thread for kernels each, so that the server and its client have the other core of a small machine. Before anything
is timed every answer of the one is compared with the other's.

Throughput is that of 128 requests that come at once, 32 of which run at a time, 64 tokens of prompt and 128 of answer
each, from the first request to the last answer. The time to the first token is that of single requests to an idle
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastgen
from benchmarks.cpu.models import write_model
from benchmarks.scheduler import processor

NUM_REQUESTS, NUM_PROMPT, NUM_ANSWER = 128, 64, 128
NUM_SINGLE = 40
"""Requests whose first token is timed."""
LOAD: dict[str, Any] = {"max_num_seqs": 32, "prefix_caching": False, "num_threads": 1}
FLAGS = ("--max-num-seqs", "32", "--no-prefix-caching", "--num-threads", "1")
SIDES = ("library", "http", "http stream")


@dataclass
class Measured:
    """One side, once."""

    texts: list[str] = field(default_factory=list)
    """The answers, for the gate."""
    seconds: float = 0.0
    """From the first request to the last answer."""
    first_token_s: list[float] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        return {
            "tokens_per_s": round(NUM_REQUESTS * NUM_ANSWER / self.seconds, 1),
            "median_ttft_ms": round(1000 * statistics.median(self.first_token_s), 3),
        }


def prompts(number: int) -> list[list[int]]:
    """``number`` prompts; ids that every model here has."""
    rng = random.Random(0)
    return [[rng.randrange(10, 250) for _ in range(NUM_PROMPT)] for _ in range(number)]


def measure_library(model: str) -> Measured:
    """Both figures of ``LLM`` in this process, after the same prompts have warmed it up."""
    measured = Measured()
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    with fastgen.load(model, **LOAD) as llm:
        llm.generate(prompts(NUM_REQUESTS), max_new_tokens=4, **fields)
        began_s = time.perf_counter()
        outputs = llm.generate(prompts(NUM_REQUESTS), max_new_tokens=NUM_ANSWER, **fields)
        measured.seconds = time.perf_counter() - began_s
        measured.texts = [output.text for output in outputs]
        for prompt in prompts(NUM_SINGLE):
            began_s = time.perf_counter()
            stream = llm.stream(prompt, max_new_tokens=4, **fields)
            next(stream)
            measured.first_token_s.append(time.perf_counter() - began_s)
            list(stream)
    return measured


async def measure_http(port: int, model: str, *, is_stream: bool) -> Measured:
    """Both figures of the server at ``port``, after the same prompts have warmed it up."""
    measured = Measured()
    body = {"model": model, "temperature": 0, "ignore_eos": True, "stream": is_stream}
    bodies = [json.dumps(body | {"prompt": each, "max_tokens": NUM_ANSWER}).encode() for each in prompts(NUM_REQUESTS)]
    short = [json.dumps(body | {"prompt": each, "max_tokens": 4}).encode() for each in prompts(NUM_REQUESTS)]
    await asyncio.gather(*(ask(port, each) for each in short))
    began_s = time.perf_counter()
    answers = await asyncio.gather(*(ask(port, each) for each in bodies))
    measured.seconds = time.perf_counter() - began_s
    measured.texts = [text_of(answer) for answer, _ in answers]
    for prompt in prompts(NUM_SINGLE):
        single = body | {"prompt": prompt, "max_tokens": 4, "stream": True}
        began_s = time.perf_counter()
        _, first_s = await ask(port, json.dumps(single).encode())
        measured.first_token_s.append(first_s - began_s)
    return measured


async def ask(port: int, body: bytes) -> tuple[bytes, float]:
    """The body of the response, undone of its chunks, and when its first piece came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"the server answers {answer!r} {await reader.read()!r}")
    first = await reader.read(1 << 16)
    first_s = time.perf_counter()
    rest = first + await reader.read()
    writer.close()
    return re.sub(rb"[0-9a-f]+\r\n(.*?)\r\n", rb"\1", rest, flags=re.DOTALL) if b"chunked" in answer else rest, first_s


def text_of(body: bytes) -> str:
    """The answer in the body of a response, streamed or whole."""
    if body.startswith(b"{"):
        text: str = json.loads(body)["choices"][0]["text"]
        return text
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


@contextmanager
def served(model: str) -> Iterator[int]:
    """The port of a server of its own."""
    command = [sys.executable, "-m", "fastgen", "serve", model, "--port", "0", *FLAGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = next((line for line in process.stdout if "http://" in line), None)
            if address is None:
                raise RuntimeError(f"the server ended with status {process.wait()}")
            found = re.search(r"http://127\.0\.0\.1:(\d+)", address)
            assert found is not None
            yield int(found[1])
        finally:
            process.send_signal(signal.SIGTERM)


def measure(side: str, model: str) -> Measured:
    """``side`` in fresh processes."""
    if side == "library":
        command = [sys.executable, "-m", "benchmarks.serving", "--library", model]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        return Measured(**found)
    with served(model) as port:
        return asyncio.run(measure_http(port, model, is_stream=side == "http stream"))


def compare(model: str, name: str, num_rounds: int) -> dict[str, Any]:
    """All sides in turns. Raises ``RuntimeError`` where answers differ."""
    rounds: dict[str, list[Measured]] = {side: [] for side in SIDES}
    for number in range(num_rounds):
        for side in SIDES:
            measured = measure(side, model)
            if measured.texts != (rounds["library"] or [measured])[0].texts:
                raise RuntimeError(f"{side} answers otherwise than the library; nothing is timed")
            rounds[side].append(measured)
            print(f"{name} round {number + 1}, {side}: {measured.figures}", file=sys.stderr, flush=True)
    medians = {
        side: {
            what: statistics.median(each.figures[what] for each in every) for what in ("tokens_per_s", "median_ttft_ms")
        }
        for side, every in rounds.items()
    }
    library = medians["library"]
    found: dict[str, Any] = {
        "model": name,
        "rounds": {side: [m.figures for m in every] for side, every in rounds.items()},
    }
    for side in SIDES[1:]:
        found[side] = {
            "throughput_loss_percent": round(100 * (1 - medians[side]["tokens_per_s"] / library["tokens_per_s"]), 2),
            "ttft_added_ms": round(medians[side]["median_ttft_ms"] - library["median_ttft_ms"], 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny-llama,llama-110m", help="built-in ones, or of benchmarks.cpu.models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--library", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.library is not None:
        print(json.dumps(vars(measure_library(arguments.library))))
        return
    with tempfile.TemporaryDirectory() as directory:
        found = []
        for name in arguments.models.split(","):
            model = str(write_model(name, Path(directory))) if name.startswith("llama-") else name
            found.append(compare(model, name, arguments.rounds))
            print(json.dumps({name: {side: found[-1][side] for side in SIDES[1:]}}), flush=True)
    if arguments.output is not None:
        machine = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
        about = {"machine": machine, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "fastgen": fastgen.__version__}
        workload = {"requests": NUM_REQUESTS, "prompt_tokens": NUM_PROMPT, "answer_tokens": NUM_ANSWER, "load": LOAD}
        arguments.output.write_text(json.dumps(about | {"workload": workload, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
