"""Capture and replay off the GPU: a tape is the whole step, or capturing it is an error."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.capture.cuda_graph import GraphPool
from fastgen.compile.capture.recording import library_call, recording
from fastgen.compile.capture.tape import LibraryCall, Tape
from fastgen.compile.host.device import current
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.activation import cpp as activation_cpp
from fastgen.compile.ops.activation import triton as activation_triton
from fastgen.compile.ops.linear.cpp import LinearKernel, linear_spec
from fastgen.errors import CaptureError, KernelError
from tests.compile.norms import norm_kernel, norm_spec

CPU = torch.device("cpu")
ROWS, H, F = 6, 32, 48
Step = Callable[[], None]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def cpp(cache: KernelCache) -> KernelLoader:
    loader = KernelLoader(CppBuilder("portable"), cache=cache)
    load_thread_pool(loader)
    return loader


@pytest.fixture(scope="module")
def triton(cache: KernelCache) -> KernelLoader:
    return KernelLoader(TritonBuilder("interpret"), cache=cache)


class Buffers:
    """The buffers that a step reads and writes, at addresses that never change."""

    def __init__(self) -> None:
        self.x, self.residual, self.out = (torch.empty(ROWS, H) for _ in range(3))
        self.norm_weight = torch.rand(H) + 0.5
        self.up, self.down = torch.randn(2 * F, H) / 8, torch.randn(H, F) / 8

    def fill(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for each in (self.x, self.residual):
            each.copy_(torch.randn(each.shape, generator=draw) * (seed % 5))
        self.x[seed % ROWS :] = 0  # padding

    def results(self) -> list[Tensor]:
        return [self.residual.clone(), self.out.clone()]


def cpp_step(loader: KernelLoader, buffers: Buffers, rows: int = ROWS) -> Step:
    """norm(residual += x) → up → gated activation → down, with intermediate results that are made in the step."""
    arch = loader.builder.arch
    norm = norm_kernel(loader.load(norm_spec("cpp", "rms", H, "fp32", 1e-5, residual=True)))
    linear = LinearKernel(loader.load(linear_spec("fp32", arch)), ROWS, max(H, F))
    activation = activation_cpp.activation_spec("silu", arch, gated=True)
    activate = activation_cpp.ActivationKernel(loader.load(activation))
    up, down = linear.pack(2 * F, H), linear.pack(H, F)
    up.write(0, buffers.up)
    down.write(0, buffers.down)

    def step() -> None:
        x, residual, out = buffers.x[:rows], buffers.residual[:rows], buffers.out[:rows]
        normed = torch.empty_like(x)
        norm(x.contiguous(), buffers.norm_weight, None, normed, residual)
        wide = normed.new_empty(rows, 2 * F)
        linear(normed, up, wide)
        del normed
        linear(activate(wide.view(rows, -1)), down, out)

    return step


def triton_step(loader: KernelLoader, buffers: Buffers, rows: int = ROWS) -> Step:
    """The same for a GPU, interpreted: GEMMs are a library's."""
    norm = norm_kernel(loader.load(norm_spec("triton", "rms", H, "fp32", 1e-5, residual=True)))
    activate = activation_triton.ActivationKernel(
        loader.load(activation_triton.activation_spec("silu", F, "fp32", gated=True))
    )

    def step() -> None:
        x, residual, out = buffers.x[:rows], buffers.residual[:rows], buffers.out[:rows]
        normed, wide, narrow = torch.empty_like(x), x.new_empty(rows, 2 * F), x.new_empty(rows, F)
        norm(x, buffers.norm_weight, None, normed, residual)
        library_call(torch.mm, normed, buffers.up.t(), out=wide)
        activate(wide, narrow)
        library_call(torch.mm, narrow, buffers.down.t(), out=out)

    return step


# ---- capture once, replay on many


