"""Few-row linear kernels that compute the op that follows too: interpreted, against the reference of both, and bit by
bit against kernels that compute one op each. What is not to be written is NaN, and must still be NaN afterwards.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TRITON_ARCHES, TritonBuilder
from fastgen.compile.ops.activation.reference import ACTIVATIONS, activate, activate_and_multiply
from fastgen.compile.ops.activation.triton import ActivationKernel, activation_spec
from fastgen.compile.ops.kv_write.reference import write_kv
from fastgen.compile.ops.linear.finish import Activate, AddAndNorm, Finish, RotateAndWrite
from fastgen.compile.ops.linear.reference import logits
from fastgen.compile.ops.linear.tiling import FewRowShape, SplitK, default_split
from fastgen.compile.ops.linear.triton import FewRowKernel, LinearKernel, few_row_specs
from fastgen.compile.ops.norm.reference import layer_norm, rms_norm
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.norm.triton import NormKernel, norm_spec
from fastgen.compile.ops.qkv.triton import QkvKernel, qkv_spec
from fastgen.compile.ops.rotary.reference import apply_rotary
from fastgen.compile.spec import torch_dtype
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.compile.weights.quantized import QuantizedWeight, quantized
from tests.fast import cases
from tests.kernel_device import DEVICE

FORMATS = ("plain", *get_args(WeightOnlyFormat))
TOLERANCE = {"fp32": 1e-5, "fp16": 2**-8}
NUM_POSITIONS, BLOCK_SIZE = 50, 4


@pytest.fixture(scope="module")
def loader(triton_kernels: KernelLoader) -> KernelLoader:
    return triton_kernels


class Case:
    """A drawn layer, its operands, and the kernels that finish."""

    def __init__(self, draw: random.Random, in_features: int, out_features: int, **shape: Any):
        self.draw, self.generator = draw, torch.Generator().manual_seed(draw.randrange(1 << 30))
        self.dtype = draw.choice(["fp32", "fp16"])
        self.shape = FewRowShape(out_features, in_features, self.dtype, bias=draw.random() < 0.5, **shape)
        self.num_rows = draw.choice([1, 2, 15, 16, 17, 33, 64])
        block_k = draw.choice([32, 64])
        self.split = SplitK(draw.choice([16, 32, 64]), block_k, 4, 1, draw.randint(1, 4))
        self.x, plain = (
            self.normal(self.num_rows, in_features),
            self.normal(out_features, in_features) / in_features**0.5,
        )
        self.weight = plain if self.shape.weight == "plain" else quantized(plain, self.shape.weight)
        self.bias = self.normal(out_features) if self.shape.bias else None
        self.where = f"{self.shape}, {self.num_rows} rows, {self.split}"

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(torch_dtype(self.dtype))

    def nan(self, *size: int) -> Tensor:
        """A tensor to be written, and a row behind it that is not."""
        return torch.full((size[0] + 1, *size[1:]), torch.nan, dtype=torch_dtype(self.dtype))

    def linear(self, loader: KernelLoader) -> Tensor:
        """Returns what kernels store that finish nothing."""
        out = self.nan(self.num_rows, self.shape.out_features)[:-1]
        self._run(loader, None, out, {})
        return out

    def finish(self, loader: KernelLoader, finish: Finish, out: Tensor, **others: Tensor) -> bool:
        return self._run(loader, finish, out, others)

    def _run(self, loader: KernelLoader, finish: Finish | None, out: Tensor, others: dict[str, Tensor]) -> bool:
        specs = few_row_specs(self.shape, self.num_rows, self.split, finish=finish)
        if finish is not None and not specs.finishes:
            return False
        reduce, workspace = None, None
        if specs.reduce is not None:
            reduce = loader.load(specs.reduce)
            workspace = torch.full((specs.workspace_numel(self.num_rows),), torch.nan)
        FewRowKernel(loader.load(specs.main), reduce, workspace)(self.x, self.weight, self.bias, out, **others)
        return True

    def reference(self) -> Tensor:
        """The layer in fp32."""
        return logits(self.x, self.weight, self.bias)

    def check(self, found: Tensor, one_by_one: Tensor, want: Tensor) -> None:
        """Compares what kernels that finish computed with kernels of one op each, and with the reference. A GPU's
        compiler leaves out roundings between products and sums, and others in either kernel."""
        is_exact, allowed = DEVICE == "cpu", TOLERANCE[self.dtype]
        for other, near in ((one_by_one, 0.0 if is_exact else allowed), (want, allowed)):
            torch.testing.assert_close(
                found.float(), other.float(), rtol=near, atol=4 * near, msg=lambda text: f"{self.where}: {text}"
            )


class DrawnNorm:
    """A norm of a layer's outputs and its weights."""

    def __init__(self, case: Case, *, residual: bool = False):
        draw, size = case.draw, case.shape.out_features
        kind = draw.choice(["rms", "layer"])
        self.shape = NormShape(
            kind,
            size,
            case.dtype,
            1e-2,
            weight=draw.random() < 0.8,
            bias=kind == "layer" and draw.random() < 0.6,
            offset=draw.choice([0.0, 1.0]),
            residual=residual,
            scale=draw.choice([1.0, 0.22]) if residual else 1.0,
        )
        self.weight = case.normal(size) if self.shape.weight else None
        self.bias = case.normal(size) if self.shape.bias else None

    def named(self, prefix: str) -> dict[str, Tensor]:
        names = {f"{prefix}_weight": self.weight, f"{prefix}_bias": self.bias}
        return {name: each for name, each in names.items() if each is not None}

    def kernel(self, loader: KernelLoader) -> NormKernel:
        return NormKernel(loader.load(norm_spec(self.shape)))

    def reference(self, x: Tensor) -> Tensor:
        weight, bias = (None if each is None else each.float() for each in (self.weight, self.bias))
        if self.shape.kind == "rms":
            return rms_norm(x, weight, self.shape.eps, self.shape.offset)
        return layer_norm(x, weight, bias, self.shape.eps, self.shape.offset)


