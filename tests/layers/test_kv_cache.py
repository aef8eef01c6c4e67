"""The paged KV cache: which layers share storage, and that no two layers ever share a slot of it."""

from __future__ import annotations

import ctypes
import random
import resource
import sys

import pytest
import torch

from fastgen.compile.backends.backend import Backend
from fastgen.compile.backends.cpp import CppBackend
from fastgen.compile.backends.reference import REFERENCE
from fastgen.compile.backends.target import TargetFacts
from fastgen.layers.kv_cache import KVShape, PagedKVCache

CPU = torch.device("cpu")


def make(groups: list[int], dtype: torch.dtype = torch.float32) -> PagedKVCache:
    shapes = [KVShape(2, 6)] * len(set(groups))
    return PagedKVCache(groups, shapes, num_blocks=9, block_size=4, dtype=dtype, device=CPU)


@pytest.mark.parametrize(
    ("groups", "depth"),
    [([0], 1), ([0, 0, 0], 3), ([0, 1], 1), ([0, 1, 0, 1, 1], 3), ([0, 1, 1, 1, 0, 2, 1], 4), ([1, 0, 0], 2)],
)
def test_the_nth_layers_of_all_groups_share_one_storage(groups: list[int], depth: int) -> None:
    cache = make(groups)
    assert [layer.group for layer in cache.layers] == groups
    for index, layer in enumerate(cache.layers):
        assert layer.k.shape == layer.v.shape == (9, 4, 2, 6)
        place = groups[:index].count(groups[index])
        k, v = cache.storage[place]
        assert layer.k is k
        assert layer.v is v
    assert len(cache.storage) == depth
    assert len({tensor.data_ptr() for pair in cache.storage for tensor in pair}) == 2 * depth


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_its_size(dtype: torch.dtype, num_bytes: int) -> None:
    cache = make([0, 1, 0, 1, 1], dtype)
    assert all(tensor.dtype == dtype for pair in cache.storage for tensor in pair)
    assert cache.size_bytes == 3 * 2 * 9 * 4 * 2 * 6 * num_bytes


def test_a_latent_cache_keeps_no_values() -> None:
    cache = PagedKVCache([0, 0], [KVShape(1, 6, 4)], num_blocks=9, block_size=4, dtype=torch.float32, device=CPU)
    assert cache.size_bytes == 2 * 9 * 4 * 6 * 4


def test_what_one_layer_writes_in_a_block_of_its_group_no_other_changes() -> None:
    rng = random.Random(1)
    groups = [0, 1, 0, 2, 1, 1, 0]
    cache = make(groups)
    owner = {block: block % 3 for block in range(9)}  # which group a block was given to
    writes = [(layer, block) for layer in range(len(groups)) for block in owner if owner[block] == groups[layer]]
    rng.shuffle(writes)
    for number, (layer, block) in enumerate(writes):
        cache.layers[layer].k[block] = number
        cache.layers[layer].v[block] = -number
    for number, (layer, block) in enumerate(writes):
        assert (cache.layers[layer].k[block] == number).all()
        assert (cache.layers[layer].v[block] == -number).all()


@pytest.mark.parametrize("backend", [REFERENCE, CppBackend(TargetFacts("cpp"))], ids=["reference", "cpp"])
@pytest.mark.parametrize("latent_dim", [None, 4])
def test_copies_reach_every_layer_of_their_group_and_no_other_block(backend: Backend, latent_dim: int | None) -> None:
    """Against a copy made block by block of what was there before, so that a chain or a swap of blocks comes out."""
    groups, pairs = [0, 1, 0, 1, 1], [(2, 3), (3, 4), (5, 6), (6, 5), (2, 7)]
    cache = PagedKVCache(
        groups,
        [KVShape(1 if latent_dim else 2, 6, latent_dim), KVShape(2, 6)],
        num_blocks=9,
        block_size=4,
        dtype=torch.bfloat16,
        device=CPU,
        backend=backend,
    )
    for k, v in cache.storage:
        for tensor in (v, k):  # of latent layers the values are part of the keys
            tensor.copy_(torch.randn(tensor.shape))
    before = [(layer.k.clone(), layer.v.clone()) for layer in cache.layers]
    untouched = [(k.data_ptr(), v.data_ptr()) for k, v in cache.storage]
    cache.copy_blocks(0, [source for source, _ in pairs], [destination for _, destination in pairs])
    of_group = {id(layer.k) for layer in cache.layers if layer.group == 0}
    for layer, (k, v) in zip(cache.layers, before, strict=True):
        copied = {destination: source for source, destination in pairs} if id(layer.k) in of_group else {}
        for block in range(9):
            assert torch.equal(layer.k[block], k[copied.get(block, block)])
            assert torch.equal(layer.v[block], v[copied.get(block, block)])
    assert untouched == [(k.data_ptr(), v.data_ptr()) for k, v in cache.storage]


def resident_share(tensors: list[torch.Tensor]) -> float:
    """Returns how much of the memory of ``tensors`` is resident, as the system reports it; see mincore(2)."""
    page, num_pages, num_resident = resource.getpagesize(), 0, 0
    for tensor in tensors:
        start = tensor.data_ptr() // page * page
        length = tensor.data_ptr() + tensor.nbytes - start
        found = (ctypes.c_ubyte * -(-length // page))()
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), found) == 0, ctypes.get_errno()
        num_pages += len(found)
        num_resident += sum(each & 1 for each in found)
    return num_resident / num_pages


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize("backend", [REFERENCE, CppBackend(TargetFacts("cpp"))], ids=["reference", "cpp"])
def test_touched_it_has_all_of_its_memory(backend: Backend) -> None:
    cache = PagedKVCache(
        [0, 0], [KVShape(4, 64)], num_blocks=1000, block_size=16, dtype=torch.float32, device=CPU,
        backend=backend,
    )  # fmt: skip
    assert cache.size_bytes > 60e6
    tensors = [tensor for pair in cache.storage for tensor in pair]
    if backend is not REFERENCE:  # the other's memory may be some that this process had before
        assert resident_share(tensors) < 0.2
    cache.touch()
    assert resident_share(tensors) > 0.99
