"""Linear layers in C++ against their torch reference: every format, odd shapes, and the same bits in any company."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from fastgen.compile import device
from fastgen.compile.build_cpp import CPP_ARCHES, CppBuilder, cpp_arch
from fastgen.compile.loader import KernelLoader
from fastgen.compile.ops.linear import LinearKernel, linear, linear_spec
from fastgen.compile.ops.packed_weight import PackedWeight, WeightFormat
from fastgen.compile.ops.quantization import (
    linear_int4,
    linear_int8,
    linear_int8_weight_only,
    quantize_channels,
    quantize_groups,
)
from fastgen.compile.render import render
from fastgen.compile.thread_pool import ThreadPool, load_thread_pool, thread_pool_spec
from fastgen.errors import InvalidArgumentError

HERE = cpp_arch(device.current("cpu"))
FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ARCHES = CPP_ARCHES[CPP_ARCHES.index(HERE) :]
"""Those whose instructions this machine has."""
ONCE = [(HERE, each) for each in FORMATS] + [
    (arch, each) for arch in ARCHES[1:] if arch != "avx512" for each in ("fp32", "int8")
]
KERNELS = [pytest.param((arch, each), id=f"{arch}-{each}") for arch, each in ONCE] + [
    pytest.param((arch, each), id=f"{arch}-{each}", marks=pytest.mark.slow)
    for arch in ARCHES
    for each in FORMATS
    if (arch, each) not in ONCE
]
TOLERANCE = {"int8": 1e-7, "int4": 1e-6}
"""Of the sum of the products' magnitudes. In int8 only the last three operations are rounded, in both alike."""
MAX_ROWS, MAX_IN = 300, 5000


@cache
def loader(arch: str) -> KernelLoader:
    loader = KernelLoader(CppBuilder(arch))
    load_thread_pool(loader)
    return loader


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    pool = load_thread_pool(loader(HERE))
    before = pool.num_threads
    yield pool
    pool.resize(before)


@pytest.fixture
def make(request: pytest.FixtureRequest, pool: ThreadPool) -> Layer:
    pool.resize(2)
    return Layer(*request.param)


class Layer:
    """Kernels of one format for one instruction set, and the arithmetic that they stand for."""

    def __init__(self, arch: str, weight_format: WeightFormat):
        self.arch, self.format = arch, weight_format
        self.kernel = LinearKernel(loader(arch).load(linear_spec(weight_format, arch)), MAX_ROWS, MAX_IN)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        packed = PackedWeight(self.format, *weight.shape, self.arch)
        packed.write(0, weight)
        if bias is not None:
            packed.write_bias(0, bias)
        return packed

    def run(self, x: Tensor, packed: PackedWeight) -> Tensor:
        out = torch.full((len(x), packed.out_features), torch.nan)
        self.kernel(x, packed, out)
        return out

    def reference(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.format == "int8":
            return linear_int8(x, quantize_channels(weight), bias)
        if self.format == "int4":
            return linear_int4(x, quantize_groups(weight), bias)
        if self.format == "int8_weight_only":
            return linear_int8_weight_only(x, quantize_channels(weight), bias)
        return linear(x.double(), weight.to(FLOATS[self.format]).double(), None if bias is None else bias.double())

    def assert_right(self, x: Tensor, weight: Tensor, bias: Tensor | None, where: str) -> None:
        found, expected = self.run(x, self.pack(weight, bias)).double(), self.reference(x, weight, bias).double()
        products = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.abs())
        error = ((found - expected).abs() / products.clamp(min=1e-30)).max().item()
        assert error <= TOLERANCE.get(self.format, 1e-6), (where, error)


