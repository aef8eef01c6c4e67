"""Quantized weights: written in pieces, looked up, dequantized, and multiplied by any number of rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.capture.cuda_graph import GraphPool
from fastgen.compile.capture.tape import LibraryCall
from fastgen.compile.ops.embedding.reference import embed
from fastgen.compile.ops.embedding.triton import EmbeddingKernel, embedding_spec
from fastgen.compile.ops.linear import triton as linear_triton
from fastgen.compile.ops.linear.reference import linear, logits
from fastgen.compile.ops.linear.tiling import FewRowShape, SplitK, default_split
from fastgen.compile.ops.linear.triton import DequantizeKernel, LinearKernel, dequantize_spec
from fastgen.compile.spec import torch_dtype
from fastgen.compile.weights import quantized as quantized_weight
from fastgen.compile.weights.formats import QUANTIZED, WeightOnlyFormat
from fastgen.compile.weights.quantized import QuantizedWeight, quantized
from fastgen.compile.weights.rows import QuantizedRows
from tests.kernel_device import DEVICE

FORMATS: tuple[WeightOnlyFormat, ...] = get_args(WeightOnlyFormat)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loader(triton_kernels: KernelLoader) -> KernelLoader:
    return triton_kernels


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_every_format_is_multiplied_somewhere() -> None:
    assert set(FORMATS) == set(QUANTIZED["triton"]) == set(QUANTIZED["torch"])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_may_come_in_any_pieces(weight_format: WeightOnlyFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, bias = drawn(29, 70), drawn(3, 70, seed=1), drawn(29, seed=2)
    whole = quantized(weight, weight_format)
    expected = logits(x, whole, bias)
    monkeypatch.setattr(quantized_weight, "_PIECE", 4 * 70)
    pieces, num_rows = QuantizedWeight(weight_format, 29, 70, CPU), list[int]()
    quantize = pieces._quantized

    def noted(rows: Tensor, largest: Tensor | None) -> tuple[Tensor, Tensor]:
        num_rows.append(len(rows))
        return quantize(rows, largest)

    monkeypatch.setattr(pieces, "_quantized", noted)
    for start, end in ((20, 29), (0, 7), (7, 20)):
        pieces.write(start, weight[start:end])
    assert num_rows == [4, 4, 1, 4, 3, 4, 4, 4, 1], "and so no more memory is needed than for a piece"
    assert torch.equal(pieces.codes, whole.codes)
    assert torch.equal(pieces.scale, whole.scale)
    assert whole.size_bytes == QuantizedWeight(weight_format, 29, 70, torch.device("meta")).size_bytes
    torch.testing.assert_close(logits(x, pieces, bias), expected, rtol=1e-6, atol=1e-6)
    which = torch.tensor([28, 0, 0, 11])
    assert torch.equal(pieces.rows(which), whole.rows(slice(None))[which])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_are_held_if_codes_and_scales_are_the_same(weight_format: WeightOnlyFormat) -> None:
    weight, rows = QuantizedWeight(weight_format, 9, 40, CPU), drawn(4, 40)
    other = rows.clone()
    other[1] = rows[2]
    for start, its_rows in ((0, other), (4, rows)):
        QuantizedRows(weight, start, (4, 40), torch.float32).copy_(its_rows)
    place = QuantizedRows(weight, 4, (4, 40), torch.float32)
    assert place.holds(rows)
    assert not place.holds(other)
    assert not place.holds(2 * rows), "the codes are the same"
    one_code = rows.clone()
    least = rows[0].abs().argmin()
    one_code[0, least] = rows[0, least] + rows[0].abs().amax() / 3
    assert not place.holds(one_code), "the scales are the same"


@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_are_worth_what_the_product_takes_them_for(weight_format: WeightOnlyFormat) -> None:
    """A product with the unit matrix, against the weight itself within the format's step."""
    weight = drawn(6, 40)
    stored = quantized(weight, weight_format)
    torch.testing.assert_close(logits(torch.eye(40), stored).T, stored.rows(slice(None)), rtol=1e-6, atol=0)
    # half a step of 127; a whole one of 8, where the code of the largest would be 8; half of the last of three bits
    most = {"int8_weight_only": 0.5 / 127, "int4_weight_only": 1 / 8, "fp8_weight_only": 2**-4}[weight_format]
    largest = weight.abs().amax(1, keepdim=True)
    assert ((stored.rows(slice(None)) - weight).abs() <= 1.001 * most * largest).all()
    for dtype in (torch.bfloat16, torch.float16):
        out = linear(torch.eye(40, dtype=dtype), stored, None)
        assert out.dtype == dtype
        torch.testing.assert_close(out.T.float(), stored.rows(slice(None)), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("largest", [0.0, 3e-45, 5e-43, 2e-42, 1e-38, 1e-28])
def test_rows_of_tiny_weights_stay_tiny(weight_format: WeightOnlyFormat, largest: float) -> None:
    """A scale that is denormal or zero makes no NaN of a row that is almost zero, as an unused token's may be."""
    weight = drawn(3, 40).clamp(-1, 1)
    weight[1] = largest * weight[1] / weight[1].abs().max()
    rows = quantized(weight, weight_format).rows(slice(None))
    assert ((rows[1] - weight[1]).abs() <= largest).all()
    assert rows[[0, 2]].isfinite().all()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_quantized_weight_is_dequantized_for_the_library(
    loader: KernelLoader, weight_format: WeightOnlyFormat
) -> None:
    for seed, (size, dtype) in enumerate(itertools.product((1, 32, 70, 1040), ("fp32", "fp16"))):
        stored = quantized(drawn(3, size, seed=seed), weight_format)
        out = torch.full((4, size), torch.nan, dtype=torch_dtype(dtype))
        DequantizeKernel(loader.load(dequantize_spec(size, weight_format, dtype)))(stored, out[:3])
        assert torch.equal(out[:3], stored.rows(slice(None)).to(out.dtype)), (size, dtype)
        assert out[3].isnan().all()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_looked_up_by_id(loader: KernelLoader, weight_format: WeightOnlyFormat) -> None:
    """Tokens of a quantized table, scaled, plus positions of a plain one."""
    for size, dtype, offset in itertools.product((33, 1040), ("fp32", "fp16"), (None, 2)):
        spec = embedding_spec(size, dtype, table_dtype=weight_format, scale=1.5, position_offset=offset)
        table, places = quantized(drawn(9, size), weight_format), drawn(7, size, seed=1).to(torch_dtype(dtype))
        ids, source, sampled = (torch.tensor(each, dtype=torch.int32) for each in ([8, 2**30, 0], [-1, 1, -1], [3, 5]))
        positions = torch.tensor([0, 4, 1], dtype=torch.int32)
        out = torch.empty(3, size, dtype=torch_dtype(dtype))
        EmbeddingKernel(loader.load(spec))(ids, source, sampled, table, out, positions, places)
        want = embed(torch.tensor([8, 5, 0]), table).to(out.dtype) * 1.5
        rtol, atol = (1.3e-6, 1e-5) if dtype == "fp32" else (1e-3, 1e-5)
        if DEVICE != "cpu" and dtype == "fp16":  # its compiler leaves out the rounding between product and sum
            atol = torch.finfo(out.dtype).eps * float(want.abs().max())
        want = want if offset is None else want + places[positions.long() + offset]
        torch.testing.assert_close(out, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("by_library", [False, True], ids=["kernels", "library"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_any_number_of_rows(loader: KernelLoader, weight_format: WeightOnlyFormat, by_library: bool) -> None:
    """Few rows, more in pieces, and many by the library, where it does not serve few as well; layers share the room."""
    shape = FewRowShape(20, 70, "fp32", weight_format, bias=True)
    whole = torch.full((30 * 70,), torch.nan)
    split = None if by_library else SplitK(32, 32, 4, 1, 2)
    layer = LinearKernel(shape, loader.load, torch.empty, lambda rows: split, dequantized=whole)
    stored, bias = quantized(drawn(20, 70), weight_format), drawn(20, seed=1)
    for num_rows, reads_whole in ((1, by_library), (64, by_library), (65, by_library), (192, by_library), (193, True)):
        x, out = drawn(num_rows, 70, seed=num_rows), torch.full((num_rows + 1, 20), torch.nan)
        whole.fill_(torch.nan)
        layer(x, stored, bias, out[:-1])
        torch.testing.assert_close(out[:-1], logits(x, stored, bias), rtol=1e-5, atol=1e-5)
        assert out[-1].isnan().all()
        assert bool(whole.isnan().all()) != reads_whole, num_rows


def test_a_plain_head_of_many_rows_is_the_library_s_where_it_gives_fp32(
    loader: KernelLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels for few rows its weights would be read once for every 64 rows."""
    shape = FewRowShape(30, 64, "fp16", out_dtype="fp32")
    head = LinearKernel(
        shape, loader.load, lambda numel: torch.empty(numel), lambda rows: default_split(shape, rows, "interpret", 2)
    )
    monkeypatch.setattr(linear_triton, "has_wide_products", lambda x: True)
    x, weight = torch.randn(70, 64).half(), torch.randn(30, 64).half()
    tape = GraphPool(CPU, loader).record("a head", lambda: head(x, weight, None, torch.empty(70, 30)))
    assert [str(entry) for entry in tape.entries] == ["mm"]
    (call,) = tape.entries
    assert isinstance(call, LibraryCall)
    assert call.kwargs["out_dtype"] == torch.float32
    few = GraphPool(CPU, loader).record("a few", lambda: head(x[:64], weight, None, torch.empty(64, 30)))
    assert "mm" not in [str(entry) for entry in few.entries]
    monkeypatch.undo()
    out = torch.empty(70, 30)
    head(x, weight, None, out)
    torch.testing.assert_close(out, x.float() @ weight.float().t(), rtol=1e-3, atol=1e-3)


def test_a_head_is_never_laid_out(loader: KernelLoader) -> None:
    shape = FewRowShape(40, 32, "fp32", "int8_weight_only", out_dtype="fp32")
    layer = LinearKernel(shape, loader.load, torch.empty, lambda rows: SplitK(32, 32, 4, 1))
    stored, x, out = quantized(drawn(40, 32), "int8_weight_only"), drawn(200, 32), torch.empty(200, 40)
    layer(x, stored, None, out)
    torch.testing.assert_close(out, logits(x, stored), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_built_without_spills(arch: str, tmp_path: Path) -> None:
    builder = KernelLoader(TritonBuilder(arch), cache=KernelCache(tmp_path), num_jobs=1)
    specs = [dequantize_spec(4096, weight_format, "bf16") for weight_format in FORMATS]
    specs += [embedding_spec(4096, "bf16", table_dtype="int4_weight_only")]
    for entry in builder.build(specs):
        assert entry.report["spill_bytes"] == 0, entry.name
