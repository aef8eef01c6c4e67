"""Calls that a tape could not hold are refused while it is recorded, and nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.launches import recorder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.capture.cuda_graph import GraphPool
from fastgen.errors import CaptureError, KernelError
from tests.compile.norms import norm_kernel, norm_spec

CPU = torch.device("cpu")
ROWS, H = 6, 32


@pytest.fixture(scope="module")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> KernelLoader:
    return KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path_factory.mktemp("kernels")))


class Buffers:
    def __init__(self) -> None:
        self.x, self.residual, self.out = (torch.randn(ROWS, H) for _ in range(3))

    def fill(self, seed: int) -> None:
        for each in (self.x, self.residual):
            each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(seed)))

    def results(self) -> list[Tensor]:
        return [self.residual.clone(), self.out.clone()]


def cpp_step(loader: KernelLoader, buffers: Buffers) -> Callable[[], None]:
    """Two norms, the first of the sum with the residual."""
    add_and_norm = norm_kernel(loader.load(norm_spec("cpp", "rms", H, "fp32", 1e-5, residual=True)))
    norm = norm_kernel(loader.load(norm_spec("cpp", "rms", H, "fp32", 1e-5)))
    weight = torch.ones(H)

    def step() -> None:
        between = torch.empty_like(buffers.x)
        add_and_norm(buffers.x, weight, None, between, buffers.residual)
        norm(between, weight, None, buffers.out)

    return step


x = torch.randn(4, 8)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "adds": (lambda: x + 1, r"aten\.add\.Tensor is computed by torch"),
    "in place": (lambda: x.mul_(1), r"aten\.mul_\.Tensor"),
    "copies": (lambda: x.copy_(x), r"aten\.copy_"),
    "assigns": (lambda: x.__setitem__(0, 1.0), r"aten\.(fill_|copy_|lift_fresh)"),
    "clones": (lambda: x.clone(), r"aten\.clone"),
    "reshapes with a copy": (lambda: x.t().reshape(-1), r"aten\.clone"),
    "makes contiguous": (lambda: x.t().contiguous(), r"aten\.clone"),
    "converts": (lambda: x.double(), r"aten\._to_copy"),
    "zeros": (lambda: torch.zeros(3), r"aten\.zeros"),
    "full": (lambda: torch.full((3,), 1.0), r"aten\.full"),
    "from a list": (lambda: torch.tensor([1, 2]), r"aten\.lift_fresh"),
    "as a tensor": (lambda: torch.as_tensor([1, 2]), r"aten\.lift_fresh"),
    "range": (lambda: torch.arange(3), r"aten\.arange"),
    "random": (lambda: torch.randn(3), r"aten\.randn"),
    "linear": (lambda: torch.nn.functional.linear(x, x), r"aten\.(mm|linear|addmm)"),
    "item": (lambda: x[0, 0].item(), r"aten\._local_scalar_dense"),
    "truth": (lambda: bool(x[0, 0]), r"aten\.(_local_scalar_dense|is_nonzero)"),
    "int": (lambda: int(x[0, 0]), r"aten\._local_scalar_dense"),
    "list": (lambda: x.tolist(), "tolist reads a tensor on the host"),
    "numpy": (lambda: x.numpy(), "numpy reads a tensor on the host"),
    "indexing": (lambda: x[torch.empty(2, dtype=torch.int64)], r"aten\.index"),
    "resizes": (lambda: x.resize_(2), r"aten\.resize_"),
    "out=": (lambda: torch.mm(x, x.t(), out=torch.empty(4, 4)), r"aten\.mm\.out"),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_computes_in_between_is_refused(cpp: KernelLoader, case: str, inference: bool) -> None:
    between, said = REFUSED[case]
    buffers, before = Buffers(), x.clone()
    step, pool = cpp_step(cpp, buffers), GraphPool(CPU, cpp)

    def faulty() -> None:
        step()
        between()
        step()

    with torch.inference_mode(inference):
        with pytest.raises(CaptureError, match=rf"^the step cannot be captured: {said}"):
            pool.record("the step", faulty)
        assert torch.equal(x, before)
        assert recorder() is None
        assert pool.capture("the step", step).difference(pool.record("again", step)) is None


def test_views_and_new_memory_are_no_launches(cpp: KernelLoader) -> None:
    views = [
        *(lambda: x[1:3], lambda: x.view(-1), lambda: x.reshape(8, 4), lambda: x.flatten(), lambda: x.chunk(2, -1)),
        *(
            lambda: x.t(),
            lambda: x.split([1, 3]),
            lambda: x.unbind(0),
            lambda: x.unflatten(1, (2, 4)),
            lambda: x.float(),
        ),
        *(lambda: x.expand(2, 4, 8), lambda: x.contiguous(), lambda: x.view(torch.int32), lambda: x.detach()),
        *(
            lambda: torch.empty(3),
            lambda: torch.empty_like(x.t()),
            lambda: x.new_empty(0),
            lambda: len(x),
            lambda: list(x),
        ),
        *(lambda: torch.empty_strided((2, 2), (1, 2)), lambda: torch.empty(2, dtype=torch.bfloat16, device="cpu")),
    ]
    pool = GraphPool(CPU, cpp)
    for inference in (False, True):
        with torch.inference_mode(inference):
            for view in views:
                assert (
                    pool.record("views", lambda view=view: view() and None if False else (view(), None)[1]).entries
                    == ()
                )


def test_a_tensor_that_outlives_the_capture_is_refused(cpp: KernelLoader) -> None:
    kept: list[Tensor] = []
    pool = GraphPool(CPU, cpp)
    with pytest.raises(CaptureError, match="1 of the tensors that it allocated are still alive"):
        pool.record("the step", lambda: kept.append(torch.empty(3)))
    with pytest.raises(CaptureError, match="tensors of an earlier capture are still alive"):
        pool.record("the step", lambda: None)
    kept.clear()
    pool.record("the step", lambda: None)


def test_a_cycle_does_not_pass_for_a_tensor_that_is_kept(cpp: KernelLoader) -> None:
    def step() -> None:
        cycle: list[object] = [torch.empty(3)]
        cycle.append(cycle)

    GraphPool(CPU, cpp).record("the step", step)


@pytest.mark.parametrize("at_call", [1, 2])
def test_an_exception_leaves_nothing_behind(cpp: KernelLoader, at_call: int) -> None:
    buffers, pool, calls = Buffers(), GraphPool(CPU, cpp), []
    step = cpp_step(cpp, buffers)

    def failing() -> None:
        calls.append(1)
        kept = torch.empty(5)
        step()
        if len(calls) == at_call:
            raise KeyError(len(kept))

    with pytest.raises(KeyError):
        pool.capture("the step", failing)
    assert recorder() is None
    assert gc.isenabled()
    buffers.fill(5)
    step()
    expected = buffers.results()
    graph = pool.capture("the step", failing)
    buffers.fill(5)
    graph.replay()
    assert all(map(torch.equal, buffers.results(), expected))


def test_a_wrong_argument_is_reported_while_it_is_recorded(cpp: KernelLoader) -> None:
    kernel = cpp.load(norm_spec("cpp", "rms", H, "fp32", 3e-5, needed_by=("llama: model.final_norm",)))
    pool, out = GraphPool(CPU, cpp), torch.empty(1, H)
    for wrong in ((out, out.double()[0], out, 1), (out, out[0], out, "1"), (out, out[0], out)):
        with pytest.raises(KernelError, match="cannot run on") as caught:
            pool.record("the step", lambda wrong=wrong: kernel((), *wrong))
        assert caught.value.nodes == ("llama: model.final_norm",)
