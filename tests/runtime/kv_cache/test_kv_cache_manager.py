"""The KV cache manager: block tables, and the arithmetic of what fits, against counting."""

from __future__ import annotations

import random

import pytest

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.kv_cache.block_tables import Allocation, BlockCopy, TableEntry, max_blocks_held
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams


def sequence(num_tokens: int = 100, request_id: int = 0) -> Sequence:
    return Request(request_id, range(num_tokens), SamplingParams(n=1, max_new_tokens=1), 0.0).sequences[0]


def test_tables_grow_by_whole_blocks():
    """The picture of the module: 6 tokens computed in 2 blocks of 4, and a step of 5 more appends a third."""
    kv = KVCacheManager(num_blocks=8, block_size=4)
    seq = sequence(12)
    assert kv.allocate(seq, 6) == Allocation(0, [])
    first = list(seq.block_tables[0])
    assert len(first) == 2
    seq.num_computed_tokens = 6
    assert kv.allocate(seq, 2) == Allocation(2, [])
    assert seq.block_tables == [first]
    assert kv.allocate(seq, 5) == Allocation(2, [])
    assert (seq.block_tables[0][:2], len(seq.block_tables[0])) == (first, 3)
    assert kv.allocate(seq, 5) == Allocation(3, [])  # asked again, as after a step that failed
    assert len(set(seq.block_tables[0])) == 3
    kv.check_integrity([seq])
    kv.free(seq)
    assert seq.block_tables == []
    assert kv.pool.num_free == 7
    kv.free(seq)  # holds nothing: nothing to take back
    kv.check_integrity([])


def test_groups_get_their_blocks_together_or_not_at_all():
    kv = KVCacheManager(num_blocks=9, block_size=2, windows=(None,) * 3)  # 8 usable: 2 for each group, and 2 left over
    seq = sequence()
    assert kv.allocate(seq, 3) == Allocation(0, [])
    tables = [list(table) for table in seq.block_tables]
    assert [len(table) for table in tables] == [2, 2, 2]
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
    kv.capacity.check_fits(100, 61)
    with pytest.raises(RequestTooLargeError) as refused:
        kv.capacity.check_fits(100, 62)
    assert "ceil((100 + 62 - 1) / 16) = 11 blocks, the KV cache has 10" in str(refused.value)
    assert "at most 161" in str(refused.value)
    with pytest.raises(
        RequestTooLargeError, match=r"needs 2 \* ceil\(\(100 \+ 62 - 1\) / 16\) = 22 blocks.*at most 81:"
    ):
        KVCacheManager(num_blocks=11, block_size=16, windows=(None, None)).capacity.check_fits(100, 62)


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
                    kv.capacity.check_fits(num_prompt_tokens, total - num_prompt_tokens)
                else:
                    with pytest.raises(RequestTooLargeError, match=f"at most {max(limit, 1)}:"):
                        kv.capacity.check_fits(num_prompt_tokens, total - num_prompt_tokens)


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
                    assert allocation.first == (len(before[0]) if before else 0)
                    assert sum(map(len, seq.block_tables)) - held == max(
                        0, blocks_for(seq.num_computed_tokens + n) - held
                    )
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


# Sharing


def compute(kv: KVCacheManager, seq: Sequence, num_tokens: int) -> Allocation:
    """A step that computes the next ``num_tokens`` tokens of ``seq``."""
    allocation = kv.allocate(seq, num_tokens)
    assert allocation is not None
    seq.num_computed_tokens += num_tokens
    kv.copies_done(allocation.copies)
    kv.advance(seq)
    return allocation


def caching(num_blocks: int = 20, windows: tuple[int | None, ...] = (None,)) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, windows, max_chunk=8, prefix_caching=True)


