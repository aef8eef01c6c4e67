"""A router that sends a prompt to the replica that has computed its beginning before, unless that one is too busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from fastgen.runtime.routing.known_blocks import KNOWN_BLOCKS, KnownBlocks
from fastgen.runtime.routing.router import CountingRouter, RoutedRequest

# Sessions whose replica is remembered.
MAX_SESSIONS: Final = 65_536
# A replica that holds a whole prompt comes first as long as it has at most BUSY_RATIO times the outstanding tokens of
# the least busy one, plus MARGIN for each token of the prompt. With 1 it waits for about as many tokens as it need not
# compute. With more, all replicas that hold a frequent prefix fill up to a busier limit before another one learns it.
BUSY_RATIO: Final = 2
MARGIN: Final = 1


class PrefixAffinity(CountingRouter):
    """Takes the replica that holds the most of the prompt, unless it is too busy for that.

    A replica is assumed to hold the full blocks of the prompts that it was sent. The replica of the request's session
    is assumed to hold the whole session, the last answer included. Outstanding tokens are those that a replica has yet
    to compute, so tokens that it holds do not count.

    Replicas are ranked by their outstanding tokens minus a margin, lowest first. For a replica that holds ``h`` of a
    prompt's ``p`` tokens the margin is ``h + least h / p``, where ``least`` is the number of outstanding tokens of the
    least busy replica. So a replica that holds the whole prompt comes first unless it has more than ``2 least + p``
    outstanding tokens. If no replica holds any of the prompt, the least busy one comes first.

    :param block_size: tokens of a block, as in the hashes of requests.
    :param known_blocks: most blocks that are remembered of each replica; best the number of blocks that it has.
    """

    def __init__(self, *, block_size: int, known_blocks: int = KNOWN_BLOCKS) -> None:
        super().__init__()
        self.block_size, self.known_blocks = block_size, known_blocks
        self._known: dict[str, KnownBlocks] = {}
        # For each session its replica, and how many of its tokens that holds. The session used last comes last.
        self._sessions: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def _rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
        busyness = {replica: self._busyness(replica) for replica in replicas}
        least, num_prompt = min(busyness.values(), default=0.0), max(1, request.num_prompt_tokens)
        margin = MARGIN + (BUSY_RATIO - 1) * least / num_prompt
        own, num_own = self._session(request)
        num_blocks = 0
        for replica in busyness:
            known = self._known.get(replica)
            if known is not None:
                num_blocks = known.num_blocks(request, num_blocks)  # the guess: replicas mostly hold equally many
                if num_blocks:
                    busyness[replica] -= known.num_tokens(request, num_blocks) * margin
        if own in busyness:
            busyness[own] = min(busyness[own], self._busyness(own) - num_own * margin)
        return sorted(busyness, key=busyness.__getitem__)

    def _num_tokens(self, request: RoutedRequest, replica: str) -> int:
        known = self._known.get(replica)
        num_held = 0 if known is None else known.num_tokens(request, known.num_blocks(request))
        own, num_own = self._session(request)
        if own == replica:
            num_held = max(num_held, num_own)
        return request.num_prompt_tokens - num_held + request.num_new_tokens

    def _session(self, request: RoutedRequest) -> tuple[str | None, int]:
        """Returns the replica of the request's session, and how many tokens of the prompt it holds."""
        if request.session is None or request.session not in self._sessions:
            return None, 0
        replica, num_tokens = self._sessions[request.session]
        return replica, min(num_tokens, request.num_prompt_tokens)

    def _learn(self, request: RoutedRequest, replica: str) -> None:
        if request.block_hashes:
            self._known.setdefault(replica, KnownBlocks(self.known_blocks, self.block_size)).note(request)
        if request.session is not None:
            self._sessions[request.session] = replica, request.num_prompt_tokens + request.num_new_tokens
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def _forget(self, replica: str) -> None:
        self._known.pop(replica, None)
        for session in [session for session, (its, _) in self._sessions.items() if its == replica]:
            del self._sessions[session]
