"""Runs one engine in a process of its own, which gets commands over a pipe: the engine's and the benchmark's side.

The engine's side reads a line of JSON for each command and writes one for each reply; what engines print goes to a log.
It runs under the interpreter of the engine's environment and needs only the standard library.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.cpu import workloads
from benchmarks.cpu.engines.protocol import ADAPTERS, Settings

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """Holds the result of one workload. Times of tokens are seconds since the requests were submitted."""

    seconds: float
    tokens: list[list[int]]
    times: list[list[float]]
    # The peak memory of the engine's processes until now.
    peak_bytes: int


class EngineError(Exception):
    """The engine could not carry out a command; the message is its own."""


class EngineProcess:
    """The benchmark's side. The process runs the code in ``root``. Raises :class:`EngineError`."""

    def __init__(
        self,
        python: str,
        engine: str,
        settings: Settings,
        log: Path,
        preload: Sequence[str] = (),
        root: Path = _ROOT,
    ):
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),  # before what is installed, which may be another build
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(settings.num_threads)),
            **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
            **{"TOKENIZERS_PARALLELISM": "false", "LD_PRELOAD": ":".join(preload)},
        }
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.cpu.engine_process"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=root, env=environment
            )  # fmt: skip
        start = time.perf_counter()
        self.about = self._ask({"engine": engine, "settings": asdict(settings) | {"model": str(settings.model)}})
        self.load_seconds = time.perf_counter() - start

    def prepare(self, workload: str) -> None:
        self._ask({"prepare": workload})

    def run(self, workload: str) -> Run:
        return Run(**self._ask({"run": workload}))

    def close(self) -> None:
        """Ends the process without waiting for long, since some engines hang when they are torn down."""
        if self._process.poll() is None:
            try:
                self._process.communicate("{}\n", timeout=20)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                self._process.kill()
                self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise EngineError(lines[-1] if lines else f"exit status {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer


def _peak_bytes(process_ids: list[int]) -> int:
    """Returns the peak memory of this process and of those given; zero where the system does not report it."""
    total = 0
    for each in (os.getpid(), *process_ids):
        try:
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
        except OSError:
            continue
        total += next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
    return total


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints must not be taken for a reply

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    engine = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "engine" in order:
                settings = Settings(**order["settings"])
                module = importlib.import_module(f"benchmarks.cpu.engines.{ADAPTERS[order['engine']].module}")
                engine = module.load(replace(settings, model=Path(settings.model)))
                reply(engine.about)
            elif "prepare" in order:
                assert engine is not None
                engine.prepare(workloads.make(order["prepare"]))
                reply({})
            elif "run" in order:
                assert engine is not None
                reply(asdict(_run(engine, workloads.make(order["run"]))))
            else:
                break
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})
    if engine is not None:
        engine.close()
    os._exit(0)  # some engines hang in their own tear-down


def _run(engine: Any, requests: list[workloads.Request]) -> Run:
    start = time.perf_counter()
    answers = engine.run(requests)
    seconds = time.perf_counter() - start
    times = [[round(each - start, 6) for each in answer.times] for answer in answers]
    tokens = [list(map(int, answer.tokens)) for answer in answers]
    return Run(seconds, tokens, times, _peak_bytes(engine.process_ids()))


if __name__ == "__main__":
    _serve()
