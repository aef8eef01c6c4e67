"""The prefix cache's tree: what is found, what windows need of it, and what becomes of nodes that lost their blocks."""

from __future__ import annotations

import pytest

from fastgen.runtime.kv_cache.prefix_cache import PrefixCache, PrefixNode, first_seen_block

TEXT = list(range(100, 132))


def publish(cache: PrefixCache, token_ids: list[int], block_ids: list[int], num_groups: int = 1) -> list[PrefixNode]:
    """A path of nodes below the root; in group ``g`` block ``i`` is ``block_ids[i] + 100 * g``."""
    nodes = [cache.root]
    for block_id in block_ids:
        nodes.append(cache.publish(nodes[-1], token_ids, tuple(block_id + 100 * group for group in range(num_groups))))
    return nodes[1:]


def test_a_prefix_is_found_as_far_as_it_is_the_same():
    cache = PrefixCache(4, [None])
    publish(cache, TEXT, [5, 6, 7])
    assert cache.find(TEXT, 8).depth == 3
    assert cache.find(TEXT, 2).depth == 2
    assert cache.find([*TEXT[:11], 1], 3).depth == 2
    assert cache.find([1, *TEXT], 3) is cache.root
    assert cache.block_tables(cache.find(TEXT, 8)) == [[5, 6, 7]]
    assert cache.block_tables(cache.root) == [[]]
    cache.check_integrity({5, 6, 7}, [])


def test_the_same_block_after_another_beginning_is_another():
    cache = PrefixCache(2, [None])
    publish(cache, [1, 1, 9, 9], [3, 4])
    publish(cache, [2, 2, 9, 9], [5, 6])
    assert cache.block_tables(cache.find([1, 1, 9, 9], 2)) == [[3, 4]]
    assert cache.block_tables(cache.find([2, 2, 9, 9], 2)) == [[5, 6]]
    assert cache.find([9, 9], 1) is cache.root


def test_ids_that_would_meet_in_a_checksum_or_a_join_are_distinguished():
    """Keys are the ids themselves, four bytes each: 256 is not ``1, 0``, and −1 and 2³² − 1 do not arise."""
    cache = PrefixCache(2, [None])
    prompts = [[1, 256], [256, 1], [257, 0], [0, 257], [2**16, 1], [1, 2**16], [2**31, 2**31 - 1]]
    for block_id, prompt in enumerate(prompts, start=1):
        assert cache.find(prompt, 1) is cache.root
        publish(cache, prompt, [block_id])
    assert [cache.block_tables(cache.find(prompt, 1)) for prompt in prompts] == [[[i]] for i in range(1, 8)]


def test_the_first_to_compute_a_block_is_the_one_that_is_shared():
    cache = PrefixCache(4, [None, None])
    first = publish(cache, TEXT, [1, 2], num_groups=2)
    second = publish(cache, TEXT, [3, 4], num_groups=2)
    assert first == second
    assert cache.block_tables(second[-1]) == [[1, 2], [101, 102]]
    cache.check_integrity({1, 2, 101, 102}, [])
    cache.forget(102)
    assert publish(cache, TEXT, [5, 6], num_groups=2) == first
    assert cache.block_tables(second[-1]) == [[1, 2], [101, 106]]  # what is missing in a group is filled in


@pytest.mark.parametrize(
    ("num_full_blocks", "window", "block_size", "first"),
    [
        (5, None, 4, 0),
        (5, 1, 4, 5),
        (5, 2, 4, 4),
        (5, 5, 4, 4),
        (5, 6, 4, 3),
        (5, 21, 4, 0),
        (5, 22, 4, 0),
        (0, 3, 4, 0),
    ],
)
def test_the_first_block_that_is_seen(num_full_blocks, window, block_size, first):
    assert first_seen_block(num_full_blocks, window, block_size) == first
    if window is not None:  # the token that follows sees `window` positions, its own included
        seen = list(range(num_full_blocks * block_size + 1))[-window:]
        assert seen[0] // block_size == first


def test_a_windowed_group_needs_only_the_blocks_in_its_window():
    cache = PrefixCache(4, [None, 6])
    publish(cache, TEXT, [1, 2, 3, 4], num_groups=2)
    for block_id in (101, 102):
        cache.forget(block_id)
    # after 4 blocks token 16 sees 11 … 16: blocks 2 and 3; after 3 blocks token 12 would see block 1, which is gone
    assert cache.block_tables(cache.find(TEXT, 8)) == [[1, 2, 3, 4], [0, 0, 103, 104]]
    assert cache.find(TEXT, 3).depth == 0
    cache.forget(103)
    assert cache.find(TEXT, 8).depth == 0
    cache.check_integrity({1, 2, 3, 4, 104}, [])


def test_nothing_is_found_behind_a_gap_in_a_group_that_sees_all():
    cache = PrefixCache(4, [None])
    publish(cache, TEXT, [1, 2, 3])
    cache.forget(2)
    assert cache.find(TEXT, 3).depth == 1
    publish(cache, TEXT, [7, 8])  # computed again: the gap is filled, and what lay behind it is found again
    assert cache.block_tables(cache.find(TEXT, 3)) == [[1, 8, 3]]


def test_nodes_go_when_nothing_needs_them():
    cache = PrefixCache(4, [None])
    nodes = publish(cache, TEXT, [1, 2, 3])
    cache.move_user(None, nodes[-1])
    for block_id in (1, 2, 3):
        cache.forget(block_id)
        cache.check_integrity({1, 2, 3} - set(range(block_id + 1)), [nodes[-1]])
    assert cache.root.num_children == 1  # a sequence stands below
    after = cache.publish(nodes[-1], TEXT, (9,))
    cache.move_user(nodes[-1], after)
    assert cache.find(TEXT, 4) is cache.root
    cache.move_user(after, None)
    cache.check_integrity({9}, [])
    cache.forget(9)
    assert not cache.root.num_children
    assert cache.statistics.evictions == 4
    cache.check_integrity(set(), [])


def test_integrity_sees_what_does_not_agree():
    cache = PrefixCache(4, [None])
    (node,) = publish(cache, TEXT, [1])
    with pytest.raises(AssertionError, match="published"):
        cache.check_integrity({1, 2}, [])
    with pytest.raises(AssertionError, match="users"):
        cache.check_integrity({1}, [node])
    node.block_ids = (0,)
    with pytest.raises(AssertionError, match="no use at depth 1"):
        cache.check_integrity({1}, [])
    node.block_ids = (1,)
    with pytest.raises(AssertionError, match="not in the tree"):
        cache.check_integrity({1}, [PrefixNode(node, b"", 2, (0,), b"")])
