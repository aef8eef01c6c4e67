"""The matrix unit's instructions as they are emulated, against a definition of their own, and as they are assembled."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.ops.attention.cpp import attention_spec
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.linear.cpp import LinearKernel, linear_spec
from fastgen.compile.render import inline_headers, render
from fastgen.compile.weights.packed import TILED, WeightFormat
from tests.compile import tile_arithmetic as tile
from tests.compile.arches import EMULATED, HERE, loader
from tests.compile.linear_cases import Layer, draw

HAS_TILES = pytest.mark.skipif("amx" not in (HERE, *EMULATED), reason="tiles are used beside AVX-512 with bf16")

SOURCE = """
#define FASTGEN_LANES 16
#define FASTGEN_HAS_DOT4 1
#define FASTGEN_HAS_BF16_DOT 1
#include "tiles.h"
template <class Dot>
static void run(int rows, int columns, int depth, const void* a, const void* b, void* sums, Dot dot) {
    TileShapes shapes;
    shapes.set(0, rows, 4 * columns);
    shapes.set(3, rows, 4 * depth);
    shapes.set(7, depth, 4 * columns);
    const TilesInUse in_use(shapes);
    load_tile<0>(sums, 4 * columns);
    load_tile<3>(a, 4 * depth);
    stream_tile<7>(b, 4 * columns);
    dot();
    store_tile<0>(sums, 4 * columns);
}
extern "C" void floats(int rows, int columns, int depth, const void* a, const void* b, void* sums) {
    run(rows, columns, depth, a, b, sums, [] { dot_bf16<0, 3, 7>(); });
}
extern "C" void bytes(int rows, int columns, int depth, const void* a, const void* b, void* sums) {
    run(rows, columns, depth, a, b, sums, [] { dot_i8_u8<0, 3, 7>(); });
}
extern "C" void without_shapes() { zero_tile<0>(); }
extern "C" void of_shape(int rows, int row_bytes) {
    TileShapes shapes;
    shapes.set(2, rows, row_bytes);
    const TilesInUse in_use(shapes);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiles")
    (directory / "tiles.cpp").write_text(inline_headers(SOURCE))
    builder = CppBuilder("amx")
    subprocess.run([builder.compiler, *builder.flags, "tiles.cpp", "-o", "tiles.so"], cwd=directory, check=True)
    return directory / "tiles.so"


def by_groups(b: NDArray, size: int) -> NDArray:
    """Returns ``b [K, N]`` as the instructions read it: each row has ``size`` numbers of each column."""
    depth, columns = b.shape
    return np.ascontiguousarray(b.reshape(depth // size, size, columns).transpose(0, 2, 1))


def multiplied(library: Path, name: str, a: NDArray, b: NDArray, sums: NDArray) -> NDArray:
    size = 4 // a.itemsize
    result, grouped = sums.copy(), by_groups(b, size)
    addresses = (ctypes.c_void_p(each.ctypes.data) for each in (np.ascontiguousarray(a), grouped, result))
    getattr(ctypes.CDLL(str(library)), name)(*result.shape, len(b) // size, *addresses)
    return result


def drawn_bf16(rng: np.random.Generator, kind: str, *shape: int) -> NDArray[np.uint16]:
    if kind == "any bits":
        return rng.integers(0, 2**16, shape, dtype=np.uint16)
    numbers = rng.standard_normal(shape)
    if kind == "wide":
        numbers *= 2.0 ** rng.integers(-20, 21, shape)
    if kind == "near the smallest":  # of products: their exponents add up to about -126
        numbers *= 2.0 ** rng.integers(-66, -60, shape)
    if kind == "denormal":
        numbers *= 2.0 ** rng.integers(-132, -120, shape)
    return tile.rounded(numbers.astype(np.float32)) if kind != "denormal" else upper_half(numbers)


def upper_half(numbers: NDArray) -> NDArray[np.uint16]:
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@HAS_TILES
@pytest.mark.parametrize("kind", ["ordinary", "wide", "near the smallest", "denormal", "any bits"])
def test_products_of_bf16(library: Path, kind: str) -> None:
    rng = np.random.default_rng(3)
    for case in range(60):
        rows, columns, depth = (int(each) for each in rng.integers(1, 17, 3)) if case else (16, 16, 16)
        a, b = drawn_bf16(rng, kind, rows, 2 * depth), drawn_bf16(rng, kind, 2 * depth, columns)
        sums = rng.standard_normal((rows, columns)).astype(np.float32)
        if kind in ("near the smallest", "denormal"):
            sums *= np.float32(2.0) ** rng.integers(-130, -122, sums.shape).astype(np.float32)
        if case % 3 == 0:
            sums[:] = 0
        found, expected = multiplied(library, "floats", a, b, sums), tile.dot_bf16(sums, a, b)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), f"{kind}, case {case}")
        same = (found.view(np.int32) == expected.view(np.int32)) | np.isnan(found)
        assert same.all(), (kind, case, found[~same][:4], expected[~same][:4])


@HAS_TILES
def test_products_of_bytes(library: Path) -> None:
    rng = np.random.default_rng(4)
    for case in range(40):
        rows, columns, depth = (int(each) for each in rng.integers(1, 17, 3)) if case else (16, 16, 16)
        a = rng.integers(-128, 128, (rows, 4 * depth), dtype=np.int8)
        b = rng.integers(0, 256, (4 * depth, columns), dtype=np.uint8)
        sums = rng.integers(-(2**31), 2**31, (rows, columns), dtype=np.int32)
        np.testing.assert_array_equal(multiplied(library, "bytes", a, b, sums), tile.dot_bytes(sums, a, b))


@pytest.mark.skipif(not EMULATED, reason="hardware raises a signal instead")
def test_what_the_hardware_would_trap_ends_the_process(library: Path) -> None:
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).without_shapes()"
    done = subprocess.run(["python3", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-6, "AMX would trap: this thread's tiles have no shapes\n")


@pytest.mark.skipif(not EMULATED, reason="hardware raises a signal instead")
@pytest.mark.parametrize(
    ("shape", "is_trapped"),
    [((0, 0), False), ((16, 64), False), ((0, 64), True), ((16, 0), True), ((17, 64), True), ((16, 65), True)],
)
def test_a_shape_that_no_tile_can_have_ends_the_process(
    library: Path, shape: tuple[int, int], is_trapped: bool
) -> None:
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).of_shape{shape}"
    done = subprocess.run(["python3", "-c", code], capture_output=True, text=True, check=False)
    trapped = (-6, "AMX would trap: a tile's shape\n")
    assert (done.returncode, done.stderr) == (trapped if is_trapped else (0, ""))


@HAS_TILES
@pytest.mark.parametrize(
    ("weight_format", "num_rows"),
    [*(("bf16_dot", count) for count in (1, 4, 5, 16, 17, 40)), *(("bf16", count) for count in (1, 2, 3, 17, 40))],
)
def test_a_layer_has_the_bits_of_the_definition(weight_format: WeightFormat, num_rows: int) -> None:
    """By vectors where rows are few, else by tiles: numbers of all sizes, and those that count as zero."""
    generator = torch.Generator().manual_seed(num_rows)
    layer, sizes = (
        Layer("amx", weight_format),
        {"ordinary": (0, 0), "near the smallest": (-66, -60), "tiny": (-80, -50)},
    )
    for kind, (low, high) in sizes.items():
        for out_features, in_features in ((33, 70), (64, 32), (5, 610)):
            x, weight = (torch.randn(n, in_features, generator=generator) for n in (num_rows, out_features))
            for numbers in (x, weight):
                numbers *= 2.0 ** torch.randint(low, high + 1, numbers.shape, generator=generator)
            bias = torch.randn(out_features, generator=generator) * 2.0 ** (2 * low)
            found = layer.run(x, layer.pack(weight, bias)).numpy()
            parts = tile.cut(x.numpy()) if weight_format == "bf16" else [tile.rounded(x.numpy())]
            expected = tile.linear(parts, weight.numpy(), bias.numpy())
            assert (found.view(np.int32) == expected.view(np.int32)).all(), (kind, out_features, in_features)


@HAS_TILES
@pytest.mark.parametrize("in_features", [512, 2048, 4992])
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_rows_in_three_parts_are_as_exact_as_products_in_fp32(in_features: int, spread: float) -> None:
    """Against sums in fp64, beside vectors that widen the same weights and add in fp32: normal and log-normal rows."""
    generator = torch.Generator().manual_seed(in_features)
    x, weight = (torch.randn(count, in_features, generator=generator) for count in (19, 64))
    x *= (spread * torch.randn(x.shape, generator=generator)).exp()
    exact = x.double() @ weight.bfloat16().double().T
    found = {arch: (each := Layer(arch, "bf16")).run(x, each.pack(weight)) for arch in ("amx", "avx512vnni")}
    errors = {arch: float((each - exact).square().mean().sqrt()) for arch, each in found.items()}
    assert errors["amx"] <= 0.7 * errors["avx512vnni"]
    num_additions = 3 * in_features / 32  # to a sum
    assert errors["amx"] < 0.5 * 2.0**-24 * num_additions**0.5 * float(exact.square().mean().sqrt())
    alone = Layer("amx", "bf16")
    assert torch.equal(torch.cat([alone.run(row[None], alone.pack(weight)) for row in x[:3]]), found["amx"][:3])


@HAS_TILES
@pytest.mark.parametrize("num_rows", [1, 20])
def test_the_largest_numbers_and_what_is_not_finite_are_cut_as_in_fp32(num_rows: int) -> None:
    layer, largest = Layer("amx", "bf16"), float(torch.finfo(torch.float32).max)
    quiet_only_below = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32).item()
    weight = torch.zeros(33, 70)
    weight[:, 3], weight[5, 3] = 2.0**-9, -1.0
    packed = layer.pack(weight)
    for number in (largest, -largest, torch.inf, -torch.inf, torch.nan, quiet_only_below):
        x = torch.zeros(num_rows, 70)
        x[-1, 3] = number
        expected = (x[-1, 3:4].double() * weight[:, 3].double()).float()
        found = layer.run(x, packed)[-1]
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), number


