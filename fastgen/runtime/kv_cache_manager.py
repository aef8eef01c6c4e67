"""Which sequence holds which blocks of the KV cache, and what can fit at all.

A sequence has one block table per KV group (the layers with one window). Entry ``i`` of a table is the block with the
keys and values of tokens ``i*P .. i*P + P - 1``. Here ``P = 4`` and there is one group; of 12 tokens 6 are computed,
and the next step takes 5 more::

    token   0   1   2   3 | 4   5   6   7 | 8   9  10  11
            <----- computed ----->|<-- this step --->|     num_computed_tokens = 6, num_tokens = 12
    table [       7       |       2       |       5       ]
                                              appended: allocate(seq, 5) -> [(group 0, index 2, block 5)]

Nothing is reserved for tokens that are not generated yet. The last token a request generates is never computed, since
nothing follows it, so a prompt of ``p`` tokens and ``m`` new ones fill at most ``p + m - 1`` places of each group.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.block_pool import BlockPool
from fastgen.runtime.request import Sequence


class KVCacheManager:
    """Block tables over one pool of ``num_blocks`` blocks of ``block_size`` tokens, which all KV groups share.

    ``num_blocks`` counts the padding block, as the cache tensors' first axis does.
    """

    def __init__(self, num_blocks: int, block_size: int, num_groups: int = 1):
        if block_size < 1 or num_groups < 1:
            raise InvalidArgumentError(f"block_size {block_size} and num_groups {num_groups} must be at least 1")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_groups = num_groups

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one sequence, over all groups."""
        return self.num_groups * -(-num_tokens // self.block_size)

    def check_fits(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Refuse a sequence that could not finish even with the whole cache to itself.

        :raises RequestTooLargeError: with the arithmetic.
        """
        needed = self.blocks_needed(num_prompt_tokens + max_new_tokens - 1)
        if needed <= self.pool.capacity:
            return
        groups = f"{self.num_groups} * " if self.num_groups > 1 else ""
        most = self.pool.capacity // self.num_groups * self.block_size + 1
        raise RequestTooLargeError(
            f"a prompt of {num_prompt_tokens} tokens with max_new_tokens={max_new_tokens} needs "
            f"{groups}ceil(({num_prompt_tokens} + {max_new_tokens} - 1) / {self.block_size}) = {needed} blocks, "
            f"the KV cache has {self.pool.capacity}; prompt and new tokens together may be at most {most}: shorten the "
            "prompt, lower max_new_tokens, or give the cache more memory (kv_cache_memory)",
            room=most - num_prompt_tokens,
        )

    def max_tokens(self, seq: Sequence) -> int:
        """How many tokens beyond those computed ``seq`` has places for, counting the blocks now free as its own."""
        num_held = len(seq.block_tables[0]) if seq.block_tables else 0
        num_blocks = num_held + self.pool.num_free // self.num_groups
        return num_blocks * self.block_size - seq.num_computed_tokens

    def allocate(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int, int]] | None:
        """Make places for the ``num_new_tokens`` tokens of ``seq`` that follow the computed ones.

        Returns what was appended to its block tables as ``(group, index, block_id)``, nothing where it has the places
        already, or ``None`` with nothing changed where the free blocks do not suffice for all groups.
        """
        first = len(seq.block_tables[0]) if seq.block_tables else 0
        end = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        if end <= first:
            return []
        block_ids = self.pool.allocate((end - first) * self.num_groups)
        if block_ids is None:
            return None
        if not seq.block_tables:
            seq.block_tables = [[] for _ in range(self.num_groups)]
        places = [(group, index) for group in range(self.num_groups) for index in range(first, end)]
        appended = [(group, index, block_id) for (group, index), block_id in zip(places, block_ids, strict=True)]
        for group, _, block_id in appended:
            seq.block_tables[group].append(block_id)
        return appended

    def free(self, seq: Sequence) -> None:
        """Take back every block ``seq`` holds."""
        self.pool.free(block_id for table in seq.block_tables for block_id in table)
        seq.block_tables = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that ``sequences`` hold every block that is not free, none twice, and places for what is computed."""
        sequences = list(sequences)
        self.pool.check_integrity(block_id for seq in sequences for table in seq.block_tables for block_id in table)
        for seq in sequences:
            lengths = {len(table) for table in seq.block_tables}
            assert len(seq.block_tables) in (0, self.num_groups), f"{seq}: {len(seq.block_tables)} block tables"
            assert len(lengths) <= 1, f"{seq}: its block tables differ in length: {lengths}"
            num_places = max(lengths, default=0) * self.block_size
            assert seq.num_computed_tokens <= num_places, f"{seq}: blocks for {num_places} tokens only"
