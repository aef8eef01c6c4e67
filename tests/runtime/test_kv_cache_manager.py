"""The KV cache manager: block tables, and the arithmetic of what fits, against counting."""

from __future__ import annotations

import random

import pytest

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.kv_cache_manager import Allocation, BlockCopy, KVCacheManager, TableEntry, max_blocks_held
from fastgen.runtime.request import Request, Sequence
from fastgen.runtime.sampling_params import SamplingParams


def sequence(num_tokens: int = 100, request_id: int = 0) -> Sequence:
    return Request(request_id, range(num_tokens), SamplingParams(n=1, max_new_tokens=1), 0.0).sequences[0]


def test_tables_grow_by_whole_blocks():
    """The picture of the module: 6 tokens computed in 2 blocks of 4, and a step of 5 more appends a third."""
    kv = KVCacheManager(num_blocks=8, block_size=4)
    seq = sequence(12)
    first = kv.allocate(seq, 6).appended
    assert [(group, index) for group, index, _ in first] == [(0, 0), (0, 1)]
    seq.num_computed_tokens = 6
    assert kv.allocate(seq, 2) == Allocation([], [])
    third = kv.allocate(seq, 5).appended
    assert [(group, index) for group, index, _ in third] == [(0, 2)]
    assert kv.allocate(seq, 5) == Allocation([], [])  # asked again, as after a step that failed
    assert seq.block_tables == [[block_id for _, _, block_id in first + third]]
    kv.check_integrity([seq])
    kv.free(seq)
    assert seq.block_tables == []
    assert kv.pool.num_free == 7
    kv.free(seq)  # holds nothing: nothing to take back
    kv.check_integrity([])


def test_groups_get_their_blocks_together_or_not_at_all():
    kv = KVCacheManager(num_blocks=9, block_size=2, windows=(None,) * 3)  # 8 usable: 2 for each group, and 2 left over
    seq = sequence()
    appended = kv.allocate(seq, 3).appended
    assert sorted((group, index) for group, index, _ in appended) == [(g, i) for g in range(3) for i in range(2)]
    for group, index, block_id in appended:
        assert seq.block_tables[group][index] == block_id
    tables = [list(table) for table in seq.block_tables]
    assert kv.pool.num_free == 2
    assert kv.allocate(seq, 5) is None
    assert (kv.pool.num_free, seq.block_tables) == (2, tables)
    other = sequence(request_id=1)
    assert kv.allocate(other, 1) is None
    assert (kv.pool.num_free, other.block_tables) == (2, [])
    kv.check_integrity([seq, other])


@pytest.mark.parametrize(("block_size", "num_groups"), [(0, 1), (-1, 1), (4, 0)])
def test_impossible_shapes_are_refused(block_size, num_groups):
    with pytest.raises(InvalidArgumentError, match="must be at least 1"):
        KVCacheManager(8, block_size, (None,) * num_groups)


def test_a_window_in_which_nothing_is_seen_is_refused():
    with pytest.raises(InvalidArgumentError, match="a token sees at least itself"):
        KVCacheManager(8, 4, (None, 0))


def test_refusal_tells_the_arithmetic():
    kv = KVCacheManager(num_blocks=11, block_size=16)  # 160 tokens
    kv.check_fits(100, 61)
    with pytest.raises(RequestTooLargeError) as refused:
        kv.check_fits(100, 62)
    assert "ceil((100 + 62 - 1) / 16) = 11 blocks, the KV cache has 10" in str(refused.value)
    assert "at most 161" in str(refused.value)
    with pytest.raises(
        RequestTooLargeError, match=r"needs 2 \* ceil\(\(100 \+ 62 - 1\) / 16\) = 22 blocks.*at most 81:"
    ):
        KVCacheManager(num_blocks=11, block_size=16, windows=(None, None)).check_fits(100, 62)


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_what_fits_is_what_can_be_allocated(block_size, num_groups):
    """Refused exactly where an empty cache cannot hold all tokens but the last, and the limit named is the limit."""
    for num_blocks in range(2, 12):
        kv = KVCacheManager(num_blocks, block_size, (None,) * num_groups)
        limit = 0  # the longest prompt and new tokens together that fit
        for total in range(2, num_blocks * block_size + 3):
            seq = sequence(total)
            possible = kv.allocate(seq, total - 1) is not None
            kv.free(seq)
            for num_prompt_tokens in {1, total // 2, total - 1}:
                if possible:
                    limit = total
                    kv.check_fits(num_prompt_tokens, total - num_prompt_tokens)
                else:
                    with pytest.raises(RequestTooLargeError, match=f"at most {max(limit, 1)}:"):
                        kv.check_fits(num_prompt_tokens, total - num_prompt_tokens)


@pytest.mark.parametrize("seed", range(150))
def test_random_histories(seed):
    rng = random.Random(seed)
    block_size, num_groups = rng.randint(1, 5), rng.randint(1, 3)
    kv = KVCacheManager(rng.randint(2, 30), block_size, (None,) * num_groups)
    sequences = [sequence(200, i) for i in range(4)]

    def blocks_for(num_tokens: int) -> int:
        return num_groups * len(range(0, num_tokens, block_size))

    for _ in range(80):
        seq = rng.choice(sequences)
        held = sum(len(table) for table in seq.block_tables)
        others = sum(len(table) for s in sequences for table in s.block_tables) - held
        assert kv.pool.num_free == kv.pool.capacity - held - others
        before = [list(table) for table in seq.block_tables]
        most = max(
            n
            for n in range(-seq.num_computed_tokens, 200)
            if max(held, blocks_for(seq.num_computed_tokens + n)) <= kv.pool.capacity - others
        )
        assert kv.max_tokens(seq) == most
        match rng.choice(["allocate", "allocate", "compute", "free"]):
            case "allocate":
                n = rng.randint(1, 12)
                allocation = kv.allocate(seq, n)
                if n > most:
                    assert allocation is None
                    assert seq.block_tables == before
                else:
                    appended = allocation.appended
                    assert len(appended) == max(0, blocks_for(seq.num_computed_tokens + n) - held)
                    for group, index, block_id in appended:
                        assert seq.block_tables[group][index] == block_id
                    for table, old in zip(seq.block_tables, before, strict=False):  # there may be none before
                        assert table[: len(old)] == old
            case "compute" if before:
                places = len(before[0]) * block_size
                seq.num_computed_tokens = rng.randint(seq.num_computed_tokens, places)
            case "free":
                kv.free(seq)
                seq.num_computed_tokens = 0
        kv.check_integrity(sequences)


def test_integrity_sees_what_the_pool_cannot():
    kv = KVCacheManager(num_blocks=10, block_size=2, windows=(None, None))
    seq = sequence()
    kv.allocate(seq, 4)
    kv.check_integrity([seq])
    seq.num_computed_tokens = 5
    with pytest.raises(AssertionError, match="blocks for 4 tokens only"):
        kv.check_integrity([seq])
    seq.num_computed_tokens = 4
    seq.block_tables[0].append(seq.block_tables[1].pop())
    with pytest.raises(AssertionError, match="differ in length"):
        kv.check_integrity([seq])
    seq.block_tables = [[block_id for table in seq.block_tables for block_id in table]]
    with pytest.raises(AssertionError, match="1 block tables"):
        kv.check_integrity([seq])
