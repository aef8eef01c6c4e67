"""Measures what HTTP costs beside the library: throughput and the time to the first token of both, in one run.

``python -m benchmarks.serving [--models MODELS] [--kinds KINDS] [--rounds N] [--output FILE]`` starts two processes in
every round, for where in memory a process comes to lie makes it a little faster or slower for as long as it runs:
``LLM``, and ``fastgen serve``, called over bare sockets. They take turns while the other sleeps, in an order that each
round draws anew, so that a change of the machine's speed affects both. Both get the same token ids and one thread for
kernels, so that the server and its client have the other core of a small machine. Every answer of the one is compared
with the other's.

Throughput is measured from the first request to the last answer. The cost of HTTP depends on the requests, so there are
three kinds: *short* ones with 16 tokens of prompt and 16 of answer, *long* ones with 64 and 128, and a *burst* of 128
long ones. Of short and long ones there are as many as take ``LLM`` five seconds, at least 384 and 128. 32 run at a
time, and the HTTP client keeps 128 connections open. A run of fewer short ones would measure its beginning and end,
when fewer than 32 run: in the library a batch of equal requests ends at once, and over HTTP one by one.

The machine's limits are measured before and after every run. A round is steady if they moved by at most 15 % during
each run and from run to run. Rounds end when six were steady, or after ``N``. The printed loss is the median over at
least six steady rounds of the throughput that HTTP loses in a round, with the least and the greatest.

The time to the first token is that of single requests to an idle engine: ``LLM`` and the server get one each in turn.
The printed first-token time is the median over rounds of the median over these pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import fastgen
from benchmarks.cpu.calibration import Calibration
from benchmarks.cpu.evidence import LEAST_STEADY, Data, Figure, Lack, around, evidence, is_close, was_steady
from benchmarks.cpu.models import write_model
from benchmarks.cpu.results import commit, now
from benchmarks.new_file import new_file
from fastgen.lab.machine import processor


@dataclass(frozen=True)
class Kind:
    """Describes the requests of a measurement."""

    num_prompt: int
    num_answer: int
    # How long the library should take for all of them.
    least_s: float
    # There are no fewer of them, however long they take.
    least_requests: int


KINDS = {"short": Kind(16, 16, 5.0, 384), "long": Kind(64, 128, 5.0, 128), "burst": Kind(64, 128, 0.0, 128)}
# Requests that a client keeps open.
NUM_AT_A_TIME = 128
# Pairs of requests whose first token is timed.
NUM_SINGLE = 40
LOAD: dict[str, Any] = {"max_num_seqs": 32, "prefix_caching": False, "num_threads": 1}
FLAGS = ("--max-num-seqs", "32", "--no-prefix-caching", "--num-threads", "1")
SIDES = ("library", "http", "http stream")


@dataclass
class Throughput:
    """Holds one measurement of one side."""

    num_requests: int
    num_answer: int
    # The answers, for the gate.
    texts: list[str] = field(default_factory=list)
    # From the first request to the last answer.
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_requests * self.num_answer / self.seconds


def prompts(number: int, num_prompt: int) -> list[list[int]]:
    """Returns ``number`` prompts of ids that every model here has."""
    rng = random.Random(0)
    return [[rng.randrange(10, 250) for _ in range(num_prompt)] for _ in range(number)]


def serve_library(model: str) -> None:
    """Measures ``LLM`` in this process: each line of input is a method of :class:`Library` and its arguments."""
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    with fastgen.load(model, **LOAD) as llm:

        def throughput(num_requests: int, num_prompt: int, num_answer: int) -> dict[str, Any]:
            llm.generate(prompts(NUM_AT_A_TIME, num_prompt), max_new_tokens=4, **fields)
            began_s = time.perf_counter()
            outputs = llm.generate(prompts(num_requests, num_prompt), max_new_tokens=num_answer, **fields)
            seconds = time.perf_counter() - began_s
            return vars(Throughput(num_requests, num_answer, [output.text for output in outputs], seconds))

        def first_token_s(prompt: list[int]) -> float:
            began_s = time.perf_counter()
            stream = llm.stream(prompt, max_new_tokens=4, **fields)
            next(stream)
            found_s = time.perf_counter() - began_s
            list(stream)
            return found_s

        methods: dict[str, Callable[..., Any]] = {"throughput": throughput, "first_token_s": first_token_s}
        print(flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print(json.dumps(methods[name](*arguments)), flush=True)


class Library:
    """``LLM`` in the process of :func:`serve_library`."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def throughput(self, num_requests: int, kind: Kind) -> Throughput:
        return Throughput(**self._ask("throughput", num_requests, kind.num_prompt, kind.num_answer))

    def first_token_s(self, prompt: list[int]) -> float:
        return float(self._ask("first_token_s", prompt))

    def _ask(self, *order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@contextmanager
def library(model: str) -> Iterator[Library]:
    """Loads the model in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.serving", "--library", model]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # it is loaded
        try:
            yield Library(process)
        finally:
            process.stdin.close()


def request_body(model: str, prompt: list[int], max_tokens: int, *, is_stream: bool) -> bytes:
    fields = {"temperature": 0, "ignore_eos": True, "stream": is_stream, "prompt": prompt, "max_tokens": max_tokens}
    return json.dumps({"model": model} | fields).encode()


def http_throughput(
    port: int, model: str, num_requests: int, kind: Kind, *, is_stream: bool, num_at_a_time: int = NUM_AT_A_TIME
) -> Throughput:
    """Measures the server at ``port``, after the same prompts have warmed it up."""
    measured = Throughput(num_requests, kind.num_answer)
    body = partial(request_body, model, is_stream=is_stream)
    bodies = [body(each, kind.num_answer) for each in prompts(num_requests, kind.num_prompt)]
    ask_all(port, [body(each, 4) for each in prompts(num_at_a_time, kind.num_prompt)], num_at_a_time)
    began_s = time.perf_counter()
    answers = ask_all(port, bodies, num_at_a_time)
    measured.seconds = time.perf_counter() - began_s
    measured.texts = [text_of(answer.body) for answer in answers]
    return measured


def http_first_token_s(port: int, model: str, prompt: list[int]) -> float:
    """Returns the seconds from before the connection is made to the first piece of the stream."""
    body = request_body(model, prompt, 4, is_stream=True)
    began_s = time.perf_counter()
    (answer,) = ask_all(port, [body])
    return answer.first_s - began_s


class Answer:
    """Reads one response from ``socket``, a connection of its own."""

    def __init__(self, port: int, body: bytes):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self._pieces: list[bytes] = []
        # When the first piece of its body was there.
        self.first_s = 0.0
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        )
        self.socket.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)

    def take(self) -> bool:
        """Reads what has arrived; returns true if that was the end of the response."""
        piece = self.socket.recv(1 << 18)
        self._pieces.append(piece)
        if not self.first_s and (len(self._pieces) > 1 or not piece.endswith(b"\r\n\r\n") or b"data: " in piece):
            self.first_s = time.perf_counter()
        return not piece

    @property
    def body(self) -> bytes:
        """Returns the body with chunks joined. Raises ``RuntimeError`` where the response is an error."""
        head, _, rest = b"".join(self._pieces).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"the server answers {head!r} {rest!r}")
        return re.sub(rb"[0-9a-f]+\r\n(.*?)\r\n", rb"\1", rest, flags=re.DOTALL) if b"chunked" in head else rest


def ask_all(port: int, bodies: list[bytes], num_at_a_time: int = NUM_AT_A_TIME) -> list[Answer]:
    """Returns the answers to requests, of which ``num_at_a_time`` are open at a time.

    It only looks whether they have ended: the client's cost is not measured, and it shares its core with the server.
    """
    answers: list[Answer] = []
    with selectors.DefaultSelector() as selector:

        def ask() -> None:
            answers.append(Answer(port, bodies[len(answers)]))
            selector.register(answers[-1].socket, selectors.EVENT_READ, answers[-1])

        while len(answers) < min(num_at_a_time, len(bodies)):
            ask()
        while selector.get_map():
            for key, _ in selector.select():
                if key.data.take():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
                    if len(answers) < len(bodies):
                        ask()
    return answers


def text_of(body: bytes) -> str:
    """Returns the answer in the body of a response, streamed or not."""
    if body.startswith(b"{"):
        text: str = json.loads(body)["choices"][0]["text"]
        return text
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


@contextmanager
def served(model: str, flags: Sequence[str] = FLAGS, *, says: bool = False) -> Iterator[int]:
    """Starts a server and yields its port; its standard error is passed on if ``says`` and dropped otherwise."""
    command = [sys.executable, "-m", "fastgen", "serve", model, "--port", "0", *flags]
    errors = None if says else subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
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


def compare(model: str, name: str, kind: Kind, most_rounds: int, calibration: Calibration) -> Data:
    """Measures all sides in turns, until enough rounds were steady. Raises ``RuntimeError`` where answers differ."""
    rounds: list[Data] = []
    with library(model) as llm:
        rate = llm.throughput(NUM_AT_A_TIME, kind).tokens_per_s / kind.num_answer
    num_requests = max(kind.least_requests, round(rate * kind.least_s))
    while len(rounds) < most_rounds and sum(map(is_steady_round, rounds)) < LEAST_STEADY:
        with library(model) as llm, served(model) as port:
            sides: dict[str, Callable[[], Throughput]] = {
                "library": partial(llm.throughput, num_requests, kind),
                "http": partial(http_throughput, port, model, num_requests, kind, is_stream=False),
                "http stream": partial(http_throughput, port, model, num_requests, kind, is_stream=True),
            }
            first = len(rounds) % len(SIDES)
            measured: dict[str, Throughput] = {}
            found: Data = {"date": now(), "commit": commit(), "sides": {}}
            before = calibration.measure()
            for side in SIDES[first:] + SIDES[:first]:
                measured[side], after = sides[side](), calibration.measure()
                found["sides"][side] = {
                    "tokens_per_s": round(measured[side].tokens_per_s, 1), "before": before, "after": after
                }  # fmt: skip
                before = after
            found["first_token_ms"] = [
                [round(1000 * each, 2) for each in (llm.first_token_s(prompt), http_first_token_s(port, model, prompt))]
                for prompt in prompts(NUM_SINGLE, kind.num_prompt)
            ]
        for side in SIDES:
            if measured[side].texts != measured["library"].texts:
                raise RuntimeError(f"{side} answers otherwise than the library")
        rounds.append(found)
        printed = ", ".join(f"{side} {measured[side].tokens_per_s:.0f}" for side in SIDES)
        firsts = " and ".join(f"{statistics.median(each):.2f}" for each in zip(*found["first_token_ms"], strict=True))
        print(f"{name} round {len(rounds)}: tokens/s: {printed}; first token: {firsts} ms", file=sys.stderr, flush=True)
    return {"model": name, "requests": num_requests, "rounds": rounds}


def is_steady_round(found: Data) -> bool:
    """Returns true if the machine stayed the same during all runs of a round, and from run to run."""
    runs = list(found["sides"].values())
    speeds = [around(run, "read") for run in runs]
    return all(was_steady(run) for run in runs) and is_close(min(speeds), max(speeds))


def loss(entry: Data, side: str) -> Figure | Lack:
    """Returns the percent of the library's throughput that a side loses, by the rule of all figures."""
    rounds = evidence(entry["rounds"], is_steady_round, "rounds")
    assert rounds is not None

    def lost(found: Data) -> float:
        ours, theirs = (float(found["sides"][each]["tokens_per_s"]) for each in (side, "library"))
        return 100 * (theirs - ours) / theirs

    return rounds.figure(lost)


def first_token_added_ms(entry: Data) -> float:
    """Returns by how much later first tokens come, as the median over rounds of the median over pairs."""
    added_ms: float = statistics.median(
        statistics.median(http - ours for ours, http in each["first_token_ms"]) for each in entry["rounds"]
    )
    return added_ms


def shown(found: Figure | Lack) -> str:
    if isinstance(found, Lack):
        return f"– ({found.reason})"
    return f"{found.value:.1f} % ({found.least:.1f} to {found.most:.1f}, {found.num_steady} rounds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny-llama,llama-110m", help="built-in ones, or of benchmarks.cpu.models")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of requests: " + ", ".join(KINDS))
    parser.add_argument("--rounds", type=int, default=4 * LEAST_STEADY, help="rounds after which to give up")
    parser.add_argument("--output", type=new_file)
    parser.add_argument("--library", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.library is not None:
        serve_library(arguments.library)
        return
    if unknown := set(arguments.kinds.split(",")) - KINDS.keys():
        parser.error(f"--kinds {', '.join(sorted(unknown))}: expected of {', '.join(KINDS)}")
    calibration = Calibration(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as directory:
        entries = []
        for name in arguments.models.split(","):
            model = str(write_model(name, Path(directory))) if name.startswith("llama-") else name
            for kind in arguments.kinds.split(","):
                entry = compare(model, name, KINDS[kind], arguments.rounds, calibration)
                entries.append({"kind": kind, **vars(KINDS[kind]), **entry})
                printed = ", ".join(f"{side} loses {shown(loss(entry, side))}" for side in SIDES[1:])
                print(f"{name}, {kind}: {printed}; first token {first_token_added_ms(entry):.2f} ms later", flush=True)
    if arguments.output is not None:
        machine = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
        about = {"machine": machine, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "fastgen": fastgen.__version__}
        about |= {"commit": commit(), "workload": {"at_a_time": NUM_AT_A_TIME, "load": LOAD}}
        arguments.output.write_text(json.dumps(about | {"models": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
