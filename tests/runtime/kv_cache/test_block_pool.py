"""The block pool: examples of each refusal and of what is kept and evicted, and random histories against counting."""

from __future__ import annotations

import random

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.kv_cache.block_pool import PADDING_BLOCK, BlockPool


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
        ([*held, held[0]], f"block {held[0]}: 1 references, 2 owners"),
        ([*held, free], "both free and held"),
        ([*held, PADDING_BLOCK], "foreign"),
        ([*held, 6], "foreign"),
    ]:
        with pytest.raises(AssertionError, match=complaint):
            pool.check_integrity(claimed)


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    assert not pool.is_shared(block)
    pool.share(block)
    pool.share(block)
    assert pool.is_shared(block)
    pool.check_integrity([block] * 3)
    pool.free([block, block])
    assert (pool.is_shared(block), pool.num_free) == (False, 2)
    with pytest.raises(InvalidArgumentError, match=f"not held so often are .{block}."):
        pool.free([block, block])
    pool.check_integrity([block])
    pool.free([block])
    assert pool.num_free == 3
    with pytest.raises(InvalidArgumentError, match="neither held nor cached"):
        pool.share(block)
    with pytest.raises(InvalidArgumentError, match="neither held nor cached"):
        pool.share(PADDING_BLOCK)


def test_published_blocks_are_kept_until_their_room_is_needed_the_oldest_first():
    evicted: list[int] = []
    pool = BlockPool(6, evicted.append)
    first, second, third = pool.allocate(3)
    for block in (first, second, third):
        pool.publish([block])
        assert pool.is_shared(block)  # whoever finds it relies on what it contains
    pool.free([second, first])
    pool.free([third])
    assert (pool.num_free, pool.num_cached) == (5, 3)
    assert len(pool.allocate(2)) == 2  # there are two that nobody needs
    assert evicted == []
    pool.share(first)
    assert (pool.num_free, pool.num_cached) == (2, 2)
    assert pool.allocate(3) is None
    assert evicted == []
    assert pool.allocate(1) == [second]
    assert evicted == [second]
    assert not pool.is_shared(second)
    pool.free([first])  # it was used since the third, so that goes next
    assert pool.allocate(2) == [first, third]
    assert evicted == [second, third, first]
    assert pool.published == set()


@pytest.mark.parametrize("seed", range(200))
def test_random_histories(seed):
    rng = random.Random(seed)
    num_blocks = rng.randint(2, 40)
    evicted: list[int] = []
    pool = BlockPool(num_blocks, evicted.append)
    free, cached, published = set(range(1, num_blocks)), [], set()
    held: list[int] = []
    for _ in range(120):
        match rng.choice(["allocate", "allocate", "free", "free wrongly", "share", "publish"]):
            case "allocate":
                n = rng.randint(0, max(1, num_blocks // 3))
                ids = pool.allocate(n)
                if n > len(free) + len(cached):
                    assert ids is None
                else:
                    given_up, cached = (
                        cached[: max(0, n - len(free))],
                        cached[max(0, n - len(free)) :],
                    )
                    assert evicted == given_up
                    evicted.clear()
                    free.update(given_up)
                    published.difference_update(given_up)
                    assert len(ids) == len(set(ids)) == n
                    assert set(ids) <= free
                    free.difference_update(ids)
                    held += ids
            case "free":
                rng.shuffle(held)
                kept = rng.randint(0, len(held))
                pool.free(iter(held[kept:]))
                for i in range(kept, len(held)):
                    if held[i] not in held[:kept] + held[i + 1 :]:
                        cached.append(held[i]) if held[i] in published else free.add(held[i])
                del held[kept:]
            case "free wrongly":
                wrong = rng.choice([*free, *cached, PADDING_BLOCK, num_blocks, -1])
                with pytest.raises(InvalidArgumentError):
                    pool.free([*held, wrong])
            case "share" if held or cached:
                block = rng.choice(held + cached)
                pool.share(block)
                held.append(block)
                if block in cached:
                    cached.remove(block)
            case "publish" if held:
                block = rng.choice(held)
                pool.publish([block])
                published.add(block)
        assert evicted == []
        assert (pool.num_free, pool.num_cached) == (len(free) + len(cached), len(cached))
        assert pool.published == published
        for block in set(held):
            assert pool.is_shared(block) == (held.count(block) > 1 or block in published)
        pool.check_integrity(held)
