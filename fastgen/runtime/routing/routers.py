"""Routers that ignore what replicas hold: in turn, at random, and by outstanding tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fastgen.runtime.routing.router import CountingRouter, RoutedRequest


class RoundRobin(CountingRouter):
    """Takes the replicas in turn."""

    def _rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
        first = self._num_sent % len(replicas) if replicas else 0
        return [*replicas[first:], *replicas[:first]]


class RandomOrder(CountingRouter):
    """Takes a random replica; all are equally likely."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def _rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
        return self._random.sample(replicas, len(replicas))


class LeastTokens(CountingRouter):
    """Takes the replica whose open requests have the fewest tokens, those of prompts and answers together. Of equal
    ones it takes the one that has been sent no request for the longest time.
    """

    def _rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
        return sorted(replicas, key=self._busyness)
