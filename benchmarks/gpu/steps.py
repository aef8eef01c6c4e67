"""Measures decode steps of a Llama-2-7B shape by the clocks of the host and of the device, with graphs and without.

A row's ``seconds`` are a whole step's, from one call of the engine to the next; ``device_seconds`` those from the first
kernel of the forward pass to the last of sampling, on the device's clock; ``idle_seconds`` those from there to the next
step's forward pass, in which the device only copies inputs; ``eager_seconds`` a whole step's without graphs. The row
`capture` is about making the graphs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.llama import LLAMA_2_7B, TOY, LlamaShape, kv_tokens_that_fit, llama_engine, llama_spec, submit
from benchmarks.gpu.measuring import Bench, Row, Rows
from fastgen.runtime.engine import Engine
from fastgen.runtime.step.forward import CapturedForward

CASES: tuple[tuple[int, int], ...] = ((1, 512), (32, 1024), (256, 512))  # sequences, tokens that each of them has
TOKEN_BUDGET, MAX_NUM_SEQS = 2048, 256


@dataclass(frozen=True)
class Counts:
    """Holds the numbers of a case's steps: before timing, timed with graphs, and timed without."""

    untimed: int = 8
    timed: int = 48
    eager: int = 8

    @property
    def all(self) -> int:
        return self.untimed + self.timed + self.eager


def measure(bench: Bench) -> Rows:
    shape, cases, sizes, counts = LLAMA_2_7B, CASES, (TOKEN_BUDGET, MAX_NUM_SEQS), Counts()
    if bench.toy:
        shape, cases, sizes, counts = TOY, ((1, 6), (2, 8)), (4, 2), Counts(1, 3, 1)
    wanted = max(kv_tokens_of(batch, context, counts) for batch, context in cases)
    kv_tokens = wanted if bench.toy else min(wanted, kv_tokens_that_fit(shape, bench.device))
    found: Row = {}
    with capture_watched(found):
        engine = llama_engine(shape, bench.device, kv_tokens=kv_tokens, max_num_seqs=sizes[1], token_budget=sizes[0])
    yield {"case": "capture", **found}
    watch = StepWatch(engine, on_device=not bench.toy)
    for batch, context in cases:
        case = f"batch {batch}, context {context}"
        if kv_tokens < kv_tokens_of(batch, context, counts):
            need = kv_tokens_of(batch, context, counts) * llama_spec(shape).kv_bytes_per_token(shape.dtype.itemsize)
            yield {"case": case, "left_out": f"its KV cache of {need / 2**30:.0f} GiB does not fit beside the weights"}
            continue
        yield bench.attempt(case, partial(measure_case, engine, watch, shape, batch, context, counts, bench))
        engine.cancel_all()


def kv_tokens_of(batch: int, context: int, counts: Counts) -> int:
    """Returns the most tokens that the case holds; each sequence ends within a block."""
    return batch * (context + counts.all + 16)


