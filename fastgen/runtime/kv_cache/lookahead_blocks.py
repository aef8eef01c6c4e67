"""The next blocks of decodes: given when they are needed, or before, as lookahead blocks."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from fastgen.runtime.kv_cache.block_pool import BlockPool
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

    def give(self, decodes: Iterable[Sequence]) -> list[Sequence]:
        """Gives a lookahead block to each of ``decodes`` that has none and will need it, or to none where the free
        blocks do not suffice. Returns those that got one.
        """
        block_size, holders = self._block_size, self.holders
        lacking = [
            seq
            for seq in decodes
            if seq not in holders
            and seq.num_computed_tokens % block_size  # otherwise it reaches the block that it has just been given
            and len(seq.block_tables[0]) * block_size + 1 < seq.num_prompt_tokens + seq.request.sampling.max_new_tokens
        ]
        if not self.append(lacking):
            return []
        self.holders.update(lacking)
        return lacking

    def use(self, decodes: list[Sequence]) -> list[Sequence]:
        """Returns those of ``decodes``, all of which have filled their blocks, that lack a block for their next token.
        Others have one of a step that failed, or a lookahead block, which they reach now.
        """
        self.holders.difference_update(decodes)
        return [seq for seq in decodes if len(seq.block_tables[0]) * self._block_size == seq.num_computed_tokens]

    def append(self, decodes: SequenceOf[Sequence]) -> bool:
        """Appends a block to each table of each of ``decodes``; or none, and returns ``False``, where the free blocks
        do not suffice.
        """
        block_ids = self._pool.allocate(len(decodes) * self._num_groups)
        if block_ids is None:
            return False
        unused = iter(block_ids)
        for seq in decodes:
            for table in seq.block_tables:
                table.append(next(unused))
        return True

    def take_back(self) -> None:
        """Frees all lookahead blocks."""
        self._pool.free(table.pop() for seq in sorted(self.holders, key=_key) for table in seq.block_tables)
        self.holders.clear()

    def check_integrity(self) -> None:
        """Asserts that no sequence has reached its lookahead block."""
        for seq in self.holders:
            num_places = (len(seq.block_tables[0]) - 1) * self._block_size
            assert seq.num_computed_tokens <= num_places, f"{seq}: uses its lookahead block"
