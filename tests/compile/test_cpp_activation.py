"""Activations' C++ kernels against the exact functions and the torch reference."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.activation.cpp import ActivationKernel, activation_spec
from fastgen.compile.ops.activation.reference import ACTIVATIONS, activate, activate_and_multiply
from tests.compile.arches import HERE, WIDTHS

ARCHES = CPP_ARCHES[CPP_ARCHES.index(cpp_arch(device.current("cpu"))) :]
# The distinct functions, under one of their names.
KINDS = {activation_spec(kind, "portable", gated=False).parameters["kind"]: kind for kind in ACTIVATIONS}
EVERYWHERE = (("silu", True), ("gelu", False))
# Each is a kernel to build; of the instruction sets that are not this machine's best a few.
CASES = [
    pytest.param(arch, kind, gated, id=f"{kind}-{'gated' if gated else 'plain'}-{arch}",
                 marks=() if arch in WIDTHS and (arch == HERE or (kind, gated) in EVERYWHERE) else pytest.mark.slow)
    for arch in ARCHES
    for kind in KINDS.values()
    for gated in (False, True)
]  # fmt: skip
# Relative; results below 1e-35 are taken for 0.
TOLERANCE = 1e-5


Kernels = dict[str, KernelLoader]


@pytest.fixture(scope="module")
def loaders() -> Kernels:
    return {arch: KernelLoader(CppBuilder(arch)) for arch in ARCHES}


def load(loaders: Kernels, arch: str, kind: str, gated: bool) -> ActivationKernel:
    load_thread_pool(loaders[arch])
    return ActivationKernel(loaders[arch].load(activation_spec(kind, arch, gated=gated)))


def exactly(x: Tensor, kind: str) -> Tensor:
    """In fp64, and without the cancellation by which torch's fp64 loses the lower tail of both GELUs."""
    x = x.double()
    if ACTIVATIONS[kind] is ACTIVATIONS["gelu"]:
        return x / 2 * torch.special.erfc(-x / 2**0.5)
    if ACTIVATIONS[kind] is ACTIVATIONS["gelu_new"]:
        return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return activate(x, kind)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.isnan(), expected.isnan())
    finite = expected.isfinite()
    assert torch.equal(found[~finite].nan_to_num(0), expected[~finite].float().nan_to_num(0))
    difference = (found.double() - expected)[finite].abs()
    allowed = TOLERANCE * expected[finite].abs() + 1e-35
    assert (difference <= allowed).all(), float((difference / allowed).max())


@pytest.mark.parametrize(("arch", "kind", "gated"), CASES)
def test_over_the_whole_range(loaders: Kernels, arch: str, kind: str, gated: bool) -> None:
    sizes = torch.arange(0, 0x7F800001, 2**23 // 257, dtype=torch.int32).view(torch.float32)
    x = torch.cat([sizes, -sizes, torch.linspace(-100, 100, 100_003), torch.tensor([torch.inf, torch.nan])])
    given = torch.cat([x, torch.ones_like(x)]) if gated else x
    found = load(loaders, arch, kind, gated)(given.unsqueeze(0))[0]
    expected = exactly(x, kind)
    assert_close(found, expected.where(expected.abs() <= torch.finfo(torch.float32).max, expected.sign() * torch.inf))


@pytest.mark.parametrize(("arch", "kind", "gated"), CASES)
def test_drawn_shapes(loaders: Kernels, arch: str, kind: str, gated: bool) -> None:
    kernel = load(loaders, arch, kind, gated)
    rng = random.Random(f"{kind} {gated}")
    for seed in range(20):
        num_rows, num_features = rng.choice((0, 1, 2, 7, 8, 9, rng.randint(1, 200))), rng.randint(1, 130)
        width = num_features * (2 if gated else 1)
        x = torch.randn(num_rows, width + 3, generator=torch.Generator().manual_seed(seed))[:, :width]
        found = kernel(x)
        assert found.shape == (num_rows, num_features)
        expected = activate_and_multiply(x, kind) if gated else activate(x, kind)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=1e-6)
        gate = exactly(x[:, :num_features], kind)
        assert_close(found, gate * x[:, num_features:].double() if gated else gate)


@pytest.mark.parametrize(("arch", "kind", "gated"), CASES)
def test_nothing_beside_its_rows_is_read_or_written(loaders: Kernels, arch: str, kind: str, gated: bool) -> None:
    """The memory behind a row has no effect; a row is the same in any batch."""
    kernel, width = load(loaders, arch, kind, gated), 37 * (2 if gated else 1)
    framed = torch.full((11, width + 20), torch.nan)
    x = torch.randn(11, width, generator=torch.Generator().manual_seed(1))
    framed[:, :width] = x
    together = kernel(framed[:, :width])
    assert torch.equal(together, torch.cat([kernel(x[row : row + 1]) for row in range(11)]))
    out = torch.full((13, 37), 5.0)
    kernel._kernel((), x, out[1:12], 11, 37, width)
    assert torch.equal(out[1:12], together)
    assert (out[[0, 12]] == 5).all()
