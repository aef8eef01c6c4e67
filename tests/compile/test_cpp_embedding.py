"""C++ kernels of embeddings and of the residual stream: rows of tables in every format, and sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.add.cpp import AddKernel, add_spec
from fastgen.compile.ops.add.reference import scaled_add
from fastgen.compile.ops.embedding.cpp import EmbeddingKernel, embedding_spec
from fastgen.compile.ops.embedding.reference import embed, embed_some, resolve_token_ids
from fastgen.compile.spec import KernelSpec, torch_dtype
from fastgen.compile.weights.packed import PackedWeight, WeightFormat, formats_of
from tests.compile.arches import in_each_width

ARCHES = CPP_ARCHES[CPP_ARCHES.index(cpp_arch(device.current("cpu"))) :]
SIZES = ((1, 1), (5, 3), (33, 32), (70, 37), (131, 96))  # rows and features: within a panel, a group, and across
CASES = [
    pytest.param(weight_format, arch, id=f"{weight_format}-{arch}", marks=[] if is_fast else pytest.mark.slow)
    for arch in ARCHES
    for weight_format in formats_of(arch)
    # each format once, in one of two widths
    for is_fast in [arch == ("portable" if weight_format in ("fp16", "int8_weight_only") else ARCHES[0])]
]


@pytest.fixture(scope="module")
def loaders() -> dict[str, KernelLoader]:
    return {arch: KernelLoader(CppBuilder(arch)) for arch in ARCHES}


def load(loader: KernelLoader, spec: KernelSpec) -> EmbeddingKernel:
    load_thread_pool(loader)
    return EmbeddingKernel(loader.load(spec))


def some_ids(num_rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, whose they are where they are not on the host yet, and what was sampled: 23 tokens of 4 sequences."""
    ids, sampled = (torch.randint(num_rows, (count,), dtype=torch.int32, generator=generator) for count in (23, 4))
    source = torch.randint(-1, 4, (23,), dtype=torch.int32, generator=generator)
    ids[source >= 0] = -(2**31)  # never to be looked at
    return ids, source, sampled


@pytest.mark.parametrize(("weight_format", "arch"), CASES)
def test_rows_of_a_packed_table(loaders: dict[str, KernelLoader], weight_format: WeightFormat, arch: str) -> None:
    """The very numbers that the linear kernels multiply, scaled or not."""
    generator = torch.Generator().manual_seed(3)
    for scale in (None, 8.0):
        kernel = load(loaders[arch], embedding_spec(arch, weight_format, packed=True, scale=scale))
        for num_rows, size in SIZES:
            weight = PackedWeight(weight_format, num_rows, size, arch)
            weight.write(0, torch.randn(num_rows, size, generator=generator))
            ids = some_ids(num_rows, generator)
            out = torch.full((25, size), torch.nan)
            kernel(weight, out[1:24], *ids)
            expected = weight.rows(resolve_token_ids(*ids).long())
            assert torch.equal(out[1:24], expected if scale is None else expected * scale), (num_rows, size)
            assert out[[0, 24]].isnan().all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_rows_of_a_table_as_it_is_stored(loaders: dict[str, KernelLoader], dtype: str) -> None:
    """Tokens looked up, positions added at their offset."""
    generator, arch = torch.Generator().manual_seed(4), ARCHES[0]
    tokens = load(loaders[arch], embedding_spec(arch, dtype, packed=False))
    positions = load(loaders[arch], embedding_spec(arch, dtype, packed=False, offset=2))
    for num_rows, size in SIZES:
        table, places = (torch.randn(rows, size, generator=generator).to(torch_dtype(dtype)) for rows in (num_rows, 42))
        ids = some_ids(num_rows, generator)
        where = torch.randint(40, (23,), dtype=torch.int32, generator=generator)
        out = torch.full((23, size), torch.nan)
        tokens(table, out, *ids)
        looked_up = embed(resolve_token_ids(*ids), table).float()
        assert torch.equal(out, looked_up)
        positions(places, out, where)
        assert torch.equal(out, looked_up + embed(where + 2, places).float())


@pytest.mark.parametrize("packed", [False, True])
def test_other_ranks_rows_are_zeros(loaders: dict[str, KernelLoader], packed: bool) -> None:
    generator, arch = torch.Generator().manual_seed(5), ARCHES[0]
    for num_rows, size in ((25, 3), (33, 32)):
        kernel = load(loaders[arch], embedding_spec(arch, "fp32", packed=packed, scale=2.0, rows=(20, num_rows)))
        table = torch.randn(num_rows, size, generator=generator)
        weight = PackedWeight("fp32", num_rows, size, arch)
        weight.write(0, table)
        ids, out = some_ids(80, generator), torch.full((23, size), torch.nan)
        kernel(weight if packed else table, out, *ids)
        assert torch.equal(out, 2 * embed_some(resolve_token_ids(*ids), table, 20))
        assert 0 < out.any(1).sum() < 23


@pytest.mark.parametrize("arch", in_each_width(ARCHES))
def test_sums(loaders: dict[str, KernelLoader], arch: str) -> None:
    load_thread_pool(loaders[arch])
    for scale in (None, 0.22):
        kernel = AddKernel(loaders[arch].load(add_spec(arch, scale)))
        for shape in ((0, 5), (1, 1), (3, 17), (70, 513)):
            framed, y = torch.randn(shape[0] + 2, shape[1]), torch.randn(shape)
            x, before = framed[1:-1], framed.clone()
            assert kernel(x, y) is x
            assert torch.equal(x, scaled_add(before[1:-1], y, scale))
            assert torch.equal(framed[[0, -1]], before[[0, -1]])


def test_sums_of_other_shapes_are_refused(loaders: dict[str, KernelLoader]) -> None:
    load_thread_pool(loaders[ARCHES[0]])
    kernel = AddKernel(loaders[ARCHES[0]].load(add_spec(ARCHES[0])))
    with pytest.raises(ValueError, match=r"x \(2, 3\), y \(3, 2\): expected two contiguous tensors of one shape"):
        kernel(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="contiguous"):
        kernel(torch.zeros(2, 3), torch.zeros(3, 2).T)
