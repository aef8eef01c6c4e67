"""Few-row linear kernels: interpreted, against the torch reference, and built for GPUs that are not here."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TRITON_ARCHES, TritonBuilder
from fastgen.compile.ops.linear.reference import logits
from fastgen.compile.ops.linear.tiling import (
    FewRowFormat,
    FewRowShape,
    SplitK,
    candidate_splits,
    default_split,
    row_tile,
)
from fastgen.compile.ops.linear.triton import FewRowKernel, FewRowSpecs, few_row_specs
from fastgen.compile.spec import torch_dtype
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.compile.weights.quantized import QuantizedWeight, quantized
from tests.compile.sass import instructions, loops

FORMATS: tuple[FewRowFormat, ...] = ("plain", *get_args(WeightOnlyFormat))
TOLERANCE = {"fp32": 1e-5, "fp16": 2**-9}  # sums are exact up to their order; 16 bits: of the answer's rounding
WHOLE = SplitK(16, 32, 4, 1, 1)


@pytest.fixture(scope="module")
def loader(triton_kernels: KernelLoader) -> KernelLoader:
    return triton_kernels


def launcher(loader: KernelLoader, specs: FewRowSpecs, max_rows: int) -> FewRowKernel:
    """With a workspace that is poisoned and not a number too small."""
    if specs.reduce is None:
        return FewRowKernel(loader.load(specs.main), None, None)
    workspace = torch.full((specs.workspace_numel(max_rows),), torch.nan)
    return FewRowKernel(loader.load(specs.main), loader.load(specs.reduce), workspace)


def drawn(shape: FewRowShape, num_rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """``x``, weight and bias."""
    generator, dtype = torch.Generator().manual_seed(seed), torch_dtype(shape.dtype)
    sizes = ((num_rows, shape.in_features), (shape.out_features, shape.in_features), (shape.out_features,))
    x, weight, bias = (torch.randn(size, generator=generator) for size in sizes)
    return x.to(dtype), (weight * shape.in_features**-0.5).to(dtype), bias.to(dtype)


def stored_as(weight: Tensor, weight_format: FewRowFormat) -> Tensor | QuantizedWeight:
    return weight if weight_format == "plain" else quantized(weight, weight_format)


def check(loader: KernelLoader, shape: FewRowShape, num_rows: int, split: SplitK, seed: int = 0) -> None:
    x, weight, bias = drawn(shape, num_rows, seed)
    stored = stored_as(weight, shape.weight)
    out_dtype = torch_dtype(shape.out_dtype or shape.dtype)
    out = torch.full((num_rows + 1, shape.out_features), torch.nan, dtype=out_dtype)
    launcher(loader, few_row_specs(shape, num_rows, split), num_rows)(x, stored, bias, out[:-1])
    want = logits(x, stored, bias if shape.bias else None)
    where = f"{num_rows} rows, {split}, seed {seed}, {shape}"
    assert out[-1].isnan().all(), where
    allowed = TOLERANCE["fp16" if out_dtype == torch.float16 else "fp32"]
    torch.testing.assert_close(out[:-1].float(), want, rtol=allowed, atol=allowed, msg=lambda text: f"{where}: {text}")


def test_formats_with_splits_and_tails(loader: KernelLoader) -> None:
    """Each format, whole and split, with outputs and features that fill their tiles and that do not."""
    for seed, (weight, splits, sizes) in enumerate(itertools.product(FORMATS, (1, 3), ((48, 96), (50, 104), (1, 7)))):
        shape = FewRowShape(*sizes, dtype="fp16" if seed % 2 else "fp32", weight=weight, bias=seed % 3 > 0)
        check(loader, shape, (1, 5, 16, 17)[seed % 4], SplitK(16, 32, 4, 1, splits), seed)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64])
def test_every_edge_of_the_row_tiles(loader: KernelLoader, num_rows: int) -> None:
    for splits in (1, 2):
        check(loader, FewRowShape(20, 64, "fp32", bias=True), num_rows, SplitK(16, 32, 4, 1, splits), num_rows)


def test_one_kernel_serves_fewer_rows(loader: KernelLoader) -> None:
    """As in a graph captured for 16 rows: kernels, grid and workspace stay."""
    shape = FewRowShape(40, 96, "fp32", bias=True)
    linear = launcher(loader, few_row_specs(shape, 16, SplitK(16, 32, 4, 1, 3)), 16)
    x, weight, bias = drawn(shape, 16, 1)
    want = logits(x, weight, bias)
    for num_rows in (16, 1, 7, 0):
        out = torch.full((num_rows, 40), torch.nan)
        linear(x[:num_rows], weight, bias, out)
        torch.testing.assert_close(out, want[:num_rows], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="17 rows: these kernels compute up to 16"):
        linear(x.new_empty(17, 96), weight, bias, x.new_empty(17, 40))


def test_logits_are_not_rounded(loader: KernelLoader) -> None:
    for splits in (1, 2):
        check(loader, FewRowShape(70, 64, "fp16", out_dtype="fp32"), 3, SplitK(16, 32, 4, 1, splits))


@pytest.mark.slow
def test_drawn_shapes(loader: KernelLoader) -> None:
    draw = random.Random(7)
    for seed in range(300):
        sizes = draw.randint(1, 200), draw.choice([1, 2, 16, 31, 32, 33, 100, 128, 160, 257])
        dtype = draw.choice(["fp32", "fp16"])
        shape = FewRowShape(*sizes, dtype, draw.choice(FORMATS), draw.random() < 0.5, draw.choice(["", "fp32"]))
        block_k = draw.choice([32, 64, 128])
        split = SplitK(draw.choice([16, 32, 64]), block_k, 4, 1, draw.randint(1, 5))
        check(loader, shape, draw.randint(0, 64), split, seed)


def test_what_lies_behind_the_features_is_not_read(loader: KernelLoader) -> None:
    """Rows of 40 features in tiles of 32, with NaN where a tile would reach beyond the last row."""
    shape = FewRowShape(16, 40, "fp32")
    x, weight, bias = drawn(shape, 2, 3)
    behind = torch.full((20, 40), torch.nan)
    behind[:16] = weight
    x_behind = torch.full((4, 40), torch.nan)
    x_behind[:2] = x
    out = torch.empty(2, 16)
    linear = launcher(loader, few_row_specs(shape, 2, SplitK(16, 32, 4, 1, 2)), 2)
    linear(x_behind[:2], behind[:16], bias, out)
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("weight", FORMATS)
def test_rows_that_do_not_exist_are_not_read(
    loader: KernelLoader, weight: FewRowFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel for 16 rows reads the three that there are once in each program, and nothing in place of the others."""
    shape, num_rows, read = FewRowShape(32, 64, "fp32", weight), 3, []
    x, plain, _ = drawn(shape, num_rows, 8)
    begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
    load = InterpreterBuilder.create_masked_load

    def noting(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        wanted = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        read.extend(wanted[(wanted >= begin) & (wanted < end)].tolist())
        return load(self, ptrs, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noting)
    linear = launcher(loader, few_row_specs(shape, num_rows, WHOLE), num_rows)
    linear(x, stored_as(plain, weight), None, torch.empty(num_rows, 32))
    assert len(read) == 2 * x.numel()  # two programs
    assert {*Counter(read).values()} == {2}


# Quantized weights


def test_the_reference_is_the_definition() -> None:
    """Against numbers unpacked one at a time."""
    x, weight, bias = drawn(FewRowShape(3, 70, "fp32"), 2, 5)
    for weight_format in FORMATS:
        stored = stored_as(weight, weight_format)
        values = torch.empty(3, 70)
        for out, at in itertools.product(range(3), range(70)):
            if isinstance(stored, Tensor):
                values[out, at] = stored[out, at]
            elif weight_format == "int4_weight_only":
                group, place = divmod(at, 32)
                code = int(stored.codes[out, group * 16 + place % 16]) >> (4 if place >= 16 else 0) & 15
                values[out, at] = (code - 8) * float(stored.scale[out, group])
            elif weight_format == "int8_weight_only":
                values[out, at] = int(stored.codes[out, at]) * float(stored.scale[out])
            else:
                values[out, at] = e4m3(int(stored.codes[out, at])) * float(stored.scale[out])
        torch.testing.assert_close(logits(x, stored, bias), x @ values.T + bias, rtol=1e-5, atol=1e-5)
        step = {"plain": 0, "int8_weight_only": 2**-8, "int4_weight_only": 2**-3.9, "fp8_weight_only": 2**-4}
        assert float((values - weight).abs().max()) <= step[weight_format] * float(weight.abs().max()), weight_format


def e4m3(bits: int) -> float:
    sign, exponent, fraction = -1 if bits & 128 else 1, bits >> 3 & 15, bits & 7
    return sign * (fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2 ** (exponent - 7))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_every_fp8_code(loader: KernelLoader, dtype: str) -> None:
    """All but the two NaNs, subnormal ones too, picked out one by one."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    shape = FewRowShape(254, 32, dtype, "fp8_weight_only", out_dtype="fp32")
    stored = quantized(torch.zeros(254, 32), "fp8_weight_only")
    stored.scale.fill_(1)
    stored.codes[:, 5] = codes
    x = torch.zeros(1, 32, dtype=torch_dtype(dtype))
    x[0, 5] = 1
    out = torch.empty(1, 254)
    launcher(loader, few_row_specs(shape, 1, WHOLE), 1)(x, stored, None, out)
    assert out[0].tolist() == [e4m3(int(code)) for code in codes]


def test_rows_of_zeros_stay_zeros() -> None:
    weight = torch.zeros(4, 40)
    weight[1] = torch.randn(40)
    for weight_format in FORMATS:
        out = logits(torch.ones(1, 40), stored_as(weight, weight_format), None)
        assert out[0, [0, 2, 3]].tolist() == [0.0, 0.0, 0.0], weight_format
        assert out.isfinite().all()


def test_bytes_of_a_weight() -> None:
    reported = dict.fromkeys(FORMATS[1:], 64 * 100) | {"int4_weight_only": 64 * (48 + 6)}
    for weight_format, size_bytes in reported.items():
        assert quantized(torch.randn(64, 96, dtype=torch.bfloat16), weight_format).size_bytes == size_bytes
        described = QuantizedWeight(weight_format, 64, 95, torch.device("meta"))
        assert described.size_bytes == size_bytes - 64 * (weight_format != "int4_weight_only")


# How it is cut


@pytest.mark.parametrize("arch", [*TRITON_ARCHES, "sm_120"])
def test_splits_keep_the_device_busy_and_none_is_idle(arch: str) -> None:
    for out_features, in_features, num_rows, num_sms in itertools.product(
        (1, 4096, 128256), (1, 64, 4096, 14336), (1, 20, 64), (1, 46, 132)
    ):
        for weight, dtype in (("plain", "bf16"), ("int4_weight_only", "fp16"), ("plain", "fp32")):
            shape = FewRowShape(out_features, in_features, dtype, weight)
            default, *others = candidate_splits(shape, num_rows, arch, num_sms)
            assert default == default_split(shape, num_rows, arch, num_sms)
            assert 1 <= len(others) <= 7
            assert len({default, *others}) == len(others) + 1
            for split in (default, *others):
                specs = few_row_specs(shape, num_rows, split)
                steps, share = -(-in_features // split.block_k), specs.main.parameters["share"]
                assert (specs.num_splits - 1) * share < steps <= specs.num_splits * share
                assert (specs.reduce is None) == (specs.num_splits == 1)
    few = default_split(FewRowShape(1024, 8192, "bf16"), 1, arch, 132)
    assert -(-1024 // few.block_n) * few.num_splits >= 132
    assert default_split(FewRowShape(128256, 4096, "bf16"), 1, arch, 132).num_splits == 1


def test_a_stage_less_where_that_saves_a_round(tmp_path: Path) -> None:
    """An H200 holds two programs of four stages on a multiprocessor, and three of three."""
    shape, num_sms = FewRowShape(22016, 4096, "bf16"), 132
    split = default_split(shape, 1, "sm_90", num_sms)
    assert (split.num_stages, split.num_splits) == (3, 1)
    assert 2 * num_sms < shape.out_features // split.block_n <= 3 * num_sms
    assert replace(split, num_stages=4) in candidate_splits(shape, 1, "sm_90", num_sms)
    loader = KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(tmp_path), num_jobs=1)
    (entry,) = loader.build([few_row_specs(shape, 1, split).main])
    multiprocessor, reserved = 228 << 10, 1 << 10  # bytes of shared memory, and of these for each program
    assert 3 * (entry.report["shared_bytes"] + reserved) <= multiprocessor
    assert 3 * 32 * split.num_warps * entry.report["registers"] <= 65536
    # Two rounds, or one, either way: four stages.
    for out_features in (28672, 12288):
        usual = default_split(FewRowShape(out_features, 4096, "bf16"), 1, "sm_90", num_sms)
        assert usual.num_stages == 4
        assert replace(usual, num_stages=3) in candidate_splits(
            FewRowShape(out_features, 4096, "bf16"), 1, "sm_90", num_sms
        )


def test_row_tiles() -> None:
    assert [row_tile(rows) for rows in (0, 1, 16, 17, 32, 33, 64)] == [16, 16, 16, 32, 32, 64, 64]
    for rows in (-1, 65):
        with pytest.raises(ValueError, match=f"{rows} rows: few-row kernels take up to 64"):
            row_tile(rows)
    with pytest.raises(ValueError, match="sizes must be positive"):
        few_row_specs(FewRowShape(0, 4, "fp32"), 1, WHOLE)
    with pytest.raises(ValueError, match="int4 weights come in groups of 32 features"):
        few_row_specs(FewRowShape(4, 64, "fp32", "int4_weight_only"), 1, SplitK(16, 16, 4, 1))


def test_a_workspace_is_given_exactly_where_features_are_split(loader: KernelLoader) -> None:
    whole = few_row_specs(FewRowShape(16, 64, "fp32"), 1, WHOLE)
    assert whole.workspace_numel(64) == 0
    with pytest.raises(ValueError, match="a workspace"):
        FewRowKernel(loader.load(whole.main), None, torch.empty(4))


# Built for GPUs that are not here


def check_build(arch: str, shape: FewRowShape, num_rows: int, directory: Path, split: SplitK | None = None) -> None:
    specs = few_row_specs(shape, num_rows, split or default_split(shape, num_rows, arch, 132))
    loader = KernelLoader(TritonBuilder(arch), cache=KernelCache(directory), num_jobs=1)
    wanted = [specs.main] if specs.reduce is None else [specs.main, specs.reduce]
    for spec, entry in zip(wanted, loader.build(wanted), strict=True):
        found = entry.report
        assert found["spill_bytes"] == 0, f"{spec} for {arch}: {found}"
        assert found["shared_bytes"] <= found["shared_limit_bytes"], f"{spec} for {arch}: {found}"
        if spec is specs.main and shape.dtype != "fp32":
            assert found["matrix_instructions"], f"{spec} for {arch}: {found}"
            if arch == "sm_90" and specs.main.parameters["block_n"] == 64:
                assert "wgmma" in found["matrix_instructions"], f"{spec}: {found}"


def test_built_with_tensor_cores_and_without_spills(tmp_path: Path) -> None:
    check_build("sm_80", FewRowShape(4096, 4096, "bf16", bias=True), 16, tmp_path)
    check_build("sm_90", FewRowShape(4096, 4096, "bf16", "int4_weight_only"), 64, tmp_path)


def test_features_that_are_not_split_are_a_loop_too(tmp_path: Path) -> None:
    """An assembler that unrolled all steps would fill its caches of instructions with 32 copies of one."""
    shape = FewRowShape(12288, 4096, "bf16")
    split = default_split(shape, 16, "sm_90", 132)
    assert split.num_splits == 1
    loader = KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(tmp_path), num_jobs=1)
    (entry,) = loader.build([few_row_specs(shape, 16, split).main])
    found = instructions(entry.source.with_suffix(".cubin"))
    (loop,) = loops(found)
    assert any("HGMMA" in text for text in loop)
    assert len(loop) < 160
    assert len(found) < 600


@pytest.mark.slow
@pytest.mark.parametrize("arch", TRITON_ARCHES)
@pytest.mark.parametrize("weight", FORMATS)
def test_every_default_on_every_target(arch: str, weight: FewRowFormat, tmp_path: Path) -> None:
    for num_rows in (16, 32, 64):
        check_build(arch, FewRowShape(4096, 4096, "bf16", weight), num_rows, tmp_path)
    check_build(arch, FewRowShape(14336, 4096, "fp16", weight), 16, tmp_path)
    check_build(arch, FewRowShape(50257, 768, "bf16", weight, out_dtype="fp32"), 16, tmp_path)
    check_build(arch, FewRowShape(1000, 1000, "fp32", weight), 64, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TRITON_ARCHES)
def test_candidates_fit_as_well(arch: str, tmp_path: Path) -> None:
    for num_rows in (16, 64):
        shape = FewRowShape(4096, 4096, "bf16")
        for split in candidate_splits(shape, num_rows, arch, 132)[1:]:
            check_build(arch, shape, num_rows, tmp_path, split)