def draw(seed: int, num_rows: int, out_features: int, in_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and weights of very different sizes, so that a value in another's place shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, in_features, generator=generator)
    x *= torch.logspace(-2, 2, num_rows)[:, None]
    weight = torch.randn(out_features, in_features, generator=generator)
    weight *= torch.logspace(-2, 1, out_features)[torch.randperm(out_features, generator=generator), None]
    return x, weight, torch.randn(out_features, generator=generator)


by_kernel = pytest.mark.parametrize("make", KERNELS, indirect=True)


@by_kernel
def test_drawn_shapes(make: Layer) -> None:
    seed = 7
    rng = random.Random(seed)
    sizes = [1, 2, 3, 31, 32, 33, 63, 64, 65, 100, 127, 257, 511, 513]
    for case in range(40):
        num_rows = rng.choice([1, 2, 3, 4, 5, 8, 11, 12, 13, 24, 25, 64, 97, 150])
        out_features, in_features = rng.choice(sizes), rng.choice([*sizes, 2047, 2081, 4500])
        x, weight, bias = draw(seed * 1000 + case, num_rows, out_features, in_features)
        where = f"seed {seed}, case {case}: {num_rows} rows, {out_features} x {in_features}"
        make.assert_right(x, weight, bias if case % 3 else None, where)


@by_kernel
def test_a_row_has_the_same_bits_in_any_company(make: Layer, pool: ThreadPool) -> None:
    """Alone, among any others, at any place, on any number of threads, in pieces as small and as large as there are."""
    x, weight, bias = draw(3, 130, 75, 2100)
    packed = make.pack(weight, bias)
    pool.resize(1)
    alone = torch.cat([make.run(row[None], packed) for row in x])
    order = torch.randperm(130, generator=torch.Generator().manual_seed(4))
    for num_threads in (1, 2, 3):
        pool.resize(num_threads)
        for num_rows in range(1, 131) if num_threads == 2 else (1, 5, 12, 13, 24, 25, 60, 130):
            assert torch.equal(make.run(x[:num_rows], packed), alone[:num_rows]), (num_threads, num_rows)
        assert torch.equal(make.run(x[order], packed), alone[order]), num_threads
        assert torch.equal(make.run(x[40:], packed), alone[40:]), num_threads


@by_kernel
def test_an_output_has_the_same_bits_in_any_layer(make: Layer, pool: ThreadPool) -> None:
    """Stacked with others, at any place of a panel: so tensor-parallel shards and fused projections agree."""
    x, weight, _ = draw(5, 14, 200, 333)
    together = make.run(x, make.pack(weight))
    for start, end in ((0, 1), (7, 8), (31, 65), (100, 200)):
        assert torch.equal(make.run(x, make.pack(weight[start:end])), together[:, start:end]), (start, end)


@by_kernel
def test_rows_may_lie_anywhere(make: Layer) -> None:
    """Rows apart, at addresses that are multiples of 4 alone, read and written; what lies between stays."""
    x, weight, bias = draw(6, 30, 45, 70)
    packed = make.pack(weight, bias)
    expected = make.run(x, packed)
    wide_x, wide_out = torch.full((30, 91), torch.nan), torch.full((30, 60), 7.0)
    wide_x[:, 13:83] = x
    make.kernel(wide_x[:, 13:83], packed, wide_out[:, 3:48])
    assert torch.equal(wide_out[:, 3:48], expected)
    assert (wide_out[:, :3] == 7).all() and (wide_out[:, 48:] == 7).all()  # noqa: PT018


@by_kernel
def test_what_is_not_finite_stays_with_its_row(make: Layer) -> None:
    x, weight, _ = draw(8, 5, 40, 100)
    packed = make.pack(weight)
    expected = make.run(x, packed)
    x[1, 17], x[3, 60] = torch.nan, torch.inf
    found = make.run(x, packed)
    assert torch.equal(found[[0, 2, 4]], expected[[0, 2, 4]])
    assert not found[[1, 3]].isfinite().any()


@by_kernel
def test_zeros_and_the_smallest_numbers(make: Layer) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(9))
    weight[3], weight[5] = 0, 1e-20
    packed = make.pack(weight, torch.ones(40))
    assert (make.run(torch.zeros(3, 64), packed) == 1).all()
    assert (make.run(torch.full((3, 64), 1e-40), packed) - 1).abs().max() < 1e-30
    assert make.run(torch.full((3, 64), 1.0), packed)[:, 3].tolist() == [1.0] * 3


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("arch", [HERE, "portable"])
def test_a_weight_may_be_written_in_any_pieces(arch: str, weight_format: WeightFormat) -> None:
    rng = random.Random(11)
    for case in range(10):
        out_features, in_features = rng.randint(1, 150), rng.choice([1, 31, 32, 70, 129])
        weight = draw(case, 1, out_features, in_features)[1]
        whole = PackedWeight(weight_format, out_features, in_features, arch)
        whole.write(0, weight)
        cuts = [0, *sorted(rng.choices(range(out_features + 1), k=rng.randint(0, 5))), out_features]
        pieces = [(start, weight[start:end]) for start, end in pairwise(cuts)]
        rng.shuffle(pieces)
        packed = PackedWeight(weight_format, out_features, in_features, arch)
        for start, piece in pieces:
            packed.write(start, piece)
        which = torch.randint(out_features, (9,), generator=torch.Generator().manual_seed(case))
        assert torch.equal(packed.rows(which), whole.rows(which)), (case, cuts)
        assert torch.equal(packed.panels, whole.panels), (case, cuts)
        assert torch.equal(packed.scale, whole.scale), (case, cuts)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_of_a_packed_weight_are_its_values(weight_format: WeightFormat) -> None:
    weight = draw(12, 1, 77, 95)[1]
    packed = PackedWeight(weight_format, 77, 95, HERE)
    packed.write(0, weight)
    quantize = {"int4": quantize_groups, "int8": quantize_channels, "int8_weight_only": quantize_channels}
    if weight_format in quantize:
        expected = quantize[weight_format](weight).dequantize()[:, :95]
    else:
        expected = weight.to(FLOATS[weight_format]).float()
    assert torch.equal(packed.rows(torch.arange(77)), expected)