@pytest.mark.parametrize(("target", "replays"), [("cpp", 300), ("triton", 40)])
@pytest.mark.parametrize("inference", [False, True])
def test_what_is_replayed_on_other_batches_is_what_the_step_computes(request, target, replays, inference) -> None:
    loader = request.getfixturevalue(target)
    with torch.inference_mode(inference):
        make = {"cpp": cpp_step, "triton": triton_step}[target]
        buffers, pool = Buffers(), GraphPool(CPU, loader)
        steps = {rows: make(loader, buffers, rows) for rows in (ROWS, 2, 1)}
        buffers.fill(1)
        graphs = {rows: pool.capture(f"the step at {rows}", step) for rows, step in steps.items()}
        for seed in range(replays):
            rows = random.Random(seed).choice([*steps])
            buffers.fill(seed)
            steps[rows]()
            expected = buffers.results()
            buffers.fill(seed)
            buffers.out[:rows] = torch.nan
            graphs[rows].replay()
            for ours, theirs in zip(buffers.results(), expected, strict=True):
                assert torch.equal(ours, theirs), f"{rows=} {seed=}"
            if seed % 10 == 0:
                assert graphs[rows].difference(pool.record("again", steps[rows])) is None, f"{rows=} {seed=}"


def test_capturing_computes_nothing_beside_the_first_call(cpp: KernelLoader) -> None:
    buffers = Buffers()
    step = cpp_step(cpp, buffers)
    buffers.fill(3)
    step()
    expected = buffers.results()
    buffers.fill(3)
    GraphPool(CPU, cpp).capture("the step", step)
    assert all(map(torch.equal, buffers.results(), expected))


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_while_a_step_is_recorded(cpp: KernelLoader, is_on: bool) -> None:
    compute, seen, was_on = cpp_step(cpp, Buffers()), list[bool](), gc.isenabled()

    def step() -> None:
        seen.append(gc.isenabled())
        compute()

    (gc.enable if is_on else gc.disable)()
    try:
        GraphPool(CPU, cpp).capture("the step", step)
        assert seen == [is_on, False]
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_replay_runs_none_of_the_host_code(cpp: KernelLoader) -> None:
    calls = []
    step = cpp_step(cpp, Buffers())
    graph = GraphPool(CPU, cpp).capture("the step", lambda: (calls.append(1), step())[1])
    assert len(calls) == 2
    graph.replay()
    assert len(calls) == 2


def test_a_native_replay_is_one_call_between_library_calls(cpp: KernelLoader) -> None:
    buffers = Buffers()
    first = cpp_step(cpp, buffers)

    def step() -> None:
        first()
        library_call(torch.neg, buffers.out, out=buffers.out)
        first()

    tape = GraphPool(CPU, cpp).capture("the step", step)
    assert isinstance(tape, Tape)
    assert [str(entry) for entry in tape.entries[3:6]] == [str(tape.entries[3]), "neg", str(tape.entries[0])]
    assert len(tape._stretches) == 3
    buffers.fill(4)
    step()
    expected = buffers.results()
    buffers.fill(4)
    tape.replay()
    assert all(map(torch.equal, buffers.results(), expected))


def test_numbers_of_every_type_reach_a_kernel_as_by_a_plain_call(cache: KernelCache, tmp_path, monkeypatch) -> None:
    from fastgen.compile import render
    from fastgen.compile.spec import Argument, KernelSpec

    (tmp_path / "numbers.cpp.j2").write_text(
        '{% from "kernel.cpp.j2" import signature %}\n#include "numbers.h"\n{{ signature(spec) }}\n'
        "    out[0] = a; out[1] = b; out[2] = c; out[3] = i[1];\n}\n"
    )
    monkeypatch.setattr(render, "TEMPLATE_FOLDERS", (*render.TEMPLATE_FOLDERS, tmp_path))
    for cached in (render._environment, render._names_read, render._source):
        monkeypatch.setattr(render, cached.__name__, cached.__wrapped__)
    scalars = [Argument(name, dtype, "scalar") for name, dtype in (("a", "fp32"), ("b", "i32"), ("c", "i64"))]
    arguments = (Argument("i", "u8", "in"), *scalars, Argument("out", "fp32", "out"))
    loader = KernelLoader(CppBuilder("portable"), cache=cache)
    kernel = loader.load(KernelSpec("numbers", "cpp", {}, arguments))
    numbers, out = torch.tensor([3, 200], dtype=torch.uint8), torch.zeros(4)
    for given in ((-1.5, -7, -(2**40)), (0.1, 2**31 - 1, 2**62), (float("inf"), -(2**31), 0), (3, 0, 1)):
        graph = GraphPool(CPU, loader).capture("numbers", lambda given=given: kernel((), numbers, *given, out))
        expected = out.clone()
        assert expected[0] == torch.tensor(float(given[0]))
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected), given