@pytest.mark.parametrize("has_first", [False, True])
@pytest.mark.parametrize("seed", cases(range(20), fast=range(10)))
def test_a_sum_of_parts_is_added_to_the_stream_and_normed(loader: KernelLoader, seed: int, has_first: bool) -> None:
    """With ``has_first`` a norm, the sum of parts is normed before it is added."""
    draw = random.Random(f"norm {seed}")
    case = Case(draw, draw.choice([33, 64, 160]), draw.choice([1, 20, 64, 100]), weight=draw.choice(FORMATS))
    norm, first = DrawnNorm(case, residual=True), DrawnNorm(case)
    finish = AddAndNorm(norm.shape, first.shape if has_first else None)
    size = case.shape.out_features
    stream, out = case.nan(case.num_rows, size), case.nan(case.num_rows, size)
    stream[:-1] = before = case.normal(case.num_rows, size)
    given = norm.named("norm") | (first.named("first_norm") if has_first else {})
    if not case.finish(loader, finish, out[:-1], residual=stream[:-1], **given):
        assert case.split.num_splits == 1 or case.shape.in_features <= case.split.block_k
        return
    assert stream[-1].isnan().all()
    assert out[-1].isnan().all()
    added, exact = case.linear(loader), case.reference()
    if has_first:
        linear, added = added, torch.empty_like(added)
        first.kernel(loader)(linear, first.weight, first.bias, added)
        exact = first.reference(exact)
    summed, normed = before.clone(), torch.empty_like(before)
    norm.kernel(loader)(added, norm.weight, norm.bias, normed, summed)
    want = before.float() + norm.shape.scale * exact
    case.check(stream[:-1], summed, want)
    case.check(out[:-1], normed, norm.reference(want))


@pytest.mark.parametrize("seed", cases(range(32), fast=range(16)))
def test_outputs_are_activated(loader: KernelLoader, seed: int) -> None:
    draw = random.Random(f"activation {seed}")
    gated, size = draw.random() < 0.7, draw.choice([1, 7, 24, 33, 64])
    kind = draw.choice([*ACTIVATIONS])
    case = Case(draw, draw.choice([33, 64, 160]), size * (2 if gated else 1), weight=draw.choice(FORMATS))
    out = case.nan(case.num_rows, size)
    assert case.finish(loader, Activate(kind, gated), out[:-1])
    assert out[-1].isnan().all()
    one_by_one = torch.empty_like(out[:-1])
    spec = activation_spec(kind, size, case.dtype, gated=gated)
    ActivationKernel(loader.load(spec))(case.linear(loader), one_by_one)
    exact = case.reference()
    case.check(out[:-1], one_by_one, activate_and_multiply(exact, kind) if gated else activate(exact, kind))


