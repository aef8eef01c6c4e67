"""Which blocks of prompts a replica holds, as far as a router can know."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class KnownBlocks:
    """The hashes of the blocks that a replica was sent last, at most ``most``.

    A replica evicts what it used longest ago, so the router forgets in the same order, in two generations: blocks are
    noted in the newer one, and when it is full, it becomes the older one, which is dropped. So between half of ``most``
    and all of them are known. All hashes of a prompt are noted together, and a prefix is never forgotten before what
    continues it; so how much of a prompt is known is found by bisection.
    """

    __slots__ = ("_newer", "_older", "most")

    def __init__(self, most: int):
        self.most = most
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def __len__(self) -> int:
        """Returns how many hashes are held; one that is in both generations counts twice."""
        return len(self._newer) + len(self._older)

    def note(self, hashes: Sequence[int]) -> None:
        """Notes the blocks of a prompt, ``hashes`` of its beginning first."""
        half = self.most // 2
        if len(self._newer) + len(hashes) > half:
            self._newer, self._older = set(), self._newer
        self._newer.update(hashes[:half])

    def num_known(self, hashes: Sequence[int], guess: int = 0) -> int:
        """Returns how many blocks at the beginning of a prompt are known. It is found fastest where it is ``guess``."""
        newer, older = self._newer, self._older

        def is_unknown(place: int) -> bool:
            return hashes[place] not in newer and hashes[place] not in older

        if guess and is_unknown(guess - 1):
            return bisect_left(range(guess - 1), True, key=is_unknown)
        if guess == len(hashes) or is_unknown(guess):
            return guess
        return bisect_left(range(len(hashes)), True, guess + 1, key=is_unknown)
