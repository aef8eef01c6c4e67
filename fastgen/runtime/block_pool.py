"""The pool of KV cache blocks: which are free and which are held. It knows nothing about who holds them."""

from __future__ import annotations

from collections.abc import Iterable

from fastgen.errors import InvalidArgumentError

PADDING_BLOCK = 0
"""Where padding tokens write their keys and values, and which nobody reads. It is never handed out."""


class BlockPool:
    """Block ids ``1 .. num_blocks - 1``, each either free or held. Block 0 is the padding block.

    Constant time a block. The block freed last is handed out first, while it is still warm in the processor's cache.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise InvalidArgumentError(
                f"num_blocks is {num_blocks}: the KV cache needs the padding block and at least one more"
            )
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self._is_held = bytearray(num_blocks)

    @property
    def capacity(self) -> int:
        """Blocks that can be held at once."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """``num_blocks`` block ids, or ``None`` with nothing changed where fewer are free."""
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._is_held[block_id] = True
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Take ``block_ids`` back.

        :raises InvalidArgumentError: where one of them is not held: free already, named twice, or never handed out.
            Nothing is changed then.
        """
        returned = list(block_ids)
        wrong = [block_id for block_id in returned if not self._holds(block_id)]
        if wrong or len(set(returned)) < len(returned):
            raise InvalidArgumentError(f"blocks {returned} cannot be freed: not held {wrong}, or named twice")
        for block_id in returned:
            self._is_held[block_id] = False
        self._free.extend(returned)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that exactly the blocks ``held`` are held, each by one owner, and that all others are free."""
        free, held = set(self._free), list(held)
        assert len(free) == len(self._free), f"free twice: {sorted(self._free)}"
        assert len(set(held)) == len(held), f"held by two owners: {sorted(held)}"
        assert free.isdisjoint(held), f"both free and held: {sorted(free.intersection(held))}"
        assert free.union(held) == set(range(1, self.num_blocks)), (
            f"of {self.capacity} blocks {len(free)} are free and {len(held)} are owned: some leaked, or are foreign"
        )
        marked = {block_id for block_id, is_held in enumerate(self._is_held) if is_held}
        assert marked == set(held), f"marked as held {sorted(marked)}, owned {sorted(held)}"

    def _holds(self, block_id: int) -> bool:
        return 0 <= block_id < self.num_blocks and bool(self._is_held[block_id])