# ---- what a recording finds


def test_a_length_in_a_number_or_a_grid_is_found(cpp: KernelLoader, triton: KernelLoader) -> None:
    out, weight, lengths = torch.empty(4, H), torch.ones(H), [3]
    in_cpp = cpp.load(norm_spec("cpp", "rms", H, "fp32", 1e-5))
    in_triton = triton.load(norm_spec("triton", "rms", H, "fp32", 1e-5))
    for loader, step, what in (
        (cpp, lambda: in_cpp((), out, weight, out, lengths[0]), "num_rows is 3, then 4"),
        (triton, lambda: in_triton((lengths[0],), out, weight, out), "grid is (3,), then (4,)"),
    ):
        lengths[0] = 3
        pool = GraphPool(CPU, loader)
        graph = pool.capture("the step", step)
        assert graph.difference(pool.record("again", step)) is None
        lengths[0] = 4
        difference = graph.difference(pool.record("again", step)) or ""
        assert difference.startswith("launch 0, rms_norm")
        assert difference.endswith(what)


def test_an_address_that_changes_is_found(cpp: KernelLoader) -> None:
    buffers, pool = Buffers(), GraphPool(CPU, cpp)
    step = cpp_step(cpp, buffers)
    graph = pool.capture("the step", step)
    kept = buffers.residual
    buffers.residual = kept.clone()
    assert "launch 0, rms_norm" in (difference := graph.difference(pool.record("again", step)) or "")
    assert f"residual is torch.float32 at {kept.data_ptr():#x}, then torch.float32 at" in difference
    buffers.residual = kept
    assert graph.difference(pool.record("again", step)) is None


def test_a_launch_more_or_less_or_another_is_found(cpp: KernelLoader) -> None:
    buffers, pool = Buffers(), GraphPool(CPU, cpp)
    step = cpp_step(cpp, buffers)
    once, twice = pool.record("once", step), pool.record("twice", lambda: (step(), step())[0])
    assert "4 launches, then 8; rms_norm" in (once.difference(twice) or "")
    assert "8 launches, then 4" in (twice.difference(once) or "")
    call = pool.record("a call", lambda: library_call(torch.neg, buffers.x, out=buffers.out))
    other = pool.record("a call", lambda: library_call(torch.abs, buffers.x, out=buffers.out))
    view = pool.record("a call", lambda: library_call(torch.neg, buffers.x[:2], out=buffers.out[:2]))
    assert "launch 0, neg: function" in (call.difference(other) or "")
    assert "launch 0, neg: " in (call.difference(view) or "")
    assert call.difference(once) is not None


def test_a_static_buffer_stays_alive_and_in_its_place(cpp: KernelLoader) -> None:
    buffers = Buffers()
    step = cpp_step(cpp, buffers)
    graph = GraphPool(CPU, cpp).capture("the step", step)
    buffers.fill(2)
    step()
    expected = buffers.results()
    buffers.fill(2)
    out = buffers.out
    buffers.x, buffers.residual, buffers.out = (torch.empty(0) for _ in range(3))
    others = [torch.full((ROWS, H), 7.0) for _ in range(50)]  # would lie where they lay, were they freed
    graph.replay()
    assert torch.equal(out, expected[1])
    assert all(bool((each == 7).all()) for each in others)


# ---- life and death


def test_a_closed_tape_says_so(cpp: KernelLoader) -> None:
    pool = GraphPool(CPU, cpp)
    first, second = (pool.capture(name, cpp_step(cpp, Buffers())) for name in ("the first", "the second"))
    first.close()
    first.close()
    with pytest.raises(CaptureError, match=r"^the first is replayed after it was closed"):
        first.replay()
    second.replay()
    pool.close()
    with pytest.raises(CaptureError, match=r"^the second is replayed after it was closed"):
        second.replay()


