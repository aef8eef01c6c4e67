"""The prefix cache: a tree of computed token ids that finds the blocks for prompts which begin alike.

A node is one full block of ``P`` tokens after the blocks of its parents, so the path to it spells all tokens that its
keys and values depend on. A child is found by its parent's number and the bytes of its own token ids, compared in full.
So two prefixes are never mistaken for one another, and each further block of a prompt costs one dictionary lookup,
however long the prompt. All nodes share one dictionary. A node is then a single object for Python's garbage collector,
which would otherwise take longer than everything else here.

::

    root ── 3 1 4 1 ──┬── 5 9 2 6        group 0: block 7   group 1: block 12
                      └── 5 3 5 8        group 0: block 4   group 1: none (evicted, or left behind by its window)

A node names one block in each KV group, or none. A node that lost its blocks stays as long as it has children, because
a windowed group needs only the last blocks of a long prefix.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

from fastgen.runtime.kv_cache.block_pool import PADDING_BLOCK


@dataclass
class PrefixCacheStatistics:
    """Counts since the start. The hit rate is ``hit_tokens / lookup_tokens``."""

    # Tokens of the admitted sequences that were looked up, also of those admitted again after a preemption.
    lookup_tokens: int = 0
    # Tokens among them that were found and not computed again.
    hit_tokens: int = 0
    # Blocks evicted for an allocation.
    evictions: int = 0


class PrefixNode:
    """One full block of tokens after those of its parents; the path has ``depth`` blocks.

    ``block_ids`` has a block of each KV group, the padding block where there is none. ``num_users`` counts the
    sequences that will publish their next block below this node. ``prefix`` begins the keys of its children.
    """

    __slots__ = ("block_ids", "depth", "key", "num_children", "num_users", "parent", "prefix")

    def __init__(
        self, parent: PrefixNode | None, key: bytes, depth: int, block_ids: tuple[int, ...], prefix: bytes
    ) -> None:
        self.parent, self.key, self.depth, self.block_ids, self.prefix = parent, key, depth, block_ids, prefix
        self.num_children = self.num_users = 0

    @property
    def token_ids(self) -> array[int]:
        """Returns the token ids of the node's own block."""
        return array("I", self.key[_PREFIX_BYTES:])