def measure_case(
    engine: Engine, watch: StepWatch, shape: LlamaShape, batch: int, context: int, counts: Counts, bench: Bench
) -> Row:
    """Prompts are read one after the other and the first ones answer meanwhile, so theirs are the shorter ones: in
    the middle of the timed steps all contexts are about ``context``."""
    budget = engine.scheduler.token_budget
    before = [(batch - 1 - index) * context // budget for index in range(batch)]
    half = counts.untimed + counts.timed // 2
    prompts = [(max(1, context - each - half), counts.all + each + 2 * batch) for each in before]
    generations = submit(engine, prompts, seed=batch)
    while any(len(each.completions[0].token_ids) < counts.untimed for each in generations):
        engine.step()
    watch.marks.clear()
    first, walls = _mean_length(generations), _timed_steps(engine, counts.timed)
    device, idle = watch.seconds()
    last = _mean_length(generations)
    with uncaptured(engine):
        eager = _timed_steps(engine, counts.eager)
    wall, mean = statistics.median(walls), (first + last) / 2
    spec, itemsize = llama_spec(shape), shape.dtype.itemsize
    embedding = shape.vocab * shape.hidden
    read = itemsize * (spec.num_parameters - embedding) + batch * mean * spec.kv_bytes_per_token(itemsize)
    flops = batch * spec.flops_per_token(round(mean))
    return {
        "seconds": wall,
        "p90_seconds": sorted(walls)[int(0.9 * len(walls))],
        "fraction_of_copy": read / wall / bench.limits.copy_bytes_per_s,
        "fraction_of_gemm": flops / wall / bench.limits.gemm_flops_per_s,
        "batch": batch,
        "mean_context": mean,
        "device_seconds": device,
        "host_seconds": wall - device,
        "idle_seconds": idle,
        "eager_seconds": statistics.median(eager),
        "steps": len(walls),
    }


def _mean_length(generations: list[Any]) -> float:
    sequences = [each.completions[0].sequence for each in generations]
    return statistics.fmean(sequence.num_tokens for sequence in sequences)


def _timed_steps(engine: Engine, count: int) -> list[float]:
    """Times steps, each from the end of the one before; a step ends when its tokens have reached the host."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times


class StepWatch:
    """Marks where each step's forward pass begins and its sampling ends, by the clock of the device or of the host."""

    def __init__(self, engine: Engine, *, on_device: bool):
        self.marks: list[tuple[Any, Any]] = []
        self._on_device = on_device
        forward = engine.runner.forward
        hidden, logits = forward.hidden, forward.logits

        def marked_hidden(*given: Any) -> Any:
            self._begin = self._mark()
            return hidden(*given)

        def marked_logits(*given: Any) -> Any:
            found = logits(*given)
            self.marks.append((self._begin, self._mark()))
            return found

        forward.hidden = marked_hidden  # type: ignore[assignment, method-assign]
        forward.logits = marked_logits  # type: ignore[assignment, method-assign]

    def seconds(self) -> tuple[float, float]:
        """Returns medians over the marked steps: from begin to end, and from there to the next begin."""
        if self._on_device:
            torch.cuda.synchronize()
        inside = [self._between(begin, end) for begin, end in self.marks]
        pairs = zip(self.marks, self.marks[1:], strict=False)
        between = [self._between(before[1], after[0]) for before, after in pairs]
        return statistics.median(inside), statistics.median(between)

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._on_device else end - begin


class _Eager:
    """Stands in for a graph and calls the step that was captured."""

    def __init__(self, step: Callable[[], None]):
        self.replay = step


@contextmanager
def uncaptured(engine: Engine) -> Iterator[None]:
    """Makes every step within the block launch its kernels from Python."""
    forward = engine.runner.forward
    assert isinstance(forward, CapturedForward)
    graphs = forward._forwards, forward._heads
    forward._forwards = {size: _Eager(partial(forward._forward_step, size)) for size in graphs[0]}  # type: ignore
    forward._heads = {size: _Eager(partial(forward._head_step, size)) for size in graphs[1]}  # type: ignore
    try:
        yield
    finally:
        forward._forwards, forward._heads = graphs


@contextmanager
def capture_watched(found: Row) -> Iterator[None]:
    """Records ``seconds`` of capture and trial, ``graphs`` and ``pool_bytes`` of the engine made within the block."""
    capture = CapturedForward.capture

    def watched(forward: CapturedForward, *given: Any) -> None:
        before, start = _reserved_bytes(), time.perf_counter()
        capture(forward, *given)
        seconds, graphs = time.perf_counter() - start, len(forward._forwards) + len(forward._heads)
        found.update(seconds=seconds, graphs=graphs, seconds_per_graph=seconds / graphs)
        found["pool_bytes"] = _reserved_bytes() - before

    CapturedForward.capture = watched  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        CapturedForward.capture = capture  # type: ignore[method-assign]


def _reserved_bytes() -> int:
    """Returns the reserved bytes of the device's memory, graphs' pools included, after unused memory is released."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())
