"""Triton's activations, embeddings and row gathers: interpreted, against torch, and built for GPUs not here."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TRITON_ARCHES, TritonBuilder
from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.compile.ops.activation.triton import ActivationKernel, activation_spec
from fastgen.compile.ops.embedding.reference import embed, embed_some, resolve_token_ids
from fastgen.compile.ops.embedding.triton import EmbeddingKernel, RowGatherKernel, embedding_spec, row_gather_spec
from fastgen.compile.spec import torch_dtype

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, and right: 1 / inf is 0
# Of one rounding to 16 bits, or two where gated; the interpreter cuts bits off where hardware rounds to bf16.
TOLERANCE = {"fp32": 1e-5, "fp16": 2**-9, "bf16": 2**-6}
DTYPES = tuple(TOLERANCE)
SIZES = (1, 2, 31, 64, 100, 1024, 1030)


@pytest.fixture(scope="module")
def loader(triton_kernels: KernelLoader) -> KernelLoader:
    return triton_kernels


def check(found: Tensor, want: Tensor, dtype: str, where: str) -> None:
    """Up to what ``found`` is rounded; and the row behind it is still NaN."""
    allowed = TOLERANCE[dtype]
    assert found[-1].isnan().all(), where
    torch.testing.assert_close(
        found[:-1].float(), want.float(), rtol=allowed, atol=allowed / 8, msg=lambda text: f"{where}: {text}"
    )


# Activations


def check_activation(
    loader: KernelLoader, kind: str, size: int, dtype: str, *, gated: bool, gap: int, rows: int
) -> None:
    width = size * (2 if gated else 1)
    spec = activation_spec(kind, size, dtype, gated=gated, x_stride=width + gap if gap else 0)
    generator = torch.Generator().manual_seed(size)
    between = torch.full((rows, width + gap), torch.nan, dtype=torch_dtype(dtype))
    x = between[:, :width]
    x.copy_(4 * torch.randn(rows, width, generator=generator))
    out = torch.full((rows + 1, size), torch.nan, dtype=x.dtype)
    ActivationKernel(loader.load(spec))(x, out[:-1])
    want = ACTIVATIONS[kind](x[:, :size].float())
    if gated:
        want = want * x[:, size:].float()
    check(out, want, dtype, f"{rows} rows, {spec}")


def test_every_activation(loader: KernelLoader) -> None:
    draw = random.Random(8)
    for kind, gated, dtype in itertools.product(ACTIVATIONS, (False, True), DTYPES):
        check_activation(
            loader, kind, draw.choice(SIZES), dtype, gated=gated, gap=draw.choice([0, 3]), rows=draw.choice([1, 4])
        )
    for rows in (0, 1, 7):
        check_activation(loader, "silu", 2100, "fp32", gated=True, gap=8, rows=rows)


def test_activations_of_large_numbers(loader: KernelLoader) -> None:
    """Activations are right where an exponential overflows, and at zero; what is not a number stays so."""
    x = torch.tensor([[0.0, -0.0, 20.0, -20.0, 90.0, -90.0, 1e4, -1e4, 3e4, -3e4, torch.nan]])
    for kind, function in ACTIVATIONS.items():
        out = torch.empty_like(x)
        ActivationKernel(loader.load(activation_spec(kind, 11, "fp32", gated=False)))(x, out)
        where = f"{kind}: "
        torch.testing.assert_close(
            out, function(x), rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda text, where=where: where + text
        )


def test_kinds_of_one_function_share_a_kernel() -> None:
    names = {activation_spec(kind, 64, "bf16", gated=True).name for kind in ACTIVATIONS}
    assert len(names) == len(set(ACTIVATIONS.values())) == 6
    with pytest.raises(ValueError, match="x_stride=100: rows of 128 features would overlap"):
        activation_spec("silu", 64, "bf16", gated=True, x_stride=100)


# Embeddings


def check_embedding(
    loader: KernelLoader, size: int, dtype: str, table_dtype: str, scale: float, offset: int | None, rows: int
) -> None:
    spec = embedding_spec(size, dtype, table_dtype=table_dtype, scale=scale, position_offset=offset)
    generator = torch.Generator().manual_seed(size)
    table, places = (torch.randn(20, size, generator=generator).to(torch_dtype(table_dtype)) for _ in range(2))
    ids, positions = (torch.randint(0, 18, (rows,), generator=generator).int() for _ in range(2))
    sampled = torch.randint(0, 20, (3,), generator=generator).int()
    source = torch.randint(-1, 3, (rows,), generator=generator).int()
    ids[source >= 0] = 2**30  # must not be looked up
    out = torch.full((rows + 1, size), torch.nan, dtype=torch_dtype(dtype))
    EmbeddingKernel(loader.load(spec))(ids, source, sampled, table, out[:-1], positions, places)
    want = embed(resolve_token_ids(ids, source, sampled), table).to(out.dtype)
    want = want * scale if scale != 1 else want
    if offset is not None:
        want = want + embed(positions + offset, places).to(out.dtype)
    check(out, want, dtype, f"{rows} rows, {spec}")


def test_embeddings(loader: KernelLoader) -> None:
    draw = random.Random(9)
    for dtype, table_dtype, scale, offset in itertools.product(
        ("fp32", "fp16", "bf16"), ("fp32", "bf16"), (1.0, 45.25), (None, 0, 2)
    ):
        check_embedding(loader, draw.choice(SIZES), dtype, table_dtype, scale, offset, draw.choice([0, 1, 5]))


@pytest.mark.parametrize("offset", [None, 2])
def test_other_ranks_rows_are_zeros(loader: KernelLoader, offset: int | None) -> None:
    """Positions are added to them all the same."""
    generator = torch.Generator().manual_seed(6)
    table, places = (torch.randn(20, 33, generator=generator) for _ in range(2))
    ids, positions = (torch.randint(0, most, (9,), generator=generator).int() for most in (80, 18))
    ids[:4] = torch.tensor([19, 20, 39, 40])  # on either side of the first and the last
    source, sampled = torch.full((9,), -1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    out = torch.full((10, 33), torch.nan)
    spec = embedding_spec(33, "fp32", scale=2.0, position_offset=offset, rows=(20, 20))
    EmbeddingKernel(loader.load(spec))(ids, source, sampled, table, out[:-1], positions, places)
    want = 2 * embed_some(ids, table, 20)
    assert 0 < want.any(1).sum() < 9
    check(out, want if offset is None else want + embed(positions + offset, places), "fp32", str(spec))


def test_row_gathers(loader: KernelLoader) -> None:
    for size, dtype, rows in itertools.product((1, 33, 1030), DTYPES, (0, 1, 6)):
        generator = torch.Generator().manual_seed(rows)
        table = torch.randn(9, size, generator=generator).to(torch_dtype(dtype))
        indices = torch.randint(0, 9, (rows,), generator=generator).int()
        out = torch.full((rows + 1, size), torch.nan, dtype=table.dtype)
        RowGatherKernel(loader.load(row_gather_spec(size, dtype)))(indices, table, out[:-1])
        assert out[-1].isnan().all()
        assert torch.equal(out[:-1], embed(indices, table))


def test_rows_beyond_32_bits(loader: KernelLoader) -> None:
    """A table of more than 2³¹ numbers, of which only these rows are ever touched."""
    num_rows = 2**31 // 4096 + 3
    table = torch.empty(num_rows, 4096, dtype=torch.float16)
    indices = torch.tensor([num_rows - 1, 0, num_rows - 2], dtype=torch.int32)
    table[indices] = torch.randn(3, 4096).half()
    out = torch.empty(3, 4096, dtype=torch.float16)
    RowGatherKernel(loader.load(row_gather_spec(4096, "fp16")))(indices, table, out)
    assert torch.equal(out, table[indices])


# Built for GPUs that are not here

SHIPPED = [
    *(activation_spec(kind, 14336, "bf16", gated=True) for kind in ("silu", "gelu", "gelu_new", "quick_gelu")),
    *(activation_spec(kind, 16384, "fp32", gated=False) for kind in ("relu", "relu2", "gelu")),
    activation_spec("silu", 1408, "fp16", gated=True, x_stride=4096),
    embedding_spec(4096, "bf16", scale=64.0, position_offset=2),
    embedding_spec(2560, "bf16", table_dtype="fp32"),
    row_gather_spec(4096, "bf16"),
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", TRITON_ARCHES)
def test_all_are_built_without_spills(arch: str, tmp_path: Path) -> None:
    loader = KernelLoader(TritonBuilder(arch), cache=KernelCache(tmp_path), num_jobs=1)
    for spec, entry in zip(SHIPPED, loader.build(SHIPPED), strict=True):
        assert entry.report["spill_bytes"] == entry.report["shared_bytes"] == 0, f"{spec}: {entry.report}"
        assert entry.report["registers"] <= 64, f"{spec}: {entry.report}"