@HAS_TILES
@pytest.mark.parametrize("weight_format", TILED)
def test_as_many_rows_as_a_step_has_give_the_bits_of_each_alone(weight_format: WeightFormat) -> None:
    """Over the edges of tiles of rows, of pairs of them, of strips of k, and of blocks of rows."""
    most = 520
    kernel = LinearKernel(loader("amx").load(linear_spec(weight_format, "amx")), most, 1100)
    x, weight, bias = draw(12, most, 70, 1100)
    packed = Layer("amx", weight_format).pack(weight, bias)

    def run(rows: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(rows), 70), torch.nan)
        kernel(rows, packed, out)
        return out

    together = run(x)
    assert torch.equal(torch.cat([run(row[None]) for row in x]), together)
    for num_rows in (*range(2, 50), 63, 64, 65, 96, 97, 128, 129, 255, 256, 257, 511, 512):
        assert torch.equal(run(x[:num_rows]), together[:num_rows]), num_rows
        assert torch.equal(run(x[-num_rows:]), together[-num_rows:]), num_rows


@HAS_TILES
def test_a_block_has_no_more_rows_than_its_sums_have_room_for() -> None:
    """So many rows and outputs that a thread's share alone would make a block of 21 pairs of tiles."""
    most, num_outputs = 1100, 160
    kernel = LinearKernel(loader("amx").load(linear_spec("bf16", "amx")), most, 64)
    x, weight, bias = draw(13, most, num_outputs, 64)
    packed = Layer("amx", "bf16").pack(weight, bias)

    def run(rows: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(rows), num_outputs), torch.nan)
        kernel(rows, packed, out)
        return out

    together = run(x)
    for row in (0, 31, 32, 511, 512, 600, most - 1):
        assert torch.equal(run(x[row : row + 1])[0], together[row]), row


