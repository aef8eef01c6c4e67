"""Profiles replayed decode steps of a Llama-2-7B shape, kernel by kernel, at batch 1, 32 and 256.

A row has what the launches of one kernel take in one step: ``seconds``, the ``gap_seconds`` before them in which the
device did nothing, and the ``bytes`` that they must move. Kernels overlap: one starts early and waits for those before
it. So ``end_seconds`` are those from the last end before a launch to its own end, gaps included. These add up to the
step, and say what a kernel costs; ``fraction_of_copy`` is by them. Kernels of the library are one row, since their
names say little. The row ``step`` has the sums. With a toy, kernels run one by one on the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.llama import LLAMA_2_7B, TOY, LlamaShape, kv_tokens_that_fit, llama_engine, llama_spec, submit
from benchmarks.gpu.measuring import Bench, Row, Rows
from benchmarks.gpu.steps import CASES, MAX_NUM_SEQS, TOKEN_BUDGET, uncaptured
from fastgen.compile.build.builder import BuiltKernel
from fastgen.compile.capture.recording import recording
from fastgen.compile.spec import KernelSpec
from fastgen.runtime.engine import Engine

_NUM_STEPS, _NUM_UNTIMED = 8, 4
_LIBRARY = "library"
# Arguments of which a launch touches a small part.
_TABLES = {"k_cache", "v_cache", "cache", "table", "position_table", "cos_sin", "block_tables", "uses", "mask", "bias"}


@dataclass(frozen=True)
class Event:
    """A kernel that ran: its name, and when it began and ended, in seconds."""

    name: str
    begin: float
    end: float


def moved_bytes(spec: KernelSpec, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> int:
    """Returns the bytes that a launch must move, except of tables. Buffers are larger than a small batch needs: of the
    parts of a linear layer whose features are split only those of the batch's rows count, and of sampling the logits.
    """
    parameters = spec.parameters
    if spec.op.startswith("sampling"):
        # A slice of a row has a program; the last kernel reads what the others found.
        return 4 * parameters["block"] * grid[0] if spec.op != "sampling_choose" else 0  # type: ignore[operator, return-value]
    given = {each.name: value for each, value in zip(spec.arguments, arguments, strict=True)}
    moved = {name: value.nbytes for name, value in given.items() if isinstance(value, Tensor) and name not in _TABLES}
    num_splits = parameters.get("splits") or 1
    for name in ("part", "out") if spec.op == "few_row_linear" else ("part",):
        if name in moved and num_splits != 1:
            features = parameters.get("OUT") or parameters["H"]
            moved[name] = 4 * num_splits * given["num_rows"] * features
    return sum(moved.values())


@dataclass
class Watched:
    """Runs launches as they come, and notes the bytes that each must move, and when it ran by the host's clock."""

    kv_bytes: float  # of keys and values that attention reads in one layer
    num_bytes: dict[str, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def launch(self, kernel: BuiltKernel, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        spec = kernel.spec
        if spec.op == "attention":
            moved = self.kv_bytes if spec.parameters["kind"] == "decodes" else 0
        else:
            moved = moved_bytes(spec, grid, arguments)
        self._run(spec.name, moved, partial(kernel.launch, grid, *arguments))

    def library_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        moved = sum(each.nbytes for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        self._run(_LIBRARY, moved, partial(function, *args, **kwargs))

    def _run(self, name: str, moved: float, run: Callable[[], object]) -> None:
        begin = time.perf_counter()
        run()
        self.events.append(Event(name, begin, time.perf_counter()))
        self.num_bytes[name] = self.num_bytes.get(name, 0.0) + moved


def measure(bench: Bench) -> Rows:
    shape, cases, sizes = LLAMA_2_7B, CASES, (TOKEN_BUDGET, MAX_NUM_SEQS)
    if bench.toy:
        shape, cases, sizes = TOY, ((1, 6), (2, 8)), (4, 2)
    wanted = max(_kv_tokens(*case) for case in cases)
    kv_tokens = wanted if bench.toy else min(wanted, kv_tokens_that_fit(shape, bench.device))
    engine = llama_engine(shape, bench.device, kv_tokens=kv_tokens, max_num_seqs=sizes[1], token_budget=sizes[0])
    for batch, context in cases:
        case = f"batch {batch}, context {context}"
        if kv_tokens < _kv_tokens(batch, context):
            yield {"case": case, "left_out": "its KV cache does not fit beside the weights"}
            continue
        try:
            yield from profiled(engine, shape, batch, context, bench)
        except Exception as error:
            yield {"case": case, "error": f"{type(error).__name__}: {error}"}
        engine.cancel_all()


def _kv_tokens(batch: int, context: int) -> int:
    return batch * (context + _NUM_STEPS + 2 * _NUM_UNTIMED + batch + 64)


def profiled(engine: Engine, shape: LlamaShape, batch: int, context: int, bench: Bench) -> Rows:
    """Yields the rows of one batch."""
    spec, itemsize = llama_spec(shape), shape.dtype.itemsize
    generations = submit(engine, [(context, _NUM_STEPS + 2 * _NUM_UNTIMED + batch + 2)] * batch, seed=batch)
    while any(len(each.completions[0].token_ids) < _NUM_UNTIMED for each in generations):
        engine.step()
    watched = Watched(batch * context * spec.kv_bytes_per_token(itemsize) / shape.layers)
    with uncaptured(engine), recording(watched):
        engine.step()
    events = watched.events if bench.toy else _device_events(engine)
    num_steps = 1 if bench.toy else _NUM_STEPS
    yield from rows_of(f"batch {batch}, context {context}", events, num_steps, watched.num_bytes, bench)


def _device_events(engine: Engine) -> list[Event]:
    """Returns what the device ran in some replayed steps, in the order in which it began."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_NUM_STEPS):
            engine.step()
        torch.cuda.synchronize()
    ran = [each for each in found.events() or [] if each.device_type == DeviceType.CUDA]
    events = [Event(each.name, each.time_range.start / 1e6, each.time_range.end / 1e6) for each in ran]
    return sorted(events, key=lambda each: each.begin)


def rows_of(
    case: str, events: Iterable[Event], num_steps: int, num_bytes: dict[str, float], bench: Bench
) -> Iterable[Row]:
    """Returns a row for each kernel, the longest first, and one for the step. ``num_bytes`` are those of one step."""
    found: dict[str, Row] = {}
    last_end: float | None = None
    for event in events:
        name = event.name if event.name in num_bytes else _LIBRARY
        row = found.setdefault(name, {"seconds": 0.0, "end_seconds": 0.0, "gap_seconds": 0.0, "launches": 0.0})
        last_end = event.begin if last_end is None else last_end
        row["seconds"] += (event.end - event.begin) / num_steps
        row["end_seconds"] += max(0.0, event.end - last_end) / num_steps
        row["gap_seconds"] += max(0.0, event.begin - last_end) / num_steps
        row["launches"] += 1 / num_steps
        last_end = max(last_end, event.end)
    ordered = sorted(found.items(), key=lambda each: -each[1]["end_seconds"])
    for name, row in ordered:
        moved = num_bytes.get(name, 0.0)
        rate = moved / row["end_seconds"] if row["end_seconds"] else 0.0
        yield {
            "case": f"{case}: {name}",
            **row,
            "bytes": moved,
            "fraction_of_copy": rate / bench.limits.copy_bytes_per_s,
        }
    keys = ("seconds", "end_seconds", "gap_seconds", "launches")
    sums = {key: sum(row[key] for _, row in ordered) for key in keys}
    yield {"case": f"{case}: step", **sums, "bytes": sum(num_bytes.values())}
