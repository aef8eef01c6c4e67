"""The paged KV cache: which layers share storage, and that no two layers ever share a slot of it."""

from __future__ import annotations

import random

import pytest
import torch

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