ATTENTION = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="bf16", scale=0.125)
# Operands as assemblers write them: weights, x and sums; of attention keys or values, queries or weights, and sums.
PANELS_OR_ROWS = {"640", "741", "652", "753", "642", "743"}
PRODUCTS = {
    "bf16": (linear_spec("bf16_dot", "amx"), "tdpbf16ps", PANELS_OR_ROWS),
    "bf16 in parts": (linear_spec("bf16", "amx"), "tdpbf16ps", PANELS_OR_ROWS),
    "int8": (linear_spec("int8", "amx", routed=True), "tdpbsud", PANELS_OR_ROWS),
    "int4": (linear_spec("int4", "amx"), "tdpbsud", {"640", "751"}),
    "attention": (attention_spec(ATTENTION, "amx"), "tdpbf16ps", {"640", "741", "652", "753"}),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have other assemblers")
@pytest.mark.parametrize(
    ("name", "compiler"),
    [
        pytest.param(name, compiler, marks=() if is_fast else pytest.mark.slow)
        for name in PRODUCTS
        for compiler in ("g++", "clang++")
        # a product of bytes by one compiler, and one of bf16 by the other
        for is_fast in [name == "int4" if compiler == "g++" else name == "attention"]
    ],
)
def test_the_unit_itself_is_used_without_emulation(
    name: str, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN_EMULATE_AMX", "0")
    spec, dot, products = PRODUCTS[name]
    (tmp_path / "kernel.cpp").write_text(render(spec))
    builder = CppBuilder("amx", shutil.which(compiler) or pytest.skip(f"{compiler} is not installed"))
    flags = [flag for flag in builder.flags if not flag.startswith("-W")]
    command = [builder.compiler, *flags, "-c", "kernel.cpp", "-o", "kernel.o"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    listing = subprocess.run(["objdump", "-d", "kernel.o"], cwd=tmp_path, check=True, capture_output=True, text=True)
    found = re.findall(dot + r" +%tmm(\d),%tmm(\d),%tmm(\d)", listing.stdout)
    assert set(map("".join, found)) == products
    assert re.search(r"ldtilecfg .*\btilerelease\b", listing.stdout, re.DOTALL)
