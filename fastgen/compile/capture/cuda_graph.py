"""Capture and replay of steps: CUDA graphs on a GPU, tapes elsewhere. Mechanism, no policy.

A step is a function without arguments or result that reads and writes static buffers only, so a replay is the same step
on the buffers' current contents. All captures of an engine share one pool for intermediate results: capture the largest
first, and read only the static buffers of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch

from fastgen.collector import collector_off
from fastgen.compile.build.cpp import CppKernel
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.capture.arena import Arena
from fastgen.compile.capture.noted import NotedStep
from fastgen.compile.capture.tape import Tape, record, tape_spec
from fastgen.errors import CaptureError


class Graph(Protocol):
    """A captured step."""

    name: str

    def replay(self) -> None:
        """Runs the step; on a GPU on the current stream. Raises :class:`CaptureError` after :meth:`close`."""

    def close(self) -> None:
        """Releases its resources, except its part of the pool."""


class GraphPool:
    """The captured steps of one engine, which runs on ``device`` with the kernels of ``loader``. Without a GPU their
    intermediate results are expected to take ``expected_bytes``."""

    def __init__(self, device: torch.device, loader: KernelLoader, *, expected_bytes: int = 0):
        self._device, self.fence = device, loader.fence
        self._graphs: list[Graph] = []
        self._arena = Arena(0 if device.type == "cuda" else expected_bytes)
        self._runner: CppKernel | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._memory = torch.cuda.MemPool()  # of intermediate results, in captures and before them
        elif loader.builder.launches_natively:
            runner = loader.load(tape_spec())
            assert isinstance(runner, CppKernel)
            self._runner = runner

    def capture(self, name: str, step: Callable[[], None], *, runs_twice: bool = True) -> Graph:
        """Runs ``step`` once, so that its first-call allocations exist, and captures it.

        With ``runs_twice`` it is run again in the capture, which finds whatever a capture cannot hold. Without, a GPU's
        capture gets what the first run launched, which is a fraction of the work: for a step that differs from one
        captured before in its sizes alone, so that its launches need fewer checks. During the capture nothing is
        computed and the garbage collector is off. If this fails, nothing is kept. Raises :class:`KernelError` behind a
        closed fence, :class:`CaptureError` for a step that cannot be captured, and what ``step`` raises.
        """
        self.fence.check("capture", name)
        graph: Graph
        if self._device.type == "cuda":
            graph = self._capture_cuda(name, step, runs_twice)
        else:
            step()
            graph = self.record(name, step)
        self._graphs.append(graph)
        return graph

    def record(self, name: str, step: Callable[[], None]) -> Tape:
        """Returns the tape that capturing ``step`` would make now, without a GPU, to compare it with a captured one.

        It needs no open fence, runs nothing, and the tape belongs to the caller.
        """
        with collector_off():
            return record(name, step, self._arena, self._runner)

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of the intermediate results of steps, without a GPU."""
        return self._arena.size_bytes

    def close(self) -> None:
        """Closes every captured step."""
        for graph in self._graphs:
            graph.close()
        self._graphs.clear()

    def _capture_cuda(self, name: str, step: Callable[[], None], runs_twice: bool) -> _CudaGraph:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                again = step
                with torch.cuda.use_mem_pool(self._memory, self._device):
                    if runs_twice:
                        step()
                    else:
                        again = NotedStep(step).again
                with collector_off():
                    self._record_cuda(graph, again)
        finally:  # where the step fails midway, what it launched still writes to static buffers
            current.wait_stream(self._stream)
        return _CudaGraph(name, graph)

    def _record_cuda(self, graph: torch.cuda.CUDAGraph, step: Callable[[], None]) -> None:
        # torch declares a type of its own for what is such a pair
        graph.capture_begin(pool=self._memory.id, capture_error_mode="thread_local")  # type: ignore[arg-type]
        try:
            step()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # raised by an invalid capture
                graph.capture_end()
            graph.reset()
            raise
        graph.capture_end()


class _CudaGraph:
    def __init__(self, name: str, graph: torch.cuda.CUDAGraph):
        self.name = name
        self._graph: torch.cuda.CUDAGraph | None = graph

    def replay(self) -> None:
        if self._graph is None:
            raise CaptureError(f"{self.name} is replayed after it was closed")
        self._graph.replay()

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph = None
