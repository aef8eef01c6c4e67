"""Records the blocks that a replica probably holds, from the prompts that it was sent."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from fastgen.runtime.routing.router import RoutedRequest

# Blocks that a router remembers of a replica if the size of its KV cache is not given.
KNOWN_BLOCKS: Final = 16_384


class KnownBlocks:
    """Holds the hashes of the blocks of prompts that a replica was sent last: at most ``most`` blocks, of
    ``block_size`` tokens each.

    A replica evicts the blocks that it used longest ago. The router forgets in the same order, by two generations:
    new hashes go to the newer one. When that is full, the older one is dropped, and the newer one takes its place. So
    between half of ``most`` and all of them are held, once that many were sent.

    The hashes of a prompt are noted together, so a block is never forgotten before the blocks that follow it in a
    prompt. The number of blocks of a prompt that are held is therefore found by bisection.
    """

    __slots__ = ("_newer", "_older", "block_size", "most")

    def __init__(self, most: int, block_size: int):
        self.most, self.block_size = most, block_size
        self._newer, self._older = _Generation(), _Generation()

    def __len__(self) -> int:
        """Returns how many hashes are held; one that is in both generations counts twice."""
        return len(self._newer.hashes) + len(self._older.hashes)

    def note(self, request: RoutedRequest) -> None:
        """Notes that the replica computes ``request``."""
        half = self.most // 2
        hashes = request.block_hashes[:half]
        if not hashes:
            return
        if len(self._newer.hashes) + len(hashes) > half:
            self._newer, self._older = _Generation(), self._newer
        self._newer.hashes.update(hashes)
        self._newer.tokens_at_end[hashes[-1]] = request.num_prompt_tokens + request.num_new_tokens

    def num_blocks(self, request: RoutedRequest, guess: int = 0) -> int:
        """Returns how many full blocks of a prompt are held, counted from its beginning. The search is fastest if
        ``guess`` is the result.
        """
        hashes, newer, older = request.block_hashes, self._newer.hashes, self._older.hashes
        if guess and hashes[guess - 1] not in newer and hashes[guess - 1] not in older:
            first, end = 0, guess - 1
        elif guess == len(hashes) or (hashes[guess] not in newer and hashes[guess] not in older):
            return guess
        else:
            first, end = guess + 1, len(hashes)
        return bisect_left(hashes, True, first, end, key=lambda each: each not in newer and each not in older)

    def num_tokens(self, request: RoutedRequest, num_blocks: int) -> int:
        """Returns how many tokens of a prompt are held if its first ``num_blocks`` blocks are. If an earlier prompt
        ended there, this one is assumed to continue with the answer to it.
        """
        if not num_blocks:
            return 0
        last = request.block_hashes[num_blocks - 1]
        answered = self._newer.tokens_at_end.get(last) or self._older.tokens_at_end.get(last)
        if answered is None:
            return num_blocks * self.block_size
        return min(answered, request.num_prompt_tokens)


class _Generation:
    """Blocks that were used at about the same time."""

    __slots__ = ("hashes", "tokens_at_end")

    def __init__(self) -> None:
        self.hashes: set[int] = set()
        # For the last full block of each prompt: the tokens of that prompt and its answer.
        self.tokens_at_end: dict[int, int] = {}
