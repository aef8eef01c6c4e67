"""Measures decode steps of one model in one weight format beside the memory's limit at the time; prints JSON.

    python -m benchmarks.cpu.decode_steps MODEL FORMAT

A case is a number of concurrent requests and of tokens already cached. Between two measurements of the machine's limits
three consecutive steps run. The first does not count, since its kernels may have started before; of the others the
better one counts. A sample is steady where the limits before and after agree. Also printed are the share of a step
during which no kernel runs, and how much memory loading took.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastgen
from benchmarks.cpu.engines.fastgen_llm import OPTIONS
from benchmarks.cpu.machine_limits import Machine
from benchmarks.cpu.memory import MemoryWatch
from fastgen.compile.build.cpp import CppBuilder, CppKernel, cpp_arch
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import ThreadPool
from fastgen.runtime.engine import Engine

CASES = ((1, 16), (8, 16), (16, 16), (1, 4000))
_NUM_UNTIMED = 20  # steps after the prompts are read


class KernelClock:
    """Adds up the seconds since :meth:`reset` during which kernels run.

    It counts kernels that are loaded while it is active: the calls alone without their preparation, and steps that
    started early while the host does something else.
    """

    def __init__(self) -> None:
        self._seconds, self._since_s = 0.0, 0.0
        self._begun_s: float | None = None
        load, start, end = CppBuilder.load, ThreadPool.start, ThreadPool.end

        def load_clocked(builder: CppBuilder, *arguments: Any) -> CppKernel:
            kernel = load(builder, *arguments)
            kernel._function = self._clocked(kernel._function)
            return kernel

        def start_clocked(pool: ThreadPool, *arguments: Any) -> int:
            self._begun_s = time.perf_counter()
            number = start(pool, *arguments)
            if number == 0:
                self._begun_s = None
            return number

        def end_clocked(pool: ThreadPool, number: int) -> float:
            ended_s = end(pool, number)
            if self._begun_s is not None:
                self._seconds += max(0.0, ended_s - max(self._begun_s, self._since_s))
                self._begun_s = None
            return ended_s

        CppBuilder.load = load_clocked  # type: ignore[assignment, method-assign]
        ThreadPool.start = start_clocked  # type: ignore[assignment, method-assign]
        ThreadPool.end = end_clocked  # type: ignore[assignment, method-assign]

    def reset(self) -> None:
        self._seconds, self._since_s = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Returns the seconds so far; a step that started and has not ended counts as running."""
        runs_s = 0.0 if self._begun_s is None else time.perf_counter() - max(self._begun_s, self._since_s)
        return self._seconds + runs_s

    def _clocked(self, function: Any) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            start = time.perf_counter()
            function(*arguments)
            self._seconds += time.perf_counter() - start

        call.argtypes = function.argtypes  # type: ignore[attr-defined]
        return call


def measure(model: Path, weight_format: str, num_threads: int, num_pairs: int) -> dict[str, Any]:
    dtype, quantize = OPTIONS[weight_format]
    clock = KernelClock()
    fastgen.load("tiny-llama", device="cpu").close()  # imports everything before memory is measured
    with MemoryWatch() as memory:
        llm = fastgen.load(
            model,
            device="cpu",
            dtype=dtype,
            quantize=quantize,
            num_threads=num_threads,
            kv_cache_memory="1GiB",
            prefix_caching=False,
        )
    engine = llm._engine
    assert engine is not None
    cache, config = engine.runner.kv_cache, llm.config
    machine = Machine(cpp_arch(device.current("cpu")))
    return {
        "weight_bytes": weight_bytes(engine),
        "kv_bytes_per_token": cache.size_bytes // (config.num_blocks * config.block_size),
        "memory": {**memory.found(), "kv_cache": cache.size_bytes},
        "cases": [
            {"requests": requests, "cached": cached} | measure_case(engine, machine, clock, requests, cached, num_pairs)
            for requests, cached in CASES
        ],
    }


def weight_bytes(engine: Engine) -> int:
    """Returns the bytes of the matrices that a decode step reads."""
    packed: list[Any] = [each.packed for each in engine.runner.model.modules() if hasattr(each, "packed")]
    return sum({id(each): int(each.size_bytes) for each in packed}.values())


def measure_case(
    engine: Engine, machine: Machine, clock: KernelClock, num_requests: int, num_cached: int, num_pairs: int
) -> dict[str, Any]:
    """Measures a case. ``pairs`` are limits before and after, in bytes and operations a second, and seconds of a step
    and in kernels.
    """
    generator = random.Random(0)
    num_new = _NUM_UNTIMED + 3 * num_pairs + 1
    sampling = fastgen.SamplingParams(max_new_tokens=num_new, min_new_tokens=num_new, temperature=0, ignore_eos=True)
    generations = [
        engine.submit([generator.randrange(300, 31_900) for _ in range(num_cached)], sampling)
        for _ in range(num_requests)
    ]
    while any(len(each.completions[0].token_ids) <= _NUM_UNTIMED for each in generations):
        engine.step()
    first_length = num_cached + len(generations[0].completions[0].token_ids)
    pairs = []
    assert engine.runner.steady is not None
    for _ in range(num_pairs):
        engine.runner.steady.wait()  # no started step may run while the machine is measured
        before = machine.measure()
        engine.step()
        step_s, kernel_s = min(_time_step(engine, clock) for _ in range(2))
        engine.runner.steady.wait()
        after = machine.measure()
        pairs.append({"before": vars(before), "after": vars(after), "step_s": step_s, "kernel_s": kernel_s})
    engine.cancel_all()
    return {"mean_length": first_length + 3 * num_pairs // 2, "pairs": pairs}


def _time_step(engine: Engine, clock: KernelClock) -> tuple[float, float]:
    clock.reset()
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start, clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("format", choices=OPTIONS)
    parser.add_argument("--num-threads", type=int, default=device.current("cpu").num_cores)
    parser.add_argument("--pairs", type=int, default=24, help="measurements a case")
    options = parser.parse_args()
    print(json.dumps(measure(options.model, options.format, options.num_threads, options.pairs)))


if __name__ == "__main__":
    main()
