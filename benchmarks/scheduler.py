"""Measures the cost of scheduling on the host: steps with 256 decodes and few or many queued requests, and queueing.

``python -m benchmarks.scheduler [--output FILE]`` prints the figures and, with ``--output``, keeps them as JSON with
the machine, the date and the commit. The two queue lengths take turns, so that a change of the machine's speed affects
both. The prompts have one length, so all decodes need a new block in the same step, which is the worst case. A snapshot
of the scheduler is timed too. Without it a recording could not be replayed once its first step has left the ring. No
model and no device are needed.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.cpu.results import commit
from benchmarks.new_file import new_file
from fastgen.lab.machine import processor
from fastgen.runtime.flight.recorder import SNAPSHOTS, Recorder
from fastgen.runtime.flight.snapshot import SchedulerState
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.scheduler import Scheduler

NUM_DECODES = 256
QUEUED = (10, 10_000)
NUM_STEPS = 2_000
# Snapshots that are timed, and requests that are queued in a round.
NUM_SNAPSHOTS, NUM_QUEUED = 20, 20_000
BLOCK_SIZE = 16
SAMPLING = SamplingParams(max_new_tokens=10_000)
PROMPT = list(range(24))


class Steps:
    """Holds a scheduler with ``NUM_DECODES`` decoding sequences and requests queued behind them; times its steps."""

    def __init__(self, num_queued: int, num_classes: int, *, prefix_caching: bool = True):
        num_blocks = 1 + NUM_DECODES * (2 + (NUM_STEPS + len(PROMPT)) // BLOCK_SIZE)
        kv = KVCacheManager(num_blocks, BLOCK_SIZE, max_chunk=8192, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(kv, token_budget=8192, max_num_seqs=NUM_DECODES)
        self.times_s: list[float] = []
        for request_id in range(NUM_DECODES):
            self.scheduler.add(Request(request_id, [request_id, *PROMPT], SAMPLING, 0.0))
        self.step()
        self.step()
        samplings = [SamplingParams(max_new_tokens=10_000, priority=1 + number) for number in range(num_classes)]
        for number in range(num_queued):
            self.scheduler.add(Request(NUM_DECODES + number, PROMPT, samplings[number % num_classes], 0.0))
        self.times_s.clear()

    def step(self) -> None:
        begin = time.perf_counter()
        schedule = self.scheduler.schedule(begin)
        assert schedule is not None
        middle = time.perf_counter()
        for seq in (*schedule.decodes, *(chunk.seq for chunk in schedule.chunks if chunk.samples)):
            seq.token_ids.append(7)
        resumed = time.perf_counter()
        self.scheduler.commit(schedule)
        self.times_s.append(time.perf_counter() - resumed + middle - begin)


def step_times_us(num_classes: int = 1, *, prefix_caching: bool = True) -> dict[int, dict[str, float]]:
    """Returns the times of ``schedule`` and ``commit`` together, by how many requests are queued."""
    return _in_turns({queued: Steps(queued, num_classes, prefix_caching=prefix_caching) for queued in QUEUED})


def snapshots() -> dict[int, dict[str, float]]:
    """Returns what a snapshot takes, by how many requests are queued: milliseconds, bytes of the ring, and microseconds
    of each of the steps between two snapshots."""
    max_steps = inspect.signature(Recorder).parameters["max_steps"].default
    found = {}
    for queued in QUEUED:
        steps, times_s = Steps(queued, 1), []
        for _ in range(NUM_STEPS):
            steps.step()
        for number in range(NUM_SNAPSHOTS):
            begin = time.perf_counter()
            state = SchedulerState(steps.scheduler, number)
            times_s.append(time.perf_counter() - begin)
        taken_s = statistics.median(times_s)
        found[queued] = {
            "ms": round(1e3 * taken_s, 3),
            "bytes": state.num_bytes,
            "us_of_each_step": round(1e6 * taken_s * SNAPSHOTS / max_steps, 2),
        }
    return found


def _in_turns(steps: dict[Any, Steps]) -> dict[Any, dict[str, float]]:
    for _ in range(NUM_STEPS):
        for each in steps.values():
            each.step()
    figures = {}
    for key, each in steps.items():
        assert len(each.scheduler.running.decodes) == NUM_DECODES
        centiles = statistics.quantiles(each.times_s, n=100)
        figures[key] = {
            "median_us": round(1e6 * statistics.median(each.times_s), 2),
            "p95_us": round(1e6 * centiles[94], 2),
            "p99_us": round(1e6 * centiles[98], 2),
            "mean_us": round(1e6 * statistics.fmean(each.times_s), 2),
        }
    return figures


def requests_per_s(make_queue: Callable[[], Callable[[int], object]]) -> float:
    """Returns requests queued a second, the median of some rounds; ``make_queue()`` returns a call that queues one."""
    rates = []
    for _ in range(7):
        queue = make_queue()
        gc.collect()  # what rounds before have left
        begin = time.perf_counter()
        for number in range(NUM_QUEUED):
            queue(number)
        rates.append(NUM_QUEUED / (time.perf_counter() - begin))
    return round(statistics.median(rates))


def scheduler_add() -> Callable[[int], object]:
    scheduler = Scheduler(KVCacheManager(1000, BLOCK_SIZE), token_budget=512, max_num_seqs=256)
    return lambda number: scheduler.add(Request(number, PROMPT, SAMPLING, 0.0))


def engine_submit(make_sampling: Callable[[], SamplingParams]) -> Callable[[], Callable[[int], object]]:
    """Returns a call that queues a request in an engine with ``NUM_DECODES`` running sequences and the longer queue."""
    from fastgen.runtime.simulated import SimulatedServer
    from fastgen.runtime.step_cost.cost import StepCost

    def make_queue() -> Callable[[int], object]:
        server = SimulatedServer(
            StepCost.linear(1.0, 0.0), token_budget=8192, max_num_seqs=NUM_DECODES, num_blocks=1000
        )
        for _ in range(NUM_DECODES + QUEUED[1]):
            server.engine.submit(PROMPT, SAMPLING)
        server.engine.step()
        server.engine.step()
        return lambda number: server.engine.submit(PROMPT, make_sampling())

    return make_queue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=new_file)
    output: Path | None = parser.parse_args().output
    about = {
        "machine": {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
    }
    step_us = step_times_us()
    figures = {
        **about,
        "num_decodes": NUM_DECODES,
        "step_us_by_queued": step_us,
        "step_us_by_queued_without_prefix_cache": step_times_us(prefix_caching=False),
        "snapshots_by_queued": snapshots(),
        "step_ratio": round(step_us[QUEUED[1]]["median_us"] / step_us[QUEUED[0]]["median_us"], 3),
        "step_us_by_queued_in_100_classes": step_times_us(num_classes=100),
        "scheduler_add_per_s": requests_per_s(scheduler_add),
        "engine_submit_per_s": requests_per_s(engine_submit(lambda: SAMPLING)),
        "engine_submit_with_new_parameters_per_s": requests_per_s(
            engine_submit(lambda: SamplingParams(max_new_tokens=100))
        ),
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if output is not None:
        output.write_text(text + "\n")


if __name__ == "__main__":
    main()