def test_a_closed_fence_forbids_capturing(cpp: KernelLoader, cache: KernelCache) -> None:
    loader = KernelLoader(cpp.builder, cache=cache)
    pool, step = GraphPool(CPU, loader), cpp_step(loader, Buffers())
    graph = pool.capture("the step", step)
    loader.fence.close()
    with pytest.raises(
        KernelError, match=r"^warm-up is over: the step at 7 is not there, and it is too late to capture it"
    ):
        pool.capture("the step at 7", step)
    graph.replay()
    assert graph.difference(pool.record("again", step)) is None


def test_a_recording_belongs_to_its_thread(cpp: KernelLoader) -> None:
    buffers, done = Buffers(), []
    other, step = cpp_step(cpp, buffers), cpp_step(cpp, Buffers())

    def step_beside_another_thread() -> None:
        thread = threading.Thread(target=lambda: (other(), done.append(torch.zeros(2) + 1)))
        thread.start()
        thread.join()
        step()

    tape = GraphPool(CPU, cpp).record("the step", step_beside_another_thread)
    assert len(tape.entries) == 4
    assert len(done) == 1
    with recording(_Nobody()), pytest.raises(RuntimeError, match="a recording is under way"), recording(_Nobody()):
        pass


class _Nobody:
    def launch(self, *arguments: object) -> None: ...

    def library_call(self, *arguments: object) -> None: ...


# ---- library calls


def test_a_library_call_computes_into_what_it_is_given() -> None:
    x, out = torch.randn(4, 8), torch.empty(4, 4)
    library_call(torch.mm, x, x.t(), out=out)
    assert torch.equal(out, x @ x.t())
    library_call(Tensor.copy_, out, x @ x.t())
    for wrong, said in (
        (lambda: library_call(torch.mm, x, x.t()), "mm returned something new"),
        (lambda: library_call(Tensor.item, x[0, 0]), "item returned something new"),
        (lambda: library_call(torch.cat, [x, x], out=out), "cat: a list is neither a tensor nor a plain value"),
    ):
        with pytest.raises(TypeError, match=said):
            wrong()


def test_a_library_call_is_kept_with_memory_that_the_step_made(triton: KernelLoader) -> None:
    a, out = torch.randn(3, 3), torch.empty(3, 3)

    def step() -> None:
        between = torch.empty_like(a)
        library_call(torch.mm, a, a, out=between)
        library_call(torch.add, between, 2.0, out=out)

    tape = GraphPool(CPU, triton).capture("the step", step)
    assert all(isinstance(entry, LibraryCall) for entry in tape.entries)
    a.copy_(torch.eye(3))
    tape.replay()
    assert torch.equal(out, torch.eye(3) + 2)


def test_tapes_of_an_arena_share_its_memory(cpp: KernelLoader) -> None:
    pool = GraphPool(CPU, cpp)
    pool.capture("the largest", cpp_step(cpp, Buffers()))
    size = pool.size_bytes
    for rows in range(1, ROWS):
        pool.capture(f"the step at {rows}", cpp_step(cpp, Buffers(), rows))
    assert pool.size_bytes == size > 0


@pytest.mark.gpu
def test_a_step_is_captured_and_replayed_on_a_gpu(tmp_path: Path) -> None:
    device = current("cuda")
    loader = KernelLoader(TritonBuilder("sm_{}{}".format(*device.capability or ())), cache=KernelCache(tmp_path))
    norm = norm_kernel(loader.load(norm_spec("triton", "rms", H, "bf16", 1e-5)))
    a, weight, out = (torch.ones(ROWS, H, dtype=torch.bfloat16, device="cuda") for _ in range(3))

    def step() -> None:
        between = torch.empty_like(a)
        library_call(torch.mul, a, 3.0, out=between)
        norm(between, weight[0], None, out)

    pool = GraphPool(device.torch_device, loader)
    graph = pool.capture("the step", step)
    for seed in range(20):
        a.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        step()
        expected = out.clone()
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected), f"{seed=}"
    with pytest.raises(KeyError):
        pool.capture("a failing step", lambda: {}["no such"])
    graph.replay()
    pool.close()
    with pytest.raises(CaptureError, match="after it was closed"):
        graph.replay()