class PrefixCache:
    """The tree over blocks of ``block_size`` tokens in ``len(windows)`` KV groups.

    ``windows[group]`` is how many positions a token of the group sees, its own included, or ``None`` for all. The cache
    names blocks and holds none: a sequence that takes a block shares it in the pool, and the pool reports evictions.
    """

    def __init__(self, block_size: int, windows: SequenceOf[int | None]):
        self.block_size, self.windows = block_size, tuple(windows)
        self._none = (PADDING_BLOCK,) * len(self.windows)
        self.root = PrefixNode(None, b"", 0, self._none, bytes(_PREFIX_BYTES))
        # All nodes but the root, by their keys.
        self._nodes: dict[bytes, PrefixNode] = {}
        self._numbers = count(1)
        self.statistics = PrefixCacheStatistics()
        self._node_of_block: dict[int, PrefixNode] = {}

    def find(self, token_ids: SequenceOf[int], max_blocks: int) -> PrefixNode:
        """Returns the deepest usable node of at most ``max_blocks`` blocks that ``token_ids`` begin with, or the root.
        A node is usable if every group still has all blocks that later tokens see.
        """
        node = found = self.root
        runs = [0] * len(self.windows)  # for each group, how many blocks up to here are present without a gap
        while node.depth < max_blocks:
            child = self._nodes.get(self._key(node, token_ids))
            if child is None:
                break
            node = child
            runs = [
                run + 1 if block_id != PADDING_BLOCK else 0 for run, block_id in zip(runs, node.block_ids, strict=True)
            ]
            if all(
                run >= node.depth - first_seen_block(node.depth, window, self.block_size)
                for run, window in zip(runs, self.windows, strict=True)
            ):
                found = node
        return found

    def block_tables(self, node: PrefixNode) -> list[list[int]]:
        """Returns for each group the blocks of ``node`` and its parents; the padding block where no later token sees
        one.
        """
        firsts = [first_seen_block(node.depth, window, self.block_size) for window in self.windows]
        tables = [[PADDING_BLOCK] * node.depth for _ in self.windows]
        while node.parent is not None and node.depth > min(firsts):
            for table, first, block_id in zip(tables, firsts, node.block_ids, strict=True):
                if node.depth > first:
                    table[node.depth - 1] = block_id
            node = node.parent
        return tables

    def publish(self, node: PrefixNode, token_ids: SequenceOf[int], block_ids: tuple[int, ...]) -> PrefixNode:
        """Returns the node below ``node`` for the next block of ``token_ids``, computed in ``block_ids``, one for each
        group.

        Where the node has a block of a group already, that block stays; it contains the same, and the caller keeps its
        own.
        """
        key = self._key(node, token_ids)
        child = self._nodes.get(key)
        if child is None:
            return self._add(node, key, block_ids)
        for block_id, before in zip(block_ids, child.block_ids, strict=True):
            if before == PADDING_BLOCK != block_id:
                self._node_of_block[block_id] = child
        child.block_ids = tuple(map(_first_block, child.block_ids, block_ids))
        return child

    @property
    def nodes(self) -> Iterable[PrefixNode]:
        """Yields all nodes but the root, parents before their children."""
        return self._nodes.values()

    @property
    def named(self) -> list[int]:
        """Returns all blocks that a node names."""
        return list(self._node_of_block)

    def add(self, parent: PrefixNode, token_ids: Iterable[int], block_ids: tuple[int, ...]) -> PrefixNode:
        """Adds a node below ``parent`` whose own block has ``token_ids``, from a snapshot."""
        return self._add(parent, parent.prefix + array("I", token_ids).tobytes(), block_ids)

    def _add(self, parent: PrefixNode, key: bytes, block_ids: tuple[int, ...]) -> PrefixNode:
        prefix = next(self._numbers).to_bytes(_PREFIX_BYTES, "little")
        self._nodes[key] = node = PrefixNode(parent, key, parent.depth + 1, block_ids, prefix)
        parent.num_children += 1
        for block_id in block_ids:
            if block_id != PADDING_BLOCK:
                self._node_of_block[block_id] = node
        return node

    def forget(self, block_id: int) -> None:
        """Drops ``block_id``, whose contents the pool has evicted."""
        self.statistics.evictions += 1
        self.remove(block_id)

    def remove(self, block_id: int) -> None:
        """Removes ``block_id`` from the node that names it."""
        node = self._node_of_block.pop(block_id)
        node.block_ids = tuple([PADDING_BLOCK if each == block_id else each for each in node.block_ids])
        self._prune(node)

    def branch(self, node: PrefixNode) -> set[PrefixNode]:
        """Returns all nodes that begin with the same block as ``node``, which is not the root."""
        while node.depth > 1:
            assert node.parent is not None
            node = node.parent
        found = {node}
        for each in sorted(self._nodes.values(), key=_depth):  # parents first
            if each.parent in found:
                found.add(each)
        return found

    def move_user_down(self, before: PrefixNode | None, after: PrefixNode) -> None:
        """Moves a user from ``before``, or a new one, down to ``after``."""
        after.num_users += 1
        if before is not None:
            before.num_users -= 1

    def move_user(self, before: PrefixNode | None, after: PrefixNode | None) -> None:
        """Moves a user from ``before`` to ``after``; ``None`` where it is new or gone."""
        if after is not None:
            after.num_users += 1
        if before is not None:
            before.num_users -= 1
            self._prune(before)

    def check_integrity(self, published: set[int], users: Iterable[PrefixNode]) -> None:
        """Asserts that nodes and the ``published`` blocks name each other, that no unneeded node is left, and that each
        of ``users`` is counted.
        """
        found: dict[int, PrefixNode] = {}
        num_users, num_children = Counter(map(id, users)), Counter(id(node.parent) for node in self._nodes.values())
        for node in (self.root, *self._nodes.values()):
            parent = node.parent
            if parent is not None:
                assert parent is self.root or self._nodes.get(parent.key) is parent, f"a parent left at {node.depth}"
                assert self._nodes[node.key] is node, f"found by another key at {node.depth}"
                assert node.key.startswith(parent.prefix), f"astray at {node.depth}"
                assert node.depth == parent.depth + 1, f"astray at {node.depth}"
            named = {block_id: node for block_id in node.block_ids if block_id}
            assert named.keys().isdisjoint(found), f"published twice: {sorted(named.keys() & found.keys())}"
            found |= named
            assert node.num_users == num_users.pop(id(node), 0), f"{node.num_users} users at depth {node.depth}"
            assert node.num_children == num_children[id(node)], f"{node.num_children} children at depth {node.depth}"
            is_used = named or node.num_children or node.num_users
            assert node is self.root or is_used, f"no use at depth {node.depth}"
        assert not num_users, "a sequence stands at a node that is not in the tree"
        assert found == self._node_of_block, f"blocks {sorted(found)} in the tree, {sorted(self._node_of_block)} known"
        assert found.keys() == published, f"blocks {sorted(found)} in the tree, {sorted(published)} published"

    def _prune(self, node: PrefixNode) -> None:
        while node.parent is not None and not (node.num_users or node.num_children or any(node.block_ids)):
            del self._nodes[node.key]
            node = node.parent
            node.num_children -= 1

    def _key(self, node: PrefixNode, token_ids: SequenceOf[int]) -> bytes:
        """Returns the key of the child of ``node`` with the next block of ``token_ids``."""
        begin = node.depth * self.block_size
        return node.prefix + array("I", token_ids[begin : begin + self.block_size]).tobytes()


_PREFIX_BYTES = 8
_depth = attrgetter("depth")


def _first_block(one: int, other: int) -> int:
    return other if one == PADDING_BLOCK else one


def first_seen_block(num_full_blocks: int, window: int | None, block_size: int) -> int:
    """Returns the first block that a token after ``num_full_blocks`` blocks sees, the first that must be kept for
    it."""
    return 0 if window is None else max(0, num_full_blocks * block_size - window + 1) // block_size
