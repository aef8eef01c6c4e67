"""Measures the steady state of Dynamic SplitFuse: prompts of about 2600 tokens, answers of 60, a Llama-2-7B shape.

It is a closed loop: a fixed number of requests is in flight, and each answer makes room for the next. The clock starts
when that number has been answered. A row every ten seconds covers all the time since then, so that a run that is cut
short keeps its results. ``fraction_of_gemm`` counts the operations of the tokens of answered requests.
"""

from __future__ import annotations

import itertools
import statistics
import time

from benchmarks.gpu.llama import LLAMA_2_7B, TOY, LlamaShape, kv_tokens_that_fit, llama_engine, llama_spec, submit
from benchmarks.gpu.measuring import Bench, Row, Rows
from benchmarks.gpu.workload import lengths
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine

IN_FLIGHT, TOKEN_BUDGET = 32, 2048
_SECONDS, _ROW_SECONDS = 60.0, 10.0


def measure(bench: Bench) -> Rows:
    shape, in_flight, budget = (TOY, 2, 4) if bench.toy else (LLAMA_2_7B, IN_FLIGHT, TOKEN_BUDGET)
    kv_tokens = 200 if bench.toy else min(kv_tokens_that_fit(shape, bench.device), in_flight * shape.max_positions)
    engine = llama_engine(shape, bench.device, kv_tokens=kv_tokens, max_num_seqs=in_flight, token_budget=budget)
    loop = ClosedLoop(engine, shape, in_flight, toy=bench.toy)
    while loop.num_finished < in_flight:
        loop.step()
    loop.forget()
    for _ in range(1 if bench.toy else round(_SECONDS / _ROW_SECONDS)):
        loop.run(0.0 if bench.toy else _ROW_SECONDS)
        yield {"case": f"{in_flight} in flight, {loop.seconds:.0f} s", **loop.found(bench), "kv_tokens": kv_tokens}


class ClosedLoop:
    """Keeps ``in_flight`` requests in the engine. Times are of requests answered since :meth:`forget`."""

    def __init__(self, engine: Engine, shape: LlamaShape, in_flight: int, *, toy: bool):
        self._engine, self._shape, self._in_flight = engine, shape, in_flight
        self._lengths, self._seeds = lengths(shape, toy=toy), itertools.count()
        self._open: list[Generation] = []
        self.forget()

    def forget(self) -> None:
        self._finished: list[Generation] = []
        self._step_seconds: list[float] = []
        self.seconds = 0.0

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    def run(self, seconds: float) -> None:
        """Runs for that many seconds, and until there are some steps and requests to report."""
        end = self.seconds + seconds
        while self.seconds < end or len(self._finished) < 2 or len(self._step_seconds) < 2:
            self.step()

    def step(self) -> None:
        start = time.perf_counter()
        while len(self._open) < self._in_flight:
            self._open += submit(self._engine, [next(self._lengths)], next(self._seeds))
        stepped = time.perf_counter()
        self._engine.step()
        end = time.perf_counter()
        self._step_seconds.append(end - stepped)
        self.seconds += end - start
        self._finished += [each for each in self._open if each.finished]
        self._open = [each for each in self._open if not each.finished]

    def found(self, bench: Bench) -> Row:
        outputs = [each.output() for each in self._finished]
        spec = llama_spec(self._shape)
        sizes = [(len(each.prompt_token_ids), len(each.token_ids)) for each in outputs]
        flops = sum(tokens * spec.flops_per_token(tokens // 2) for tokens in map(sum, sizes))
        gaps = [gap for each in outputs for gap in each.metrics.gaps_s]
        return {
            "seconds": self.seconds,
            "requests_per_s": len(outputs) / self.seconds,
            "fraction_of_gemm": flops / self.seconds / bench.limits.gemm_flops_per_s,
            "requests": len(outputs),
            "tokens_per_s": sum(map(sum, sizes)) / self.seconds,
            "step_seconds": percentiles(self._step_seconds),
            "ttft_seconds": percentiles([each.metrics.ttft_s or 0.0 for each in outputs]),
            "gap_seconds": percentiles(gaps),
            "preemptions": sum(each.metrics.preemptions for each in outputs),
        }


def percentiles(values: list[float]) -> dict[str, float]:
    """Returns the 50th, 90th, 95th and 99th percentile of ``values``; none for fewer than two values."""
    if len(values) < 2:
        return {}
    found = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{each}": found[each - 1] for each in (50, 90, 95, 99)}
