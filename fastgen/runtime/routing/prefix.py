"""The router that sends a prompt where its beginning has been computed before, as long as that replica is not busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from fastgen.runtime.routing.known_blocks import KnownBlocks
from fastgen.runtime.routing.router import CountingRouter, RoutedRequest

# Blocks of a replica that the router knows, if it is not told how many the replica has.
KNOWN_BLOCKS: Final = 16_384
# Sessions whose replica is remembered.
MAX_SESSIONS: Final = 65_536
# By how many outstanding tokens the replica with the most blocks may be busier than the least busy one.
MARGIN_TOKENS: Final = 16_384


class PrefixAffinity(CountingRouter):
    """Takes the replica that holds the most of the prompt's full blocks, of equal ones that of the request's session,
    and then the least busy.

    A replica that has more than ``margin_tokens`` outstanding tokens more than the least busy one comes after all
    others; of these, and where nothing is known, the one with the fewest tokens comes first.

    :param block_size: tokens of a block, those of the hashes.
    :param known_blocks: blocks of each replica that are remembered, those used last; best as many as it has.
    """

    def __init__(
        self, *, block_size: int, known_blocks: int = KNOWN_BLOCKS, margin_tokens: int = MARGIN_TOKENS
    ) -> None:
        super().__init__()
        self.block_size, self.known_blocks, self.margin_tokens = block_size, known_blocks, margin_tokens
        self._known: dict[str, KnownBlocks] = {}
        # The replica of each session, the session used last at the end.
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def _rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
        busyness = {replica: self._busyness(replica) for replica in replicas}
        most = min(busyness.values(), default=0.0) + self.margin_tokens
        own = None if request.session is None else self._sessions.get(request.session)
        worth: dict[str, int] = {}
        num_known = 0
        for replica, busy in busyness.items():
            known = self._known.get(replica)
            if busy > most:
                worth[replica] = -1
            else:
                num_known = known.num_known(request.block_hashes, num_known) if known is not None else 0
                worth[replica] = 2 * num_known + (replica == own)
        # Sorting is stable: of equal worth the least busy remains first.
        return sorted(sorted(busyness, key=busyness.__getitem__), key=worth.__getitem__, reverse=True)

    def _learn(self, request: RoutedRequest, replica: str) -> None:
        if request.block_hashes:
            self._known.setdefault(replica, KnownBlocks(self.known_blocks)).note(request.block_hashes)
        if request.session is not None:
            self._sessions[request.session] = replica
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def _forget(self, replica: str) -> None:
        self._known.pop(replica, None)
        for session in [session for session, its in self._sessions.items() if its == replica]:
            del self._sessions[session]