def test_full_blocks_are_found_by_prompts_that_begin_alike_but_for_the_last_token():
    kv = caching()
    first, second, whole = sequence(12), sequence(13, 1), sequence(12, 2)
    compute(kv, first, 11)
    table = list(first.block_tables[0])
    assert kv.attach_cached(second) == [TableEntry(0, 0, table[0]), TableEntry(0, 1, table[1])]
    assert (second.num_computed_tokens, second.num_cached_tokens) == (8, 8)  # the third was not full
    compute(kv, first, 1)
    kv.free(first)
    assert kv.pool.num_free == 17  # those that the second holds are not free, the third is cached
    assert kv.attach_cached(whole) == kv.attach_cached(second) == [TableEntry(0, i, table[i]) for i in range(2)]
    assert whole.num_computed_tokens == 8  # its last block is computed again, in a block of its own
    assert compute(kv, whole, 4).first == 2
    assert whole.block_tables[0][2] != table[2]
    kv.detach(second)
    assert (second.block_tables, second.num_computed_tokens, second.num_cached_tokens) == ([], 0, 0)
    assert vars(kv.prefix_cache.statistics) == {
        "lookup_tokens": 12, "hit_tokens": 8, "evictions": 0
    }  # fmt: skip
    kv.check_integrity([whole])
    third = sequence(13, 3)
    assert kv.attach_cached(third)[2].block_id == table[2]  # the block that was there first
    kv.check_integrity([whole, third])


def test_prompt_logprobs_need_every_token_and_nothing_is_looked_up():
    kv = caching()
    compute(kv, sequence(9), 8)
    asking = Request(1, range(9), SamplingParams(max_new_tokens=1, prompt_logprobs=0), 0.0).sequences[0]
    assert kv.attach_cached(asking) == []
    assert asking.num_computed_tokens == 0
    assert KVCacheManager(20, 4).attach_cached(sequence(9, 2)) == []


def test_a_preempted_sequence_finds_what_it_generated_and_keeps_its_first_count():
    kv = caching()
    seq = sequence(6)
    kv.attach_cached(seq)
    compute(kv, seq, 6)
    seq.token_ids += [50, 51, 52]
    compute(kv, seq, 2)
    kv.free(seq)
    seq.num_computed_tokens, seq.num_preemptions = 0, 1
    assert len(kv.attach_cached(seq)) == 2
    assert (seq.num_computed_tokens, seq.num_cached_tokens) == (8, 0)


def test_of_a_freed_sequence_the_last_blocks_are_evicted_first():
    kv = caching(num_blocks=5)
    old, new = sequence(13), Request(1, range(200, 208), SamplingParams(max_new_tokens=1), 0.0).sequences[0]
    compute(kv, old, 13)
    kv.free(old)
    compute(kv, new, 8)  # the block that was never full, and one out of the cache
    again = sequence(13, 2)
    kv.attach_cached(again)
    assert again.num_computed_tokens == 8
    assert kv.prefix_cache.statistics.evictions == 1


