"""The block pool: examples of each refusal, and random histories against a set."""

from __future__ import annotations

import random

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.block_pool import PADDING_BLOCK, BlockPool


def test_every_block_but_the_padding_block_is_handed_out_once():
    pool = BlockPool(6)
    assert (pool.capacity, pool.num_free) == (5, 5)
    ids = pool.allocate(5)
    assert ids is not None
    assert sorted(ids) == [1, 2, 3, 4, 5]
    assert PADDING_BLOCK not in ids
    assert pool.num_free == 0
    assert pool.allocate(1) is None
    pool.check_integrity(ids)


def test_allocation_is_all_or_nothing():
    pool = BlockPool(5)
    held = pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check_integrity(held)
    held += pool.allocate(1)
    assert sorted(held) == [1, 2, 3, 4]
    assert pool.allocate(0) == []
    pool.free(held)
    assert pool.num_free == 4
    pool.check_integrity([])


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks):
    with pytest.raises(InvalidArgumentError, match=f"num_blocks is {num_blocks}.*padding block and at least one more"):
        BlockPool(num_blocks)


@pytest.mark.parametrize("wrong", ["free already", "twice", "padding", "negative", "foreign", "beyond"])
def test_wrong_frees_are_refused_and_change_nothing(wrong):
    pool = BlockPool(8)
    held = pool.allocate(4)
    returned = pool.allocate(1)
    pool.free(returned)
    bad = {
        "free already": returned,
        "twice": [held[1]],
        "padding": [PADDING_BLOCK],
        "negative": [held[3] - 8],
        "foreign": [next(i for i in range(1, 8) if i not in held and i not in returned)],
        "beyond": [8],
    }[wrong]
    for ids in ([held[0], held[1], *bad], [*bad, held[0], held[1]]):
        with pytest.raises(InvalidArgumentError, match="cannot be freed"):
            pool.free(ids)
        assert pool.num_free == 3
        pool.check_integrity(held)
    pool.free(held)
    assert pool.num_free == 7
    pool.check_integrity([])


def test_integrity_names_what_is_wrong():
    pool = BlockPool(6)
    held = pool.allocate(3)
    pool.check_integrity(held)
    free = next(i for i in range(1, 6) if i not in held)
    for claimed, complaint in [
        (held[:-1], "leaked"),
        ([*held, held[0]], "two owners"),
        ([*held, free], "both free and held"),
        ([*held, PADDING_BLOCK], "foreign"),
        ([*held, 6], "foreign"),
    ]:
        with pytest.raises(AssertionError, match=complaint):
            pool.check_integrity(claimed)


@pytest.mark.parametrize("seed", range(200))
def test_random_histories(seed):
    rng = random.Random(seed)
    num_blocks = rng.randint(2, 40)
    pool = BlockPool(num_blocks)
    free, held = set(range(1, num_blocks)), []
    for _ in range(100):
        match rng.choice(["allocate", "free", "free wrongly"]):
            case "allocate":
                n = rng.randint(0, max(1, num_blocks // 3))
                ids = pool.allocate(n)
                if n > len(free):
                    assert ids is None
                else:
                    assert ids is not None
                    assert len(ids) == n
                    assert set(ids) <= free
                    assert len(set(ids)) == n
                    free.difference_update(ids)
                    held += ids
            case "free":
                rng.shuffle(held)
                kept = rng.randint(0, len(held))
                pool.free(iter(held[kept:]))
                free.update(held[kept:])
                del held[kept:]
            case "free wrongly":
                wrong = rng.choice([*free, PADDING_BLOCK, num_blocks, -1])
                with pytest.raises(InvalidArgumentError):
                    pool.free([*held, wrong])
        assert pool.num_free == len(free)
        pool.check_integrity(held)
