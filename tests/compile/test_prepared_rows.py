"""Rows that a norm or an activation writes as the linear layer behind it reads them: the bits are the layer's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.thread_pool import ThreadPool
from fastgen.compile.ops.activation.cpp import ActivationKernel, activation_spec
from fastgen.compile.ops.norm.cpp import NormKernel, norm_spec
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.weights.packed import WeightFormat, formats_of
from fastgen.compile.weights.prepared_rows import RowFormat, row_format
from tests.compile.arches import ARCHES, EMULATED, HERE, loader
from tests.compile.linear_cases import Layer, draw

PREPARED = [
    pytest.param((arch, each), id=f"{arch}-{each}", marks=() if arch in (HERE, *EMULATED) else pytest.mark.slow)
    for arch in ARCHES
    for each in formats_of(arch)
    if row_format(each, arch)
]
NUM_OUTPUTS = 45
ROWS = (1, 2, 13, 17, 40)


@pytest.fixture(params=PREPARED)
def layer(request: pytest.FixtureRequest, pool: ThreadPool) -> Layer:
    pool.resize(2)
    return Layer(*request.param)


def format_of(layer: Layer) -> RowFormat:
    rows = row_format(layer.format, layer.arch)
    assert rows is not None
    return rows


def assert_same_products(layer: Layer, plain: Tensor, prepared: Tensor, seed: int) -> None:
    """Asserts that the layer makes the same of rows in fp32 as of those that were prepared."""
    _, weight, bias = draw(seed, 1, NUM_OUTPUTS, plain.shape[1])
    packed = layer.pack(weight, bias)
    assert prepared.dtype == torch.uint8
    assert torch.equal(layer.run(prepared, packed), layer.run(plain, packed))


@pytest.mark.parametrize(
    "features",
    [
        {"kind": "rms", "residual": True},
        {"kind": "layer", "bias": True},
        {"kind": "rms", "offset": 1.0, "residual": True, "scale": 0.22},
    ],
    ids=["rms", "layer", "scaled"],
)
def test_a_norm_writes_what_the_layer_would_have_made_of_it(layer: Layer, features: dict[str, Any]) -> None:
    rows, kernels = format_of(layer), loader(layer.arch)
    for size in (33, 130, 768):
        shape = NormShape(features["kind"], size, "fp32", 1e-5, **{k: v for k, v in features.items() if k != "kind"})
        plain = NormKernel(kernels.load(norm_spec(shape)))
        preparing = NormKernel(kernels.load(norm_spec(shape, rows)), rows)
        x, weight, bias = draw(size, max(ROWS), size, size)
        for num_rows in ROWS:
            found = []
            for kernel in (plain, preparing):
                given, stream = x[:num_rows].contiguous(), 2 * x[:num_rows].flip(1)
                out = kernel.empty_out(given)
                kernel(given, weight[0], bias, out, stream)
                found.append((out, stream))
            (of_plain, of_stream), (prepared, stream) = found
            assert torch.equal(stream, of_stream)
            assert_same_products(layer, of_plain, prepared, size)


@pytest.mark.parametrize(("kind", "gated"), [("silu", True), ("gelu", False)], ids=["gated", "plain"])
def test_an_activation_writes_what_the_layer_would_have_made_of_it(layer: Layer, kind: str, gated: bool) -> None:
    rows, kernels = format_of(layer), loader(layer.arch)
    plain = ActivationKernel(kernels.load(activation_spec(kind, layer.arch, gated=gated)))
    for size in (33, 1100):
        spec = activation_spec(kind, layer.arch, gated=gated, rows=rows, num_features=size)
        preparing = ActivationKernel(kernels.load(spec), rows)
        x, _, _ = draw(size, max(ROWS), 1, 2 * size if gated else size)
        for num_rows in ROWS:
            assert_same_products(layer, plain(x[:num_rows]), preparing(x[:num_rows]), size)


def test_what_is_not_finite_arrives_as_the_layer_would_have_read_it(layer: Layer) -> None:
    rows, size = format_of(layer), 70
    kernels: KernelLoader = loader(layer.arch)
    plain = ActivationKernel(kernels.load(activation_spec("relu", layer.arch, gated=False)))
    spec = activation_spec("relu", layer.arch, gated=False, rows=rows, num_features=size)
    preparing = ActivationKernel(kernels.load(spec), rows)
    packed = layer.pack(draw(3, 1, NUM_OUTPUTS, size)[1])
    for number in (torch.inf, torch.nan, float(torch.finfo(torch.float32).max), 1e-40):
        x = torch.full((20, size), 0.5)
        x[7, 9] = number
        found, expected = (layer.run(kernel(x), packed) for kernel in (preparing, plain))
        assert torch.equal(found.isnan(), expected.isnan()), number
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), number


@pytest.mark.parametrize(("weight_format", "arch"), [("bf16_dot", "avx512bf16"), ("int8", "amx"), ("int4", "avx2")])
def test_rows_share_no_cache_sets_and_tiles_have_room(weight_format: WeightFormat, arch: str) -> None:
    rows = row_format(weight_format, arch)
    assert rows is not None
    for in_features in (1, 31, 64, 1024, 4096):
        room = rows.empty(3, in_features, torch.device("cpu"))
        num_lines, rest = divmod(rows.row_bytes(in_features), 64)
        assert (rest, num_lines % 2) == (0, 1)
        assert room.shape == (3, 64 * num_lines)
        assert room.untyped_storage().nbytes() == (18 if arch == "amx" else 3) * 64 * num_lines


def test_the_bytes_of_rows_are_those_of_their_numbers() -> None:
    """In bf16 a row has two bytes for each feature, or six if it is cut in three. In int8 it has a byte for each and 8
    for the row, in int4 a byte for each and 8 for each group of 32."""
    found = {
        (weight, arch): RowFormat(weight, arch).row_bytes(4096)
        for weight, arch in (("bf16_dot", "avx512bf16"), ("bf16", "amx"), ("int8", "avx2"), ("int4", "portable"))
    }
    assert list(found.values()) == [8192 + 64, 6 * 4096 + 64, 4096 + 64, 128 * 40 + 64]


@pytest.mark.parametrize("weight", ["fp32", "fp16", "bf16", "int8_weight_only"])
def test_formats_that_read_fp32_prepare_no_rows(weight: WeightFormat) -> None:
    assert row_format(weight, "avx512bf16") is None
    assert (row_format(weight, "amx") is None) == (weight != "bf16")


def test_rows_that_are_not_the_layers_are_refused(layer: Layer) -> None:
    rows, packed = format_of(layer), layer.pack(torch.ones(NUM_OUTPUTS, 70))
    out, cpu = torch.empty(3, NUM_OUTPUTS), torch.device("cpu")
    wide = rows.empty(3, 400, cpu)
    for wrong in (wide, wide[:, : rows.row_bytes(70)], rows.empty(4, 70, cpu), rows.empty(3, 70, cpu).flatten()):
        with pytest.raises(ValueError, match="expected"):
            layer.kernel(wrong, packed, out)
    if rows.tiles:
        without_tiles = torch.empty(3, rows.row_bytes(70), dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"prepared rows \(3, \d+\) in \d+ bytes: expected rows of \d+ in \d+"):
            layer.kernel(without_tiles, packed, out)