def test_a_fork_is_copied_when_one_of_the_two_writes():
    kv = KVCacheManager(num_blocks=10, block_size=4, windows=(None, None))
    parent, child = sequence(6), sequence(7, 1)
    compute(kv, parent, 6)
    kv.fork(parent, child, 6)
    assert child.block_tables == parent.block_tables
    assert (child.num_computed_tokens, kv.pool.num_free) == (6, 5)
    kv.check_integrity([parent, child])
    sources = [table[1] for table in parent.block_tables]
    allocation = kv.allocate(child, 1)
    destinations = [table[1] for table in child.block_tables]
    copies = [BlockCopy(group, 1, sources[group], destinations[group]) for group in range(2)]
    assert allocation == Allocation(2, copies)
    assert set(destinations).isdisjoint(sources)
    assert [table[1] for table in parent.block_tables] == sources
    # the step fails: the next one owes the same copies, and until they are made the parent must not write either
    assert kv.allocate(child, 1) == Allocation(2, [])
    assert kv.pending_copies == tuple(allocation.copies)
    kv.check_integrity([parent, child])
    assert kv.max_tokens(parent) == 4 * (2 + (3 - 2) // 2) - 6
    kv.copies_done(kv.pending_copies)
    assert kv.pending_copies == ()
    assert kv.allocate(parent, 1) == Allocation(2, [])  # it is the only holder now
    kv.check_integrity([parent, child])


def test_a_block_that_is_shared_is_not_taken_from_those_that_still_need_it():
    kv = KVCacheManager(num_blocks=3, block_size=4)
    parent, child = sequence(6), sequence(7, 1)
    compute(kv, parent, 6)
    kv.fork(parent, child, 6)
    assert kv.max_tokens(child) == 0  # no block for the copy
    assert kv.allocate(child, 1) is None
    kv.check_integrity([parent, child])
    kv.free(parent)
    assert kv.max_tokens(child) == 2
    assert kv.allocate(child, 1) == Allocation(2, [])
    kv.free(child)
    assert kv.pool.num_free == 2


def test_a_freed_sequence_owes_no_copies():
    kv = KVCacheManager(num_blocks=6, block_size=4)
    parent, child = sequence(6), sequence(7, 1)
    compute(kv, parent, 6)
    kv.fork(parent, child, 6)
    due = kv.allocate(child, 1).copies
    kv.free(child)
    assert kv.pending_copies == ()
    kv.copies_done(due)  # of a step that was on its way meanwhile
    kv.check_integrity([parent])
    kv.free(parent)
    assert kv.pool.num_free == 5


def test_a_fork_before_the_end_of_a_published_block_copies_it():
    kv = caching()
    parent, child = sequence(9), sequence(7, 1)
    compute(kv, parent, 9)
    kv.fork(parent, child, 6)
    assert child.block_tables[0] == parent.block_tables[0][:2]
    kv.free(parent)  # the child is the only holder, but others may look its block up
    (copy,) = kv.allocate(child, 1).copies
    assert copy.table_index == 1
    kv.check_integrity([child])
    kv.copies_done([copy])
    assert len(kv.attach_cached(sequence(9, 2))) == 2


def test_a_fork_that_cannot_be_is_refused():
    kv = KVCacheManager(num_blocks=20, block_size=4, windows=(None, 3), max_chunk=8)
    parent = sequence(20)
    compute(kv, parent, 7)
    compute(kv, parent, 8)
    with pytest.raises(AssertionError, match="are not computed"):
        kv.fork(parent, sequence(20, 1), 16)
    with pytest.raises(AssertionError, match="left behind"):
        kv.fork(parent, sequence(20, 1), 9)
    with pytest.raises(AssertionError, match="holds blocks already"):
        kv.fork(parent, parent, 15)
    kv.fork(parent, child := sequence(20, 1), 13)
    assert kv.attach_cached(child) == [TableEntry(g, i, b) for g, t in enumerate(child.block_tables)
                                       for i, b in enumerate(t) if b]  # fmt: skip
    kv.check_integrity([parent, child])


# Windows


def test_blocks_that_no_later_token_sees_are_freed():
    """The picture of the module."""
    kv = KVCacheManager(num_blocks=20, block_size=4, windows=(6, None), max_chunk=8)
    seq = sequence(60)
    compute(kv, seq, 8)
    assert [bool(block_id) for block_id in seq.block_tables[0]] == [True, True]  # token 8 sees 3 … 8
    compute(kv, seq, 5)
    assert [bool(block_id) for block_id in seq.block_tables[0]] == [False, True, True, True]
    assert all(seq.block_tables[1])
    assert kv.pool.num_free == 19 - 3 - 4
    kv.check_integrity([seq])
    for _ in range(30):
        compute(kv, seq, 1)
        assert sum(map(bool, seq.block_tables[0])) <= 3
        kv.check_integrity([seq])
    kv.free(seq)
    assert kv.pool.num_free == 19


def test_a_hit_holds_only_what_the_window_shows():
    kv = caching(windows=(6,))
    first, second = sequence(17), sequence(18, 1)
    for _ in range(4):
        compute(kv, first, 4)
    table = list(first.block_tables[0])
    assert table[:2] == [0, 0]
    assert kv.attach_cached(second) == [TableEntry(0, 2, table[2]), TableEntry(0, 3, table[3])]
    assert second.block_tables == [table]
    assert second.num_cached_tokens == 16
    kv.check_integrity([first, second])


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("chunk", [1, 3, 16, 33])
def test_the_most_blocks_held_is_the_most_that_any_schedule_makes_it_hold(block_size, window, chunk):
    """All chunks up to ``chunk`` tokens, at every offset in a block: never more, and one of them needs as many."""
    most = 0
    for before in range(window + 2 * block_size, window + 3 * block_size):
        kv = KVCacheManager(400, block_size, (window,), max_chunk=chunk)
        seq = sequence(400)
        while seq.num_computed_tokens < before:
            compute(kv, seq, min(chunk, before - seq.num_computed_tokens))
        kv.allocate(seq, chunk)
        most = max(most, sum(map(bool, seq.block_tables[0])))
    assert most == max_blocks_held(400, window, block_size, max_chunk=chunk)


def test_what_a_window_leaves_is_not_asked_for():
    """A sequence many windows long fits where its window does; refusals name what the groups need."""
    kv = KVCacheManager(num_blocks=7, block_size=4, windows=(6,), max_chunk=8)
    assert kv.capacity.blocks_needed(10**6) == 2 + 1 + 2
    kv.capacity.check_fits(10**6, 10**6)
    kv = KVCacheManager(num_blocks=13, block_size=4, windows=(None, 6, 6), max_chunk=8)
    kv.capacity.check_fits(5, 4)
    with pytest.raises(RequestTooLargeError) as refused:
        kv.capacity.check_fits(30, 20)
    assert "ceil((30 + 20 - 1) / 4) + 2 * 5 (a window of 6 tokens and a chunk of 8) = 23 blocks" in str(refused.value)
    assert "at most 17:" in str(refused.value)
    kv.capacity.check_fits(10, 7)
    with pytest.raises(RequestTooLargeError):
        kv.capacity.check_fits(10, 8)


def test_integrity_sees_what_a_window_should_have_freed():
    kv = KVCacheManager(num_blocks=20, block_size=4, windows=(3,), max_chunk=8)
    seq = sequence(60)
    kv.allocate(seq, 12)
    seq.num_computed_tokens = 12
    with pytest.raises(AssertionError, match="left behind by a window of 3"):
        kv.check_integrity([seq])
    kv.advance(seq)
    kv.check_integrity([seq])
    seq.num_computed_tokens = 4
    with pytest.raises(AssertionError, match="blocks missing from its table"):
        kv.check_integrity([seq])


@pytest.mark.parametrize(
    ("windows", "num_computed", "num_shared", "expected"),
    [
        ((None,), 24, 12, True),
        ((None,), 24, 24, True),
        ((None,), 24, 25, False),
        ((None,), 24, 0, False),
        ((None, 5), 12, 12, True),
        ((None, 5), 15, 12, True),
        ((None, 5), 16, 12, False),  # the window has left a block behind that the fork needs
        ((5, None), 16, 12, False),
        ((None, 100), 16, 12, True),
    ],
)
def test_a_fork_needs_computed_tokens_and_all_blocks_that_are_seen_from_there(
    windows: tuple[int | None, ...], num_computed: int, num_shared: int, expected: bool
) -> None:
    kv, parent, child = KVCacheManager(num_blocks=40, block_size=4, windows=windows), sequence(), sequence(request_id=1)
    kv.allocate(parent, num_computed)
    parent.num_computed_tokens = num_computed
    kv.advance(parent)
    assert kv.can_fork(parent, num_shared) == expected
    if expected:
        kv.fork(parent, child, num_shared)
        kv.check_integrity([parent, child])
        assert child.num_computed_tokens == num_shared


def test_a_sequence_that_awaits_copies_is_not_forked() -> None:
    kv = KVCacheManager(num_blocks=10, block_size=4)
    parent, child = sequence(), sequence(request_id=1)
    kv.allocate(parent, 6)
    parent.num_computed_tokens = 6
    kv.fork(parent, child, 6)
    allocation = kv.allocate(parent, 1)
    assert allocation is not None
    assert not kv.can_fork(parent, 6)
    assert kv.can_fork(child, 6)
    kv.copies_done(allocation.copies)
    assert kv.can_fork(parent, 6)


def test_integrity_sees_computed_tokens_without_a_place() -> None:
    kv, seq = KVCacheManager(num_blocks=10, block_size=2), sequence()
    kv.allocate(seq, 4)
    seq.num_computed_tokens = 4
    kv.check_integrity([seq])
    seq.num_computed_tokens = 5
    with pytest.raises(AssertionError, match="blocks for 4 tokens only"):
        kv.check_integrity([seq])