@pytest.mark.parametrize("seed", cases(range(32), fast=range(16)))
def test_queries_and_keys_are_rotated_and_keys_and_values_written(loader: KernelLoader, seed: int) -> None:
    draw = random.Random(f"rotary {seed}")
    num_heads, num_kv_heads = draw.choice([(1, 1), (4, 2), (5, 1), (9, 3)])
    head_dim = draw.choice([2, 6, 16, 20])
    rotary_dim = draw.choice([0, head_dim, head_dim, 2, head_dim // 4 * 2])
    case = Case(*(draw, draw.choice([33, 96]), (num_heads + 2 * num_kv_heads) * head_dim), weight=draw.choice(FORMATS))
    finish = RotateAndWrite(num_heads, num_kv_heads, head_dim, rotary_dim, interleaved=draw.random() < 0.4)
    # Rows of padding write to block 0. Here each has a slot of its own: where some share one, any may be the last.
    num_rows, num_padding = case.num_rows, min(BLOCK_SIZE, case.num_rows // 4)
    num_blocks = 2 + num_rows // BLOCK_SIZE
    slots = BLOCK_SIZE + torch.randperm((num_blocks - 1) * BLOCK_SIZE, generator=case.generator)[:num_rows]
    slots[num_rows - num_padding :] = torch.arange(num_padding)
    positions = torch.randint(0, NUM_POSITIONS, (num_rows,), generator=case.generator).int()
    cos_sin = torch.randn(NUM_POSITIONS, rotary_dim, generator=case.generator)
    given = {"positions": positions, "slots": slots} | ({"cos_sin": cos_sin} if rotary_dim else {})

    def empty() -> tuple[Tensor, Tensor, Tensor]:
        caches = (case.nan(num_blocks - 1, BLOCK_SIZE, num_kv_heads, head_dim) for _ in range(2))
        return case.nan(num_rows, case.shape.out_features), *caches

    out, k_cache, v_cache = empty()
    assert case.finish(loader, finish, out[:-1], k_cache=k_cache, v_cache=v_cache, **given)
    qkv, k_one, v_one = empty()
    qkv[:-1] = case.linear(loader)
    rotary: dict[str, Any] = {"rotary_dim": rotary_dim, "interleaved": finish.interleaved}
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    QkvKernel(loader.load(qkv_spec(case.dtype, **sizes, **rotary)))(qkv[:-1], k_cache=k_one, v_cache=v_one, **given)
    exact = case.reference().view(num_rows, -1, head_dim)
    q, k, v = exact.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if rotary_dim:
        q, k = (apply_rotary(each, positions, cos_sin, interleaved=finish.interleaved) for each in (q, k))
    _, k_want, v_want = (each.float() for each in empty())
    write_kv(k, v, k_want, v_want, slots)
    size = num_heads * head_dim
    case.check(out[:-1, :size], qkv[:-1, :size], q.flatten(1))
    assert out[:, size:].isnan().all()  # keys and values are in the cache alone
    assert out[-1].isnan().all()
    used = slots[: num_rows - num_padding]
    for found, one, want in ((k_cache, k_one, k_want), (v_cache, v_one, v_want)):
        found, one, want = (each.flatten(0, 1) for each in (found, one, want))
        case.check(found[used], one[used], want[used])
        others = torch.ones(len(found), dtype=torch.bool)
        others[slots] = False
        assert found[others].isnan().all()


def test_infinite_values_are_written_as_they_are(loader: KernelLoader) -> None:
    """Features that are not rotated are not multiplied by cosines and sines of 1 and 0 either."""
    shape, finish = FewRowShape(12, 32, "fp32"), RotateAndWrite(1, 1, 4, 2)
    specs = few_row_specs(shape, 1, SplitK(16, 32, 4, 1), finish=finish)
    weight = torch.zeros(12, 32)
    weight[2:] = torch.inf
    x, out, positions, slots = torch.ones(1, 32), torch.empty(1, 12), torch.zeros(1).int(), torch.zeros(1).long()
    k_cache, v_cache, cos_sin = torch.empty(1, 1, 1, 4), torch.empty(1, 1, 1, 4), torch.ones(1, 2)
    FewRowKernel(loader.load(specs.main), None, None)(
        *(x, weight, None, out), positions=positions, slots=slots, cos_sin=cos_sin, k_cache=k_cache, v_cache=v_cache
    )
    assert out[0, 2:4].isposinf().all()
    assert v_cache.isposinf().all()


def test_which_rows_are_finished(loader: KernelLoader) -> None:
    """Split features are normed, whole ones not; the library finishes nothing, and pieces are not finished."""
    shape, loaded = FewRowShape(32, 64, "fp32", "int8_weight_only"), []
    splits = {16: SplitK(16, 32, 4, 1, 2), 32: None, 64: SplitK(16, 32, 4, 1, 1)}

    def load(spec: Any) -> Any:
        loaded.append(spec.op)
        return loader.load(spec)

    norm = AddAndNorm(NormShape("rms", 32, "fp32", 1e-5, residual=True))
    given: dict[str, Any] = {"dequantized": torch.empty(32 * 64)}
    linear = LinearKernel(shape, load, torch.empty, splits.__getitem__, finish=norm, **given)
    assert [rows for rows in range(70) if linear.finishes(rows)] == [*range(17)]
    assert "few_row_norm" in loaded
    assert "few_row_reduce" not in loaded  # nobody would launch it
    activate = LinearKernel(shape, load, torch.empty, splits.__getitem__, finish=Activate("silu", True), **given)
    assert [rows for rows in range(70) if activate.finishes(rows)] == [*range(17), *range(33, 65)]
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(65, 64, generator=generator), torch.randn(32, 64, generator=generator)
    stored, out = quantized(weight, "int8_weight_only"), torch.empty(65, 32)
    assert isinstance(stored, QuantizedWeight)
    activate(x, stored, None, out)  # two pieces
    torch.testing.assert_close(out, logits(x, stored, None), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("sizes", "message"), [((1, 1, 5), "head_dim=5"), ((1, 1, 4, 3), "rotary_dim=3")])
def test_features_are_taken_in_pairs(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotateAndWrite(*sizes)


# Built for GPUs that are not here


FINISHES: dict[str, tuple[int, int, Finish]] = {
    "norm": (4096, 4096, AddAndNorm(NormShape("rms", 4096, "bf16", 1e-5, residual=True))),
    "two norms": (
        *(3584, 14336),
        AddAndNorm(
            NormShape("rms", 3584, "bf16", 1e-6, offset=1.0, residual=True), NormShape("rms", 3584, "bf16", 1e-6)
        ),
    ),
    "wide norm": (8192, 28672, AddAndNorm(NormShape("layer", 8192, "bf16", 1e-5, bias=True, residual=True))),
    "gate and up": (28672, 4096, Activate("silu", gated=True)),
    "split gate and up": (22016, 4096, Activate("gelu", gated=True)),
    "up": (16384, 4096, Activate("relu2", gated=False)),
    "heads": (12288, 4096, RotateAndWrite(32, 32, 128, 128)),
    "split heads": (6144, 4096, RotateAndWrite(32, 8, 128, 128)),
    "partly rotated heads": (7680, 2560, RotateAndWrite(32, 32, 80, 32)),
    "interleaved heads": (6144, 4096, RotateAndWrite(32, 8, 128, 64, interleaved=True)),
}


@pytest.mark.slow  # test_overlap.py looks for spills of one of them too
@pytest.mark.parametrize("arch", TRITON_ARCHES)
@pytest.mark.parametrize("name", FINISHES)
def test_built_without_spills(arch: str, name: str, tmp_path: Path) -> None:
    out_features, in_features, finish = FINISHES[name]
    loader = KernelLoader(TritonBuilder(arch), cache=KernelCache(tmp_path), num_jobs=1)
    for num_rows, weight in ((16, "plain"), (64, "plain"), (16, "int4_weight_only")):
        shape = FewRowShape(out_features, in_features, "bf16", weight, bias=True)  # type: ignore[arg-type]
        specs = few_row_specs(shape, num_rows, default_split(shape, num_rows, arch, 132), finish=finish)
        wanted = [each for each in (specs.main, specs.reduce) if each]
        for spec, entry in zip(wanted, loader.build(wanted), strict=True):
            found = entry.report
            assert found["spill_bytes"] == 0, f"{spec} for {arch}: {found}"
            assert found["shared_bytes"] <= found["shared_limit_bytes"], f"{spec} for {arch}: {found}"
