"""The vector functions that C++ kernels are written with, over the whole range of fp32."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch
from fastgen.compile.host import device
from fastgen.compile.render import inline_headers
from tests.compile.arches import in_each_width

ARCHES = CPP_ARCHES[CPP_ARCHES.index(cpp_arch(device.current("cpu"))) :]
LANES = {"amx": 16, "avx512bf16": 16, "avx512vnni": 16, "avx512": 16, "avx2": 8, "portable": 4}
FUNCTIONS = {"exp": "exp(v)", "tanh": "tanh(v)", "erfc": "erfc_positive(v, v * v)"}
ULP = 2.0**-24
# Below it results are 0 or lose digits.
TINIEST = 2.0**-126


def build(arch: str, directory: Path) -> ctypes.CDLL:
    """A library of ``void exp_of(const float* x, float* y, int64_t n)`` and so on, of sums and of maxima."""
    functions = "".join(
        f'extern "C" void {name}_of(const float* x, float* y, int64_t n) {{'
        f" for (int64_t i = 0; i < n; i += LANES) {{"
        f" const f32v v = load_some(x + i, n - i); store_some(y + i, {call}, n - i); }} }}\n"
        for name, call in FUNCTIONS.items()
    ) + "".join(
        f'extern "C" float {name}_lanes(const float* x) {{ return {name}_of(load<f32v>(x)); }}\n'
        for name in ("sum", "largest")
    )
    source = directory / "functions.cpp"
    header = inline_headers(f'#define FASTGEN_LANES {LANES[arch]}\n#include "vector_math.h"\n')
    source.write_text(header + functions)
    builder = CppBuilder(arch)
    subprocess.run([builder.compiler, *builder.flags, "-o", str(directory / "functions.so"), str(source)], check=True)
    return ctypes.CDLL(str(directory / "functions.so"))


@pytest.fixture(scope="module", params=in_each_width(ARCHES))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(request.param, tmp_path_factory.mktemp(request.param))


def apply(library: ctypes.CDLL, name: str, x: Tensor) -> Tensor:
    y = torch.full_like(x, 7.0)
    getattr(library, f"{name}_of")(*(ctypes.c_void_p(each.data_ptr()) for each in (x, y)), ctypes.c_int64(len(x)))
    return y


def all_magnitudes() -> Tensor:
    """Every exponent, denormals and infinities with it, with 4099 mantissas, both signs; and densely what is common."""
    bits = torch.arange(0, 0x7F800001, 2**23 // 4099, dtype=torch.int32)
    sizes = torch.cat([bits.view(torch.float32), torch.linspace(0, 105, 2_000_003), torch.tensor([torch.inf])])
    return torch.cat([sizes, -sizes])


def worst_error(found: Tensor, expected: Tensor) -> float:
    """Relative, in halves of a unit in the last place; of results that are not tiny."""
    finite = expected.abs().float().isfinite() & (expected.abs() >= TINIEST)
    assert torch.equal(found[~finite].isinf(), expected[~finite].float().isinf())
    assert (found[~finite & found.isfinite()].abs() <= TINIEST).all()
    return float(((found.double() - expected) / expected)[finite].abs().max() / ULP)


def test_exp(library: ctypes.CDLL) -> None:
    x = all_magnitudes()
    assert worst_error(apply(library, "exp", x), x.double().exp()) <= 4
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 88.72283, 88.7229, -87.33654, -87.34, -104.0])
    found = apply(library, "exp", edges)
    assert found[:4].tolist() == [1, 1, torch.inf, 0]
    assert found[4].isfinite()
    assert found[6] > 0
    assert found[[5, 7, 8]].tolist() == [torch.inf, 0, 0]


def test_tanh(library: ctypes.CDLL) -> None:
    x = all_magnitudes()
    found = apply(library, "tanh", x)
    assert worst_error(found, x.double().tanh()) <= 4
    assert torch.equal(found, -apply(library, "tanh", -x))
    assert apply(library, "tanh", torch.tensor([torch.inf, -torch.inf])).tolist() == [1, -1]
    assert found.abs().max() <= 1


def test_erfc(library: ctypes.CDLL) -> None:
    """The formula is good to 1.2e-7; rounding the exponent, which reaches 87, adds to that where erfc is minute."""
    x = all_magnitudes().abs()
    found, expected = apply(library, "erfc", x), torch.special.erfc(x.double())
    usual = x <= 2
    assert worst_error(found[usual], expected[usual]) <= 10
    assert worst_error(found, expected) <= 150
    assert apply(library, "erfc", torch.tensor([0.0, torch.inf]))[1] == 0


def test_what_is_no_number_stays_none(library: ctypes.CDLL) -> None:
    x = torch.tensor([torch.nan, 1.0, -torch.nan, 2.0, 3.0])
    for name in FUNCTIONS:
        assert apply(library, name, x).isnan().tolist() == [True, False, True, False, False]


def test_a_number_takes_the_same_way_at_every_place(library: ctypes.CDLL) -> None:
    x = torch.randn(53, generator=torch.Generator().manual_seed(0)) * 4
    for name in FUNCTIONS:
        alone = torch.cat([apply(library, name, x[i : i + 1].clone()) for i in range(len(x))])
        for start in range(20):
            assert torch.equal(
                apply(library, name, x[start:].clone()).view(torch.int32), alone[start:].view(torch.int32)
            )


def test_sums_and_maxima_over_lanes(library: ctypes.CDLL) -> None:
    """Exactly, of whole numbers; and what is no number is not lost in a sum."""
    library.sum_lanes.restype = library.largest_lanes.restype = ctypes.c_float
    for seed in range(50):
        x = torch.randint(-1000, 1000, (16,), generator=torch.Generator().manual_seed(seed)).float()
        address = ctypes.c_void_p(x.data_ptr())
        lanes = next(n for n in (4, 8, 16) if library.sum_lanes(address) == x[:n].sum() or n == 16)
        assert library.sum_lanes(address) == x[:lanes].sum()
        assert library.largest_lanes(address) == x[:lanes].max()
