"""Lookahead blocks: blocks that decodes get before they need them."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from fastgen.runtime.kv_cache.block_pool import BlockPool
from fastgen.runtime.kv_cache.block_tables import BlockUpdate
from fastgen.runtime.requests.request import Sequence

_key = attrgetter("key")


class LookaheadBlocks:
    """Holds which decodes have a lookahead block: a last block in their tables, of ``block_size`` tokens, that the next
    token does not go into yet. A holder has one in each of ``num_groups`` KV groups.
    """

    def __init__(self, pool: BlockPool, block_size: int, num_groups: int):
        self._pool, self._block_size, self._num_groups = pool, block_size, num_groups
        self.holders: set[Sequence] = set()

    @property
    def num_blocks(self) -> int:
        return self._num_groups * len(self.holders)

    def give(self, decodes: Iterable[Sequence]) -> list[BlockUpdate]:
        """Gives a lookahead block to each of ``decodes`` that has none and will need it, or to none where the free
        blocks do not suffice. Returns the block updates for the device.
        """
        block_size, holders = self._block_size, self.holders
        lacking = [
            seq
            for seq in decodes
            if seq not in holders
            and seq.num_computed_tokens % block_size  # otherwise it reaches the block that it has just been given
            and len(seq.block_tables[0]) * block_size + 1 < seq.num_prompt_tokens + seq.request.sampling.max_new_tokens
        ]
        unused = iter(self._pool.allocate(len(lacking) * self._num_groups) or ())
        updates = []
        for seq, block_id in zip(lacking, unused, strict=False):
            assert seq.slot is not None
            for group, table in enumerate(seq.block_tables):
                if group:
                    block_id = next(unused)
                updates.append(BlockUpdate(seq.slot, group, len(table), block_id))
                table.append(block_id)
            holders.add(seq)
        return updates

    def use(self, decodes: list[Sequence]) -> list[Sequence]:
        """Returns those of ``decodes`` without a lookahead block; all of them need their next block now."""
        if not self.holders:
            return decodes
        lacking = [seq for seq in decodes if seq not in self.holders]
        self.holders.difference_update(decodes)
        return lacking

    def take_back(self) -> None:
        """Frees all lookahead blocks."""
        self._pool.free(table.pop() for seq in sorted(self.holders, key=_key) for table in seq.block_tables)
        self.holders.clear()

    def check_integrity(self) -> None:
        """Asserts that no sequence has reached its lookahead block."""
        for seq in self.holders:
            num_places = (len(seq.block_tables[0]) - 1) * self._block_size
            assert seq.num_computed_tokens <= num_places, f"{seq}: uses its lookahead block"
