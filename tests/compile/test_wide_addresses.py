"""Addresses beyond 2³¹ numbers in the Triton kernels, interpreted.

Tensors here have more numbers than 32 bits count. Their memory is reserved, but only the few pages that a test writes
or a kernel should reach are ever touched. A kernel that computes an address in 32 bits reaches somewhere else, most
often outside of the tensor, which ends the test's process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.ops.activation.triton import activation_spec
from fastgen.compile.ops.attention.tiling import Tiling
from fastgen.compile.ops.embedding.triton import EmbeddingKernel, RowGatherKernel, embedding_spec, row_gather_spec
from fastgen.compile.ops.experts.tiling import GroupedTiling
from fastgen.compile.ops.experts.triton import combine_spec, grouped_linear_spec
from fastgen.compile.ops.latent.triton import latent_spec
from fastgen.compile.ops.linear.reference import logits
from fastgen.compile.ops.linear.tiling import FewRowFormat, FewRowShape, SplitK
from fastgen.compile.ops.linear.triton import dequantize_spec, few_row_specs
from fastgen.compile.ops.norm.reference import rms_norm
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.norm.triton import norm_spec
from fastgen.compile.ops.qkv.head_norm import HeadNorm
from fastgen.compile.ops.qkv.triton import QkvKernel, qkv_spec
from fastgen.compile.spec import KernelSpec
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.compile.weights.quantized import QuantizedWeight, quantized
from tests.compile.attention_cases import TOLERANCE, Batch, Case, Subject, reference, shape_of

WIDE = 2**31
FORMATS: tuple[FewRowFormat, ...] = ("plain", *get_args(WeightOnlyFormat))
# Begins a launch at another program than the first.
Begin = Callable[[int], None]


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> KernelLoader:
    return KernelLoader(TritonBuilder("interpret"), cache=KernelCache(tmp_path_factory.mktemp("kernels")))


@pytest.fixture
def begin_at(monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Returns a function that numbers the programs along the first axis of a grid from another number than 0 on. So a
    test runs the programs of the last rows, and not the millions before them."""

    def begin_at(first: int) -> None:
        def program_id(self: InterpreterBuilder, axis: int) -> TensorHandle:
            own = self.grid_idx[axis] + (first if axis == 0 else 0)
            return TensorHandle(np.array([own], dtype=np.int32), tl.int32)

        monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", program_id)

    return begin_at


def launch(loader: KernelLoader, spec: KernelSpec, grid: tuple[int, ...], **given: Tensor) -> None:
    loader.load(spec)(grid, *(given[each.name] for each in spec.arguments))


def number(spec: KernelSpec, name: str) -> int:
    value = spec.parameters[name]
    assert isinstance(value, int)
    return value


