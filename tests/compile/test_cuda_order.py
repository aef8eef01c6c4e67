"""Calls of CUDA and their order, with a stand-in that keeps its rules: within a capture nothing may wait,
and every capture runs on a stream of its own that has waited for what came before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fastgen.compile.build import autotune
from fastgen.compile.build.fence import Fence
from fastgen.compile.capture.cuda_graph import GraphPool
from fastgen.compile.capture.recording import library_call
from fastgen.errors import CaptureError, KernelError
from fastgen.runtime.step.forward import CapturedForward, Results


class StandIn:
    """Stands in for ``torch.cuda``: records the calls, and raises where a capture would be invalid."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.capturing = False
        self.stream = "main"
        self.clock_ms = 0.0
        self.python_ran = 0

    def note(self, what: str, *, waits: bool = False) -> None:
        if waits and self.capturing:
            raise RuntimeError(f"{what} within a capture")
        self.log.append(what)

    def step(self) -> None:
        """A step of one library call."""
        self.python_ran += 1
        library_call(self.library)

    def library(self) -> None:
        self.note(f"{'captured' if self.capturing else 'ran'} on {self.stream}")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Stream:
            def __init__(self, device: object = None):
                self.name = "side"

            def wait_stream(self, other: Stream) -> None:
                cuda.note(f"{self.name} waits for {other.name}", waits=True)

        main = Stream()
        main.name = "main"

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, cuda.stream = cuda.stream, stream.name
            try:
                yield
            finally:
                cuda.stream = before

        class Graph:
            def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
                assert cuda.stream != "main", "the default stream cannot be captured"
                assert capture_error_mode == "thread_local"  # other threads may do as they like
                cuda.note(f"begin in {pool}")
                cuda.capturing = True

            def capture_end(self) -> None:
                cuda.capturing = False
                cuda.note("end")

            def replay(self) -> None:
                cuda.clock_ms += 3.0
                cuda.note("replay")

            def reset(self) -> None:
                cuda.note("reset")

        class Event:
            def __init__(self, enable_timing: bool = False):
                assert enable_timing

            def record(self) -> None:
                self.at_ms = cuda.clock_ms

            def elapsed_time(self, end: Event) -> float:
                return end.at_ms - self.at_ms

        class Pool:
            id = "the pool"

        @contextmanager
        def allocating_from(pool: Pool, device: torch.device) -> Iterator[None]:
            cuda.note(f"allocate from {pool.id}")
            try:
                yield
            finally:
                cuda.note("allocate as before")

        given: dict[str, Any] = {
            **{"MemPool": Pool, "use_mem_pool": allocating_from},
            **{"Stream": Stream, "CUDAGraph": Graph, "Event": Event, "stream": on},
            "current_stream": lambda device=None: main,
            "current_device": lambda: 0,
            "synchronize": lambda device=None: cuda.note("synchronize", waits=True),
        }
        for name, value in given.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    stand_in.install(monkeypatch)
    autotune._measuring_stream.cache_clear()
    yield stand_in
    autotune._measuring_stream.cache_clear()


class Loader:
    """As far as a pool of CUDA graphs asks one."""

    def __init__(self) -> None:
        self.fence = Fence()


def new_pool(loader: Loader) -> GraphPool:
    return GraphPool(torch.device("cuda"), loader)  # type: ignore[arg-type]


def test_a_step_is_run_before_it_is_captured_with_nothing_left_of_it(cuda: StandIn) -> None:
    graph = new_pool(Loader()).capture("a step", cuda.step)
    assert cuda.log == [
        "side waits for main",
        "allocate from the pool",
        "ran on side",
        "allocate as before",
        "begin in the pool",
        "captured on side",
        "end",
        "main waits for side",
    ]
    graph.replay()
    graph.close()
    assert cuda.log[-2:] == ["replay", "reset"]
    with pytest.raises(CaptureError, match="after it was closed"):
        graph.replay()


@pytest.mark.parametrize("runs_twice", [True, False])
def test_a_capture_gets_what_the_step_launched_or_the_step_once_more(cuda: StandIn, runs_twice: bool) -> None:
    new_pool(Loader()).capture("a step", cuda.step, runs_twice=runs_twice)
    assert cuda.python_ran == 1 + runs_twice
    assert [what for what in cuda.log if what.endswith("on side")] == ["ran on side", "captured on side"]


def test_a_forward_runs_the_largest_step_of_each_kind_twice(cuda: StandIn) -> None:
    results, ran = Results(1, 1, torch.float32, torch.device("cpu")), list[str]()
    sizes = {"sizes": (1, 2, 8), "row_sizes": (1, 4), "sample": lambda logits: None}
    forward = CapturedForward(Mock(), Mock(), new_pool(Loader()), Mock(), results, **sizes)  # type: ignore[arg-type]

    def step(kind: str, size: int) -> None:
        ran.append(f"{kind} {size}")
        cuda.step()

    forward._forward_step = lambda size: step("tokens", size)  # type: ignore[method-assign]
    forward._head_step = lambda size: step("rows", size)  # type: ignore[method-assign]
    forward.capture(lambda done, total: None)
    assert ran == ["tokens 8", "tokens 8", "tokens 2", "tokens 1", "rows 4", "rows 4", "rows 1"]
    assert cuda.log.count("ran on side") == cuda.log.count("captured on side") == 5


def test_a_step_that_waits_cannot_be_captured_and_the_next_one_can(cuda: StandIn) -> None:
    pool, ran = new_pool(Loader()), []

    def waits() -> None:
        ran.append("once more")
        torch.cuda.synchronize()

    with pytest.raises(RuntimeError, match="within a capture"):
        pool.capture("a step", waits)
    assert len(ran) == 2
    assert cuda.log[-3:] == ["end", "reset", "main waits for side"]
    assert (cuda.capturing, cuda.stream) == (False, "main")
    pool.capture("another", cuda.step).replay()
    assert cuda.log[-1] == "replay"


def test_what_a_failing_step_launched_is_waited_for(cuda: StandIn) -> None:
    def fails_midway() -> None:
        cuda.step()
        raise ValueError("midway")

    with pytest.raises(ValueError, match="midway"):
        new_pool(Loader()).capture("a step", fails_midway)
    assert [what for what in cuda.log if what.endswith("side")] == ["ran on side", "main waits for side"]


def test_behind_the_fence_cuda_is_not_called(cuda: StandIn) -> None:
    loader = Loader()
    pool = new_pool(loader)
    loader.fence.close()
    with pytest.raises(KernelError):
        pool.capture("a step", cuda.step)
    assert not cuda.log


def test_ways_are_timed_by_replays_on_one_stream(cuda: StandIn) -> None:
    run: Callable[[], None] = cuda.step
    assert autotune._measure_on_gpu(run) == pytest.approx(3e-3)
    first = cuda.log.copy()
    assert first[:5] == ["side waits for main", "ran on side", "synchronize", "begin in None", "captured on side"]
    assert first.count("replay") > 10
    assert first[-2:] == ["synchronize", "reset"]
    stream = autotune._measuring_stream(0)
    autotune._measure_on_gpu(run)
    assert cuda.log[len(first) :] == first
    assert autotune._measuring_stream(0) is stream
