"""The requests of a server on their way to replicas, which Ray Serve's router in the same process reports."""

from __future__ import annotations

from collections.abc import Callable

from fastgen.runtime.routing import RoutedRequest, Router


class RoutingTable:
    """Holds the requests of a server, and ranks replicas for them.

    Ray's threads call ``update`` with the ids of all replicas when they change. All methods belong to the server's
    event loop.
    """

    # The table of the server in this process, if there is one.
    current: RoutingTable | None = None

    def __init__(self, update: Callable[[list[str]], None]):
        self.update = update
        # ``None`` until a replica is attached, whose block size it needs.
        self.router: Router | None = None
        # Replicas that are linked with the server, and whose engine accepts requests. Others get none.
        self.ready: list[str] = []
        # Replicas that were not heard for some time. They get requests only where there are no others.
        self.silent: frozenset[str] = frozenset()
        self._requests: dict[int, RoutedRequest] = {}
        # The replica where each of them counts.
        self._places: dict[int, str] = {}

    def add(self, number: int, request: RoutedRequest) -> None:
        """Adds a request that is about to be sent."""
        self._requests[number] = request

    def remove(self, number: int) -> None:
        """Forgets a request, which no longer counts at any replica."""
        self._count(number, None)
        self._requests.pop(number, None)

    def rank(self, number: int) -> list[str]:
        """Returns the replicas that request ``number`` can go to, the best one first. It counts there from now on, so
        that requests which come together do not all go to the same one.
        """
        request = self._requests.get(number)
        if request is None or self.router is None:
            return []
        self._count(number, None)
        ranked = self.router.rank(request, self.ready)
        ranked.sort(key=self.silent.__contains__)
        if ranked:
            self._count(number, ranked[0])
        return ranked

    def _count(self, number: int, replica: str | None) -> None:
        before, router = self._places.get(number), self.router
        if before == replica or router is None:
            return
        request = self._requests[number]
        if before is not None:
            del self._places[number]
            router.ended(request, before)
        if replica is not None:
            self._places[number] = replica
            router.sent(request, replica)