def wide(*size: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Returns a tensor of more than 2³¹ numbers, none of which is written."""
    made = torch.empty(size, dtype=dtype)
    assert made.numel() > WIDE
    return made


# Attention


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("block_size", [4, 64])
def test_blocks_of_attention(block_size: int, ahead: bool) -> None:
    """A decode and a chunk over a cache of which every other block lies far behind. Their tiles are of keys gathered
    from several blocks, or in one block; some are computed with a mask, some without. Products that are ahead have
    values of their own."""
    shape = shape_of(head_dim=64, block_size=block_size, num_kv_heads=1, values_in_keys=not ahead, dtype="fp16")
    num_blocks = WIDE // (block_size * shape.head_dim) + 40
    cache = wide(num_blocks, block_size, 1, shape.head_dim)
    length = 3 * max(block_size, 16) - 1
    count = -(-length // block_size)
    far = [num_blocks - 1 - index if index % 2 == 0 else 1 + index for index in range(count)]
    blocks = torch.tensor(far, dtype=torch.int32)
    cache[blocks.long()] = torch.randn(count, block_size, 1, shape.head_dim).half()
    values = cache
    if ahead:
        values = wide(*cache.shape)
        values[blocks.long()] = torch.randn(count, block_size, 1, shape.head_dim).half()
    num_new = 20
    starts, seq_lens = torch.tensor([0, 1, 1 + num_new]).int(), torch.tensor([length, length]).int()
    q, tables = torch.randn(1 + num_new, 4, 64).half(), blocks.expand(2, count).clone()
    batch = Batch(q, cache, values, tables, starts, seq_lens, None, None)
    case = Case([(length - 1, 1), (length - num_new, num_new)], shape, chunk=Tiling(32, 16, 4, 1, ahead=ahead))
    found = Subject(case)(batch)
    assert float((found.float() - reference(batch, shape).float()).abs().max()) <= TOLERANCE["fp16"]


def test_queries_of_attention() -> None:
    """A chunk's queries, so far apart that the last are beyond 2³¹ numbers."""
    num_new, stride = 20, 2**27
    shape = shape_of(num_kv_heads=1, values_in_keys=True, q_stride=stride, dtype="fp16")
    q = wide(num_new, stride)[:, : 4 * 16].unflatten(1, (4, 16))
    q.copy_(torch.randn(num_new, 4, 16))
    num_blocks = num_new // shape.block_size
    cache = torch.randn(1 + num_blocks, shape.block_size, 1, 16).half()
    starts, seq_lens = torch.tensor([0, num_new]).int(), torch.tensor([num_new]).int()
    batch = Batch(q, cache, cache, torch.arange(1, 1 + num_blocks).int()[None], starts, seq_lens, None, None)
    found = Subject(Case([(0, num_new)], shape))(batch)
    assert float((found.float() - reference(batch, shape).float()).abs().max()) <= TOLERANCE["fp16"]


# Between the projections and attention


def test_slots_of_qkv(loader: KernelLoader) -> None:
    spec = qkv_spec("fp16", num_heads=2, num_kv_heads=2, head_dim=64, rotary_dim=64)
    num_blocks = WIDE // (64 * 128) + 4
    cache = wide(num_blocks, 64, 2, 64)
    slots = torch.tensor([num_blocks * 64 - 1, 64, num_blocks * 64 - 100])
    cache.flatten(0, 1)[slots] = torch.nan
    qkv, table = torch.randn(3, 6 * 64).half(), torch.tensor([[1.0] * 32 + [0.0] * 32])
    before, positions = qkv.clone(), torch.zeros(3, dtype=torch.int32)
    QkvKernel(loader.load(spec))(qkv, positions, cache, torch.empty_like(cache), slots, cos_sin=table)
    assert torch.equal(cache.flatten(0, 1)[slots].flatten(1), before[:, 128:256])


def test_tokens_of_qkv(loader: KernelLoader, begin_at: Begin) -> None:
    spec = qkv_spec("fp16", num_heads=2, num_kv_heads=2, head_dim=64)
    first = WIDE // (6 * 64) + 1
    qkv, slots = wide(first + 2, 6 * 64), torch.empty(first + 2, dtype=torch.int64)
    given = torch.randn(2, 6 * 64).half()
    qkv[first:], slots[first:] = given, torch.tensor([3, 1])
    caches = [torch.full((1, 4, 2, 64), torch.nan).half() for _ in range(2)]
    begin_at(first)
    launch(loader, spec, (2, number(spec, "tiles")), qkv=qkv, k_cache=caches[0], v_cache=caches[1], slots=slots)
    for cache, part in zip(caches, (given[:, 128:256], given[:, 256:]), strict=True):
        assert torch.equal(cache[0, [3, 1]].flatten(1), part)
        assert cache[0, [0, 2]].isnan().all()


def test_slots_and_tokens_of_latent_attention(loader: KernelLoader, begin_at: Begin) -> None:
    spec = latent_spec(
        "fp16", HeadNorm("rms", 1e-6, weight=False), num_heads=4, latent_dim=64, rotary_dim=64, nope_dim=64
    )
    first = WIDE // (4 * 128) + 1
    q, q_latent = wide(first + 1, 4, 128), wide(first + 1, 4, 128)
    kv, cache = torch.empty(first + 1, 128, dtype=torch.float16), wide(WIDE // 128 + 4, 1, 1, 128)
    slots, positions = torch.empty(first + 1, dtype=torch.int64), torch.empty(first + 1, dtype=torch.int32)
    kv[first], q[first] = torch.randn(128).half(), torch.randn(4, 128).half()
    slots[first], positions[first] = len(cache) - 1, 0
    table = torch.tensor([[1.0] * 32 + [0.0] * 32])  # turns nothing
    begin_at(first)
    given = {"kv": kv, "cos_sin": table, "positions": positions, "cache": cache, "slots": slots}
    launch(loader, spec, (1, number(spec, "tiles")), q=q, q_latent=q_latent, **given)
    assert torch.equal(q_latent[first, :, 64:], q[first, :, 64:])
    assert torch.equal(cache[-1, 0, 0, 64:], kv[first, 64:])
    torch.testing.assert_close(cache[-1, 0, 0, :64], rms_norm(kv[first, None, :64], None, 1e-6)[0])


# Weights


def write_first_features(weight: QuantizedWeight, first: int, rows: QuantizedWeight) -> None:
    """Writes the first features of the rows of ``weight`` from ``first`` on."""
    place = slice(first, first + rows.out_features)
    weight.codes[place, : rows.codes.shape[1]] = rows.codes
    if weight.scale.ndim == 2:
        weight.scale[place, : rows.scale.shape[1]] = rows.scale
    else:
        weight.scale[place] = rows.scale


@pytest.mark.parametrize("weight", FORMATS)
def test_rows_of_few_row_weights(loader: KernelLoader, begin_at: Begin, weight: FewRowFormat) -> None:
    """The last 16 outputs over the first share of the features; such a head has 256,000 outputs of 12,288 features."""
    in_features = 2**21 if weight == "int4_weight_only" else 2**20  # of which a byte has two
    first, few, part = 2**12 if weight == "int4_weight_only" else 2**11, 16, 32
    out_features = first + few
    shape = FewRowShape(out_features, in_features, "fp16", weight)
    spec = few_row_specs(shape, 2, SplitK(few, part, 4, 1, in_features // part)).main
    x = torch.empty(2, in_features, dtype=torch.float16)
    x[:, :part] = torch.randn(2, part).half()
    drawn = (torch.randn(few, part) / 6).half()
    stored: Tensor | QuantizedWeight = drawn
    if weight == "plain":
        given = {"weight": wide(out_features, in_features)}
        given["weight"][first:, :part] = drawn
    else:
        stored = quantized(drawn, weight)
        whole = QuantizedWeight(weight, out_features, in_features, torch.device("cpu"))
        given = {"weight": whole.codes, "scale": whole.scale}
        assert whole.codes.numel() > WIDE
        write_first_features(whole, first, stored)
    sums = torch.full((2, out_features), torch.nan)  # of the first share
    begin_at(first // few)
    arguments = [x if each.name == "x" else given.get(each.name, sums) for each in spec.arguments[:-1]]
    loader.load(spec)((1, 1), *arguments, 2)
    torch.testing.assert_close(sums[:, first:], logits(x[:, :part], stored, None), rtol=1e-3, atol=1e-3)
    assert sums[:, :first].isnan().all()


@pytest.mark.parametrize("weight", get_args(WeightOnlyFormat))
def test_rows_of_dequantized_weights(loader: KernelLoader, begin_at: Begin, weight: WeightOnlyFormat) -> None:
    in_features, row = 2**20, 2**12 if weight == "int4_weight_only" else 2**11
    spec = dequantize_spec(in_features, weight, "fp16")
    whole = QuantizedWeight(weight, row + 1, in_features, torch.device("cpu"))
    block = number(spec, "block")
    drawn = quantized(torch.randn(1, block), weight)
    write_first_features(whole, row, drawn)
    out = wide(row + 1, in_features)
    begin_at(row * number(spec, "tiles"))
    launch(loader, spec, (1,), codes=whole.codes, scale=whole.scale, out=out)
    torch.testing.assert_close(out[row, :block].float(), drawn.rows(slice(None))[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("num_experts", "out_features"), [(66, 2**20), (1, 2**26 + 16)])
def test_rows_of_experts_weights(loader: KernelLoader, begin_at: Begin, num_experts: int, out_features: int) -> None:
    """The first outputs of the last of many experts; the last outputs of one expert."""
    spec = grouped_linear_spec(32, out_features, "fp16", GroupedTiling(16, 16, 32, 4, 1))
    weight, x = wide(num_experts, out_features, 32), torch.randn(3, 32).half()
    first = 0 if num_experts > 1 else out_features - 16
    drawn = torch.randn(16, 32).half()
    weight[-1, first : first + 16] = drawn
    out = torch.empty(3, out_features, dtype=torch.float16)
    tiles = torch.tensor([[num_experts - 1, 0, 3]], dtype=torch.int32)
    begin_at(first // 16)
    launch(loader, spec, (1,), x=x, weight=weight, tiles=tiles, num_tiles=torch.tensor([1]).int(), out=out)
    expected = x.float() @ drawn.float().T
    torch.testing.assert_close(out[:, first : first + 16].float(), expected, rtol=1e-2, atol=1e-2)


# Rows


@pytest.mark.parametrize("table_dtype", ["", "int8_weight_only"])
def test_rows_of_an_embedding(loader: KernelLoader, table_dtype: WeightOnlyFormat) -> None:
    size, num_tokens = 64, WIDE // 64 + 4
    ids = torch.tensor([num_tokens - 1, 3, num_tokens - 3], dtype=torch.int32)
    drawn, table = torch.randn(3, size).half(), None
    if table_dtype:
        stored = quantized(drawn, table_dtype)
        table = QuantizedWeight(table_dtype, num_tokens, size, torch.device("cpu"))
        table.codes[ids.long()], table.scale[ids.long()] = stored.codes, stored.scale
        drawn = stored.rows(slice(None)).half()
    else:
        table = wide(num_tokens, size)
        table[ids.long()] = drawn
    out = torch.full((3, size), torch.nan).half()
    kernel = EmbeddingKernel(loader.load(embedding_spec(size, "fp16", table_dtype=table_dtype)))
    kernel(ids, torch.full((3,), -1).int(), torch.zeros(1).int(), table, out)
    assert torch.equal(out, drawn)


def test_rows_of_positions(loader: KernelLoader) -> None:
    size, num_positions = 64, WIDE // 64 + 4
    table, position_table = torch.randn(4, size).half(), wide(num_positions, size)
    positions = torch.tensor([num_positions - 3, 0, num_positions - 5], dtype=torch.int32)
    position_table[positions.long() + 2] = torch.randn(3, size).half()
    out = torch.full((3, size), torch.nan).half()
    kernel = EmbeddingKernel(loader.load(embedding_spec(size, "fp16", position_offset=2)))
    kernel(
        torch.arange(3).int(), torch.full((3,), -1).int(), torch.zeros(1).int(), table, out, positions, position_table
    )
    assert torch.equal(out, table[:3] + position_table[positions.long() + 2])


def test_rows_of_a_gather(loader: KernelLoader) -> None:
    size, num_rows = 64, WIDE // 64 + 4
    table, which = wide(num_rows, size), torch.tensor([num_rows - 1, 0, num_rows - 3], dtype=torch.int32)
    table[which.long()] = torch.randn(3, size).half()
    out = torch.full((3, size), torch.nan).half()
    RowGatherKernel(loader.load(row_gather_spec(size, "fp16")))(which, table, out)
    assert torch.equal(out, table[which.long()])


def test_rows_of_a_norm(loader: KernelLoader, begin_at: Begin) -> None:
    size = 1024
    first = WIDE // size
    x, out, residual = (wide(first + 1, size) for _ in range(3))
    x[first], residual[first] = torch.randn(2, size).half()
    total, weight = x[first] + residual[first], torch.rand(size).half()
    begin_at(first)
    spec = norm_spec(NormShape("rms", size, "fp16", 1e-5, residual=True))
    launch(loader, spec, (1,), x=x, out=out, residual=residual, weight=weight)
    assert torch.equal(residual[first], total)
    torch.testing.assert_close(out[first], rms_norm(total[None], weight, 1e-5)[0], rtol=2**-9, atol=2**-9)


def test_rows_of_an_activation(loader: KernelLoader, begin_at: Begin) -> None:
    size = 1024
    first = WIDE // size
    x, out = wide(first + 1, 2 * size), wide(first + 1, size)
    x[first] = torch.randn(2 * size).half()
    begin_at(first)
    launch(loader, activation_spec("relu", size, "fp16", gated=True), (1,), x=x, out=out)
    gate, up = x[first].chunk(2)
    assert torch.equal(out[first], gate.relu() * up)


def test_rows_of_combined_experts(loader: KernelLoader, begin_at: Begin) -> None:
    size, top_k = 1024, 2
    first = WIDE // (size * top_k)
    outputs, out = wide((first + 1) * top_k, size), torch.empty(first + 1, size, dtype=torch.float16)
    weights = torch.empty(first + 1, top_k)
    outputs[-top_k:], weights[first] = torch.randn(top_k, size).half(), torch.tensor([0.5, 0.25])
    spec = combine_spec(size, top_k, "fp16")
    assert number(spec, "block") == size
    begin_at(first)
    launch(loader, spec, (1,), outputs=outputs, weights=weights, out=out)
    expected = (outputs[-top_k:].float() * weights[first, :, None]).sum(0)
    torch.testing.assert_close(out[first].float(), expected, rtol=2**-9, atol=2**-9)
