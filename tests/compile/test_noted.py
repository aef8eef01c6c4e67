"""A step's launches, made once more without the step: the same calls on the same addresses, and nothing kept alive."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.launches import recorder
from fastgen.compile.capture.noted import NotedStep
from fastgen.compile.capture.recording import library_call
from fastgen.errors import KernelError


class Doubling:
    """A kernel that writes the double of ``x``; launches are made again by addresses, as on a GPU."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        active = recorder()
        assert active is not None
        active.launch(self, grid, arguments)

    def launch_noted(self, grid: tuple[int, ...], arguments: tuple[Tensor, ...]) -> Any:
        x, out = ((each.data_ptr(), each.numel()) for each in arguments)
        again = partial(self._from_addresses, grid, x, out)
        again()
        return again

    def _from_addresses(self, grid: tuple[int, ...], *places: tuple[int, int]) -> None:
        import ctypes

        self.grids.append(grid)
        x, out = ((ctypes.c_float * size).from_address(address) for address, size in places)
        out[:] = [2 * value for value in x]


@pytest.mark.parametrize("inference", [False, True])
def test_the_same_calls_are_made_on_what_lies_there_then(inference: bool) -> None:
    x, out, kernel = torch.randn(3, 8), torch.zeros(4, 3), Doubling()
    between = torch.zeros(3, 8)

    def step() -> None:
        kernel((3,), x, between)
        # views: every other feature, and a part of the result
        library_call(torch.mm, between[:, 1::2].t(), between[:, :3], out=out)

    with torch.inference_mode(inference):
        noted = NotedStep(step)
        assert torch.equal(out, (2 * x)[:, 1::2].t() @ (2 * x)[:, :3])
        x.copy_(torch.randn(3, 8))
        out.fill_(torch.nan)
        noted.again()
    torch.testing.assert_close(out, (2 * x)[:, 1::2].t() @ (2 * x)[:, :3])
    assert kernel.grids == [(3,), (3,)]


def test_intermediate_results_are_not_kept() -> None:
    x, out, made = torch.randn(2, 4), torch.zeros(2, 4), []

    def step() -> None:
        between = torch.empty(2, 4)
        made.append(weakref.ref(between.untyped_storage()))
        made.append(weakref.ref(between))
        Doubling()((1,), x, between)
        library_call(torch.add, between, between, out=out)

    noted = NotedStep(step)
    assert [each() for each in made] == [None, None]
    assert torch.equal(out, 4 * x)
    del noted


def test_launches_of_no_program_are_left_out() -> None:
    x, kernel = torch.randn(4), Doubling()
    noted = NotedStep(lambda: kernel((0,), x, x.clone()))
    kernel.grids.clear()
    noted.again()
    assert kernel.grids == []


def test_a_result_that_is_in_no_given_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="add returned something new"):
        NotedStep(lambda: library_call(torch.add, torch.ones(2), 1))


def test_after_a_step_that_fails_launches_run_again() -> None:
    def fails() -> None:
        raise KernelError("a launch failed")

    with pytest.raises(KernelError):
        NotedStep(fails)
    assert recorder() is None