def test_packing_holds_no_second_copy() -> None:
    """Written from bf16 a megabyte at a time, the packed weight is all that grows."""
    code = """
import re, torch
from pathlib import Path
from fastgen.compile.ops.packed_weight import PackedWeight
def memory(key):
    return int(re.search(key + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
rows = torch.ones(256, 4096, dtype=torch.bfloat16)
PackedWeight("int8", 256, 4096, "portable").write(0, rows)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
packed = PackedWeight("int8", 16384, 4096, "portable")
for start in range(0, 16384, 256):
    packed.write(start, rows)
print(memory("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 60 << 20 <= int(done.stdout) <= 100 << 20, done.stdout  # of weights, 64 MiB


def test_what_does_not_fit_is_refused(pool: ThreadPool) -> None:
    layer = Layer(HERE, "fp32")
    packed = layer.pack(torch.ones(8, 16))
    x, out = torch.ones(3, 16), torch.full((3, 8), 5.0)
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: layer.kernel(x[:, :15], packed, out), ValueError, "expected"),
        (lambda: layer.kernel(x, packed, out[:2]), ValueError, "expected"),
        (lambda: layer.kernel(torch.ones(16, 3).T, packed, out), ValueError, "contiguous"),
        (
            lambda: layer.kernel(torch.ones(MAX_ROWS + 1, 16), packed, torch.ones(MAX_ROWS + 1, 8)),
            ValueError,
            "at most",
        ),
        (lambda: layer.kernel(x, PackedWeight("bf16", 8, 16, HERE), out), ValueError, "weights in bf16"),
        (lambda: packed.write(6, torch.ones(3, 16)), ValueError, "do not fit"),
        (lambda: packed.write(0, torch.ones(3, 15)), ValueError, "do not fit"),
        (lambda: packed.write(-1, torch.ones(3, 16)), ValueError, "do not fit"),
        (lambda: packed.write_bias(7, torch.ones(2)), ValueError, "8 outputs"),
        (lambda: PackedWeight("fp8", 8, 16, HERE), InvalidArgumentError, "weight format 'fp8'"),  # type: ignore[arg-type]
        (lambda: PackedWeight("fp32", 0, 16, HERE), InvalidArgumentError, "0 x 16"),
        (lambda: PackedWeight("int8", 1, 200_000, HERE), InvalidArgumentError, "200000"),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()
    assert (out == 5).all()
    assert torch.equal(packed.rows(torch.arange(8)), torch.ones(8, 16))


SANITIZED = """
#include <cstdlib>
#include <vector>
template <class T>
static T* exactly(size_t count) {  // so that one past the end is found
    T* memory = static_cast<T*>(std::aligned_alloc(alignof(T), count * sizeof(T)));
    for (size_t i = 0; i < count; ++i) memory[i] = T(i % 7) - T(3);
    return memory;
}
int main() {
    fastgen_set_num_threads(3);
    for (int64_t num_rows : {1, 2, 5, 12, 13, 25, 101}) {
        for (int64_t K : {1, 33, 130, 2100}) {
            for (int64_t N : {1, 16, 33, 200}) {
                const int64_t num_panels = (N + PANEL - 1) / PANEL, num_steps = (K + K_STEP - 1) / K_STEP;
                float *x = exactly<float>(num_rows * K), *y = exactly<float>(num_rows * N);
                uint8_t* weights = exactly<uint8_t>(num_panels * num_steps * PANEL_BYTES_PER_STEP);
                float *scale = exactly<float>(num_panels * PANEL), *bias = exactly<float>(num_panels * PANEL);
                uint8_t* workspace = exactly<uint8_t>(num_rows * ((K / 32 + 1) * 40 + 128));
                CALL;
                free(x), free(y), free(weights), free(scale), free(bias), free(workspace);
            }
        }
    }
    std::puts("done");
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("arch", ARCHES)
def test_sanitizers_find_nothing(arch: str, weight_format: WeightFormat, tmp_path: Path) -> None:
    spec = linear_spec(weight_format, arch)
    workspace = "workspace, " if weight_format in ("int8", "int4") else ""
    call = f"{spec.name}(x, K, num_rows, {workspace}weights, scale, bias, y, N, K, N)"
    (tmp_path / "pool.cpp").write_text(render(thread_pool_spec()))
    (tmp_path / "main.cpp").write_text(
        '#include <cstdio>\n#include <type_traits>\nextern "C" int fastgen_set_num_threads(int);\n'
        + render(spec)
        + SANITIZED.replace("CALL", call)
    )
    flags = [flag for flag in CppBuilder(arch).flags if flag != "-shared"]
    checks = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["g++", *flags, *checks, "main.cpp", "pool.cpp", "-o", "main", "-pthread"], cwd=tmp_path, check=True)
    done = subprocess.run(["./main"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "done", "")
