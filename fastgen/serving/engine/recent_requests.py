"""The last requests by the ids that clients know, so that the engine's recording can be searched for them."""

from __future__ import annotations

from collections import OrderedDict, deque

# Requests that are remembered: as many as a recording has steps.
MAX_REMEMBERED = 10_000
# Prompts of one request that are remembered.
_MAX_NUMBERS = 128
# Before the id in the ids of answers.
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")


class RecentRequests:
    """Maps the ids of the last requests to the numbers of their messages to the engine."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, deque[int]] = OrderedDict()

    def add(self, request_id: str, number: int) -> None:
        """Remembers another prompt of the request ``request_id``."""
        self._numbers.setdefault(request_id, deque(maxlen=_MAX_NUMBERS)).append(number)
        self._numbers.move_to_end(request_id)
        if len(self._numbers) > MAX_REMEMBERED:
            self._numbers.popitem(last=False)

    def numbers(self, request_id: str) -> list[int]:
        """Returns the numbers of the request's prompts, in their order; empty if it is not remembered. The id may be
        that of the answer.
        """
        for prefix in ("", *_PREFIXES):
            if request_id.startswith(prefix) and (found := self._numbers.get(request_id.removeprefix(prefix))):
                return list(found)
        return []
