"""Ray Serve's own prefix router (``PrefixCacheAffinityRouter``, 2.60) for comparisons in the simulator.

The prefix tree is Ray's, called without a cluster. The rule around it is that of its ``choose_replicas``, whose code
cannot run without one. Ray's tree has characters, so each full block of a prompt is spelled as the 16 hexadecimal
digits of its hash. Queue lengths are exact, where Ray has a cache of them.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastgen.runtime.routing import RoutedRequest

# Least share of a prompt that must match, the default of Ray.
_MATCH_RATE = 0.1


class RayPrefix:
    """Takes the replica with the longest match in Ray's prefix tree, of several the one with the shortest queue.

    Where less than a tenth of the prompt matches, it takes the replica with the smallest tree. Where queues differ by
    more than ``imbalanced_threshold`` requests, it takes the shorter of two queues chosen at random.
    """

    def __init__(self, *, imbalanced_threshold: float = float("inf"), seed: int = 0):
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        self._tree: Any = PrefixTree()
        self._threshold, self._random = imbalanced_threshold, random.Random(seed)
        self._tenants: set[str] = set()
        self._open: set[tuple[RoutedRequest, str]] = set()
        self._queues: Counter[str] = Counter()

    def rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
        new = [replica for replica in replicas if replica not in self._tenants]
        if new:
            self._tree.add_tenants(new, time.time())
            self._tenants.update(new)
        queues = {replica: self._queues[replica] for replica in replicas}
        best = self._random.sample(list(replicas), min(2, len(replicas)))
        if max(queues.values()) - min(queues.values()) <= self._threshold:
            best = self._matching(request, list(replicas)) or best
        best.sort(key=queues.__getitem__)
        chosen = set(best)
        return best + [replica for replica in replicas if replica not in chosen]

    def _matching(self, request: RoutedRequest, replicas: list[str]) -> list[str]:
        text = _text(request)
        matched, tenants = self._tree.prefix_match(text, replicas)
        if not text or len(matched) / len(text) < _MATCH_RATE:
            tenants = self._tree.get_smallest_tenants()
        return list(tenants or ())

    def sent(self, request: RoutedRequest, replica: str) -> None:
        self._tree.insert(_text(request), replica, time.time())
        self._open.add((request, replica))
        self._queues[replica] += 1

    def ended(self, request: RoutedRequest, replica: str) -> None:
        if (request, replica) in self._open:
            self._open.remove((request, replica))
            self._queues[replica] -= 1

    def forget(self, replica: str) -> None:
        self._tree.remove_tenants([replica])
        self._tenants.discard(replica)
        self._open = {each for each in self._open if each[1] != replica}
        del self._queues[replica]

    def outstanding(self, replica: str) -> int:
        return sum(each.num_prompt_tokens + each.num_new_tokens for each, at in self._open if at == replica)


def _text(request: RoutedRequest) -> str:
    return "".join([f"{each:016x}" for each in request.block_hashes])
