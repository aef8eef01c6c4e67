"""Linear layers in C++ against their torch reference: every format, odd shapes, and the same bits in any batch."""

from __future__ import annotations

import platform
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastgen.compile.build.cpp import CppBuilder, CppKernel
from fastgen.compile.host.thread_pool import ThreadPool
from fastgen.compile.ops.linear.cpp import LinearKernel, linear_spec
from fastgen.compile.render import render
from fastgen.compile.weights.formats import quantize_channels, quantize_groups
from fastgen.compile.weights.packed import PackedWeight, WeightFormat
from fastgen.errors import InvalidArgumentError
from tests.compile.linear_cases import (
    ALL,
    FLOATS,
    FORMATS,
    HERE,
    KERNELS,
    MAX_ROWS,
    Layer,
    draw,
    sanitize,
)
from tests.fast import cases


@pytest.fixture
def make(request: pytest.FixtureRequest, pool: ThreadPool) -> Layer:
    pool.resize(2)
    return Layer(*request.param)


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
        if case % 3 == 0:
            bias = None
        make.assert_right(make.run(x, make.pack(weight, bias)), x, weight, bias, where)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere weights are always read in several streams")
def test_the_number_of_streams_does_not_show(pool: ThreadPool, tmp_path: Path) -> None:
    """A kernel reads weights as is best on this machine; one that is set to the contrary gives the same bits."""
    pool.resize(2)
    here, spec = Layer(HERE, "int8"), linear_spec("int8", HERE)
    source, asks = render(spec), '__builtin_cpu_is("amd")'
    assert source.count(asks) == 1
    (path := tmp_path / f"{spec.name}.cpp").write_text(source.replace(asks, f"!{asks}"))
    CppBuilder(HERE).build(spec, path)
    elsewhere = LinearKernel(CppKernel(spec, path, []), MAX_ROWS, 2100)
    x, weight, bias = draw(5, 13, 300, 2100)
    packed = here.pack(weight, bias)
    for num_rows in range(1, 14):
        out = torch.full((num_rows, 300), torch.nan)
        elsewhere(x[:num_rows], packed, out)
        assert torch.equal(out, here.run(x[:num_rows], packed)), num_rows


@pytest.mark.parametrize("weight_format", cases(FORMATS, fast=("fp32", "bf16_dot", "int8")))
def test_a_layer_of_many_outputs(pool: ThreadPool, weight_format: WeightFormat) -> None:
    """On one thread there are more outputs for each chunk than the buffer of sums has room for: such as a head's."""
    pool.resize(1)
    layer = Layer(HERE, weight_format)
    x, weight, bias = draw(9, 25, 9000, 1100)
    packed = layer.pack(weight, bias)
    for num_rows in (1, 25):
        layer.assert_right(layer.run(x[:num_rows], packed), x[:num_rows], weight, bias, f"{num_rows} rows")


@by_kernel
def test_a_row_has_the_same_bits_in_any_batch(make: Layer, pool: ThreadPool) -> None:
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
def test_rows_whose_distance_is_a_multiple_of_a_page_have_the_same_bits(make: Layer) -> None:
    """Rows that would share sets of the first cache are copied together."""
    for in_features in (1024, 1100):
        x, weight, bias = draw(7, 61, 45, in_features)
        packed, aligned = make.pack(weight, bias), torch.full((61, 2048), torch.nan)
        aligned[:, :in_features] = x
        for num_rows in (1, 12, 13, 61):
            out = torch.full((num_rows, 45), torch.nan)
            make.kernel(aligned[:num_rows, :in_features], packed, out)
            apart = torch.cat([x, torch.full((61, 3), torch.nan)], dim=1)[:num_rows, :in_features]
            assert torch.equal(out, make.run(apart, packed)), (in_features, num_rows)


