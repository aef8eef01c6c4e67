"""The pool of KV cache blocks: how many hold each, which are free, and which are kept for what they contain.

It knows neither who holds a block nor what is in it. A block is in one of three states::

    free                    no reference, contents of no use
    held                    one reference or more: of sequences, or of copies that are still to be made
    cached                  no reference, but kept: it has been published and may be held again for what it contains

Cached blocks stand in a line, the one released longest ago first. Where an allocation finds no free block, they are
evicted from that end, so they count as free in everything that asks how much room there is.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from fastgen.errors import InvalidArgumentError

# Where padding tokens write their keys and values, and which nobody reads. It is never handed out.
PADDING_BLOCK = 0


class BlockPool:
    """Block ids ``1 .. num_blocks - 1`` with reference counts. Block 0 is the padding block.

    Constant time a block. The free block freed last is handed out first, while it is still warm in the processor's
    cache. ``on_evict`` is told the id of each published block whose contents are given up.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None):
        if num_blocks < 2:
            raise InvalidArgumentError(
                f"num_blocks is {num_blocks}: the KV cache needs the padding block and at least one more"
            )
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = array("i", [0]) * num_blocks
        self._is_published = bytearray(num_blocks)

    @property
    def capacity(self) -> int:
        """Blocks that can be held at once."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: those that are free, and those that are merely cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without a reference that are kept for what they contain."""
        return len(self._cached)

    @property
    def cached(self) -> list[int]:
        """These blocks, the next to be evicted first."""
        return list(self._cached)

    @property
    def published(self) -> set[int]:
        """Every block that is kept for what it contains, or will be when its last reference is gone."""
        return {block_id for block_id, is_published in enumerate(self._is_published) if is_published}

    @property
    def free_order(self) -> list[int]:
        """The free blocks, the next to be handed out last."""
        return list(self._free)

    def restore(self, free: list[int], cached: list[int], held: Iterable[int], published: Iterable[int]) -> None:
        """Be, new, as another was: with the blocks ``free`` in this :attr:`order <free_order>`, ``cached`` and
        ``published`` ones, and ``held`` as often as they are named.
        """
        self._free, self._cached = free, OrderedDict.fromkeys(cached)
        for block_id in held:
            self._references[block_id] += 1
        for block_id in published:
            self._is_published[block_id] = True

    def map(self, blocks_per_cell: int) -> tuple[list[int], list[int]]:
        """How many blocks are held, and how many cached, among blocks 1 to ``blocks_per_cell``, among as many that
        follow, and so on; the last of these cells may have fewer. A fraction of a millisecond for 100,000 blocks.
        """
        held = np.frombuffer(self._references, dtype=np.intc)[1:] > 0
        cached = (np.frombuffer(self._is_published, dtype=np.uint8)[1:] > 0) & ~held
        starts = np.arange(0, self.capacity, blocks_per_cell)
        num_held, num_cached = (np.add.reduceat(blocks, starts, dtype=np.intp) for blocks in (held, cached))
        return num_held.tolist(), num_cached.tolist()

    def is_shared(self, block_id: int) -> bool:
        """Whether somebody else relies on what ``block_id`` contains, so that its holder must not write into it."""
        return self._references[block_id] > 1 or bool(self._is_published[block_id])

    def allocate(self, num_blocks: int) -> list[int] | None:
        """``num_blocks`` block ids, each with one reference, or ``None`` with nothing changed where fewer are free."""
        if num_blocks > self.num_free:
            return None
        for _ in range(num_blocks - len(self._free)):
            self._evict()
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def share(self, block_id: int) -> None:
        """Take one more reference on a block that is held or cached.

        :raises InvalidArgumentError: where it is neither.
        """
        if not (self._holds(block_id) or block_id in self._cached):
            raise InvalidArgumentError(f"block {block_id} cannot be shared: it is neither held nor cached")
        self._references[block_id] += 1
        self._cached.pop(block_id, None)

    def publish(self, block_ids: Iterable[int]) -> None:
        """Keep what the held ``block_ids`` contain, also when its last reference is gone, until it is evicted."""
        for block_id in block_ids:
            assert self._references[block_id], f"block {block_id} is published and nobody holds it"
            self._is_published[block_id] = True

    def withdraw(self, block_id: int) -> None:
        """Keep what the published ``block_id`` contains for nobody else: it is free when its last reference is gone."""
        assert self._is_published[block_id], f"block {block_id} is withdrawn and was not published"
        self._is_published[block_id] = False
        if block_id in self._cached:
            del self._cached[block_id]
            self._free.append(block_id)

    def free(self, block_ids: Iterable[int]) -> None:
        """Take one reference of each of ``block_ids`` back, as often as it is named.

        A published block whose last reference this was is cached; those named first will be evicted first.

        :raises InvalidArgumentError: where one has fewer references than that: free already, named once too often, or
            never handed out. Nothing is changed then.
        """
        returned = list(block_ids)
        wrong = [
            block_id
            for block_id, count in Counter(returned).items()
            if not self._holds(block_id) or self._references[block_id] < count
        ]
        if wrong:
            raise InvalidArgumentError(f"blocks {returned} cannot be freed: not held so often are {wrong}")
        for block_id in returned:
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if self._is_published[block_id]:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that the references are exactly ``held``, one for each time a block is named, and that each block
        without any is either free or cached.
        """
        free, references = set(self._free), Counter(held)
        assert len(free) == len(self._free), f"free twice: {sorted(self._free)}"
        assert free.isdisjoint(self._cached), f"both free and cached: {sorted(free.intersection(self._cached))}"
        unheld = free.union(self._cached)
        assert unheld.isdisjoint(references), f"both free and held: {sorted(unheld.intersection(references))}"
        assert unheld.union(references) == set(range(1, self.num_blocks)), (
            f"of {self.capacity} blocks {len(unheld)} are free and {len(references)} are owned: some leaked, or are "
            "foreign"
        )
        for block_id, count in enumerate(self._references):
            assert count == references[block_id], f"block {block_id}: {count} references, {references[block_id]} owners"
        published = self.published
        assert free.isdisjoint(published), f"both free and published: {sorted(free.intersection(published))}"
        assert published.issuperset(self._cached), f"cached and not published: {sorted(self._cached)}"

    def _evict(self) -> None:
        block_id, _ = self._cached.popitem(last=False)
        self._is_published[block_id] = False
        self._free.append(block_id)
        if self._on_evict is not None:
            self._on_evict(block_id)

    def _holds(self, block_id: int) -> bool:
        return 0 <= block_id < self.num_blocks and self._references[block_id] > 0
