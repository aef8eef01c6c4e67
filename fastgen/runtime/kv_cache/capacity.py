"""The arithmetic of what fits: the most blocks that a sequence holds, and requests that can never be served."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count

from fastgen.errors import RequestTooLargeError
from fastgen.runtime.kv_cache.block_tables import arithmetic, max_blocks_held


@dataclass(frozen=True)
class Capacity:
    """``num_blocks`` usable blocks of ``block_size`` tokens, shared by KV groups with these ``windows``.

    ``max_chunk`` is the most tokens of a sequence that one step takes; ``None`` is no limit.
    """

    num_blocks: int
    block_size: int
    windows: SequenceOf[int | None]
    max_chunk: int | None

    def blocks_needed(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence of ``num_tokens`` tokens ever holds at once, over all groups."""
        return sum(
            max_blocks_held(num_tokens, window, self.block_size, max_chunk=self.max_chunk) for window in self.windows
        )

    def check_fits(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Refuses a sequence that could not finish even with the whole cache to itself.

        :raises RequestTooLargeError: with the arithmetic.
        """
        num_tokens = num_prompt_tokens + max_new_tokens - 1
        # Without windows, the common case; it is an upper bound with them.
        if len(self.windows) * -(-num_tokens // self.block_size) <= self.num_blocks:
            return
        needed = self.blocks_needed(num_tokens)
        if needed <= self.num_blocks:
            return
        most_full = next(n for n in count() if self.blocks_needed((n + 1) * self.block_size) > self.num_blocks)
        most = most_full * self.block_size + 1
        sums = arithmetic(num_prompt_tokens, max_new_tokens, self.windows, self.block_size, self.max_chunk)
        raise RequestTooLargeError(
            f"a prompt of {num_prompt_tokens} tokens with max_new_tokens={max_new_tokens} needs "
            f"{sums} = {needed} blocks, "
            f"the KV cache has {self.num_blocks}; prompt and new tokens together may be at most {most}: shorten the "
            "prompt, lower max_new_tokens, or give the cache more memory (kv_cache_memory)",
            room=most - num_prompt_tokens,
        )