@by_kernel
def test_heads_have_weights_of_their_own(make: Layer, pool: ThreadPool) -> None:
    """Each head gets the bits that it would alone, with its part of rows that lie apart."""
    for case, (num_rows, num_heads, out_features, in_features) in enumerate(
        [(1, 1, 33, 65), (1, 7, 40, 31), (2, 3, 1, 600), (13, 3, 70, 130), (40, 5, 17, 9)]
    ):
        drawn = [draw(100 * case + head, num_rows, out_features, in_features) for head in range(num_heads)]
        packed = make.kernel.pack(out_features, in_features, num_groups=num_heads)
        for head, (_, weight, bias) in enumerate(drawn):
            packed.group(head).write(0, weight)
            packed.group(head).bias[:out_features] = bias
        x = torch.full((num_rows, num_heads, in_features + 5), torch.nan)
        x[..., 2:-3] = torch.stack([rows for rows, _, _ in drawn], dim=1)
        for num_threads in (1, 3):
            pool.resize(num_threads)
            out = torch.full((num_rows, num_heads, out_features + 4), 7.0)
            make.kernel(x[..., 2:-3], packed, out[..., 1:-3])
            for head, (rows, weight, bias) in enumerate(drawn):
                assert torch.equal(out[:, head, 1:-3], make.run(rows, make.pack(weight, bias))), (case, head)
            assert (out[..., :1] == 7).all() and (out[..., -3:] == 7).all()  # noqa: PT018


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
        found = quantize[weight_format](weight)
        grouped = found.codes.view(*found.scale.shape, -1)
        expected = (grouped * found.scale[:, :, None]).flatten(1)[:, :95]
    else:
        expected = weight.to(FLOATS[weight_format]).float()
    assert torch.equal(packed.rows(torch.arange(77)), expected)


def test_packing_holds_no_second_copy() -> None:
    """Written from bf16 a megabyte at a time, the packed weight is all that grows."""
    code = """
import re, torch
from pathlib import Path
from fastgen.compile.weights.packed import PackedWeight
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
    layer, weight = Layer(HERE, "fp32"), torch.ones(8, 16)
    packed = layer.pack(weight)
    prepared = [Layer(HERE, each) for each in ("int8", "bf16_dot") if each in FORMATS]
    heads = layer.kernel.pack(8, 16, num_groups=2)
    x, out = torch.ones(3, 16), torch.full((3, 8), 5.0)
    many, many_out = torch.ones(MAX_ROWS + 1, 16), torch.ones(MAX_ROWS + 1, 8)
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: layer.kernel(x[:, :15], packed, out), ValueError, "expected"),
        (lambda: layer.kernel(x, packed, out[:2]), ValueError, "expected"),
        (lambda: layer.kernel(torch.ones(16, 3).T, packed, out), ValueError, "contiguous"),
        (lambda: layer.kernel(x, heads, out), ValueError, "expected"),
        (lambda: layer.kernel(x.view(1, 3, 16), heads, out.view(1, 3, 8)), ValueError, "expected"),
        *((partial(each.kernel, many, each.pack(weight), many_out), ValueError, "at most") for each in prepared),
        (lambda: layer.kernel(x, PackedWeight("bf16", 8, 16, HERE), out), ValueError, "weights in bf16"),
        (lambda: packed.write(6, torch.ones(3, 16)), ValueError, "do not fit"),
        (lambda: packed.write(0, torch.ones(3, 15)), ValueError, "do not fit"),
        (lambda: packed.write(-1, torch.ones(3, 16)), ValueError, "do not fit"),
        (lambda: PackedWeight("fp8", 8, 16, HERE), InvalidArgumentError, "weight format 'fp8'"),  # type: ignore[arg-type]
        (lambda: PackedWeight("fp32", 0, 16, HERE), InvalidArgumentError, "0 x 16"),
        (lambda: PackedWeight("int8", 1, 200_000, HERE), InvalidArgumentError, "200000"),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()
    assert (out == 5).all()
    assert torch.equal(packed.rows(torch.arange(8)), torch.ones(8, 16))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "weight_format"), ALL)
def test_sanitizers_find_nothing(arch: str, weight_format: WeightFormat, tmp_path: Path) -> None:
    sanitize(linear_spec(weight_format, arch), tmp_path)


@pytest.mark.parametrize(
    ("weight", "arch", "is_taken"),
    [
        ("fp32", "avx512bf16", False),
        ("fp32", "amx", False),
        ("fp16", "amx", False),
        ("int8_weight_only", "amx", False),
        ("bf16", "avx512", False),
        ("bf16", "amx", True),
        ("bf16_dot", "avx512bf16", True),
        ("int8", "avx2", True),
        ("int4", "portable", True),
    ],
)
def test_a_workspace_is_taken_where_rows_are_prepared(weight: WeightFormat, arch: str, is_taken: bool) -> None:
    spec = linear_spec(weight, arch)
    assert ("workspace" in [argument.name for argument in spec.arguments]) is is_taken
    kernel: Any = SimpleNamespace(spec=spec)
    assert bool(LinearKernel(kernel, 3, 64).workspace.numel()) is is_taken
