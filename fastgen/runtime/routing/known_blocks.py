"""What a replica holds of prompts, as far as a router can know."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from fastgen.runtime.routing.router import RoutedRequest

# Blocks of a replica that a router knows, if it is not told how many the replica has.
KNOWN_BLOCKS: Final = 16_384


class KnownBlocks:
    """The blocks of prompts that a replica was sent last, at most ``most`` of ``block_size`` tokens.

    A replica evicts what it used longest ago, so the router forgets in the same order, in two generations: hashes are
    noted in the newer one, and when it is full, it becomes the older one, which is dropped. So between half of ``most``
    and all of them are known. The hashes of a prompt are noted together, and a prefix is never forgotten before what
    continues it; so how many blocks of a prompt are known is found by bisection.
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
        """Returns how many full blocks of a prompt are known, from its beginning. It is found fastest if it is
        ``guess``.
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
        """Returns how many tokens of a prompt are held where ``num_blocks`` are known. If an earlier prompt ended
        there, the rest is taken to begin with the answer to it.
        """
        if not num_blocks:
            return 0
        last = request.block_hashes[num_blocks - 1]
        answered = self._newer.tokens_at_end.get(last) or self._older.tokens_at_end.get(last)
        if answered is None:
            return num_blocks * self.block_size
        return min(max(answered, num_blocks * self.block_size), request.num_prompt_tokens)


class _Generation:
    """Blocks that were used at about the same time."""

    __slots__ = ("hashes", "tokens_at_end")

    def __init__(self) -> None:
        self.hashes: set[int] = set()
        # For the last full block of each prompt: the tokens of that prompt and its answer.
        self.tokens_at_end: dict[int, int] = {}
