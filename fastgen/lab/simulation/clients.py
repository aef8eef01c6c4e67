"""Clients in virtual time: which request is sent next, and when."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from fastgen.errors import InvalidArgumentError
from fastgen.lab.load.units import units
from fastgen.lab.workloads.request import PlannedRequest

# Numbers of the requests that are sent one after another: those of a session, or one alone.
_Unit = deque[int]


@dataclass(frozen=True, order=True, slots=True)
class Send:
    """Request number ``request`` is sent at ``at_s``, by this client of a closed loop."""

    at_s: float
    # Breaks ties: what was planned first is sent first.
    turn: int
    request: int
    client: int | None


class Clients:
    """Plans when each of ``requests`` is sent, as far as that is known, and learns when they end.

    In an open loop, without ``num_clients``, a request is sent at its ``due_s``. In a closed loop each client takes the
    next session, or request without one, when it is free. Client ``i`` begins U(0, ``num_clients``) times
    ``stagger_s`` late, drawn with ``seed``. Requests of a session follow one another in both.
    """

    def __init__(
        self, requests: Sequence[PlannedRequest], num_clients: int | None, *, stagger_s: float = 0.0, seed: int = 0
    ):
        self._requests, self._is_open = requests, num_clients is None
        self._planned: list[Send] = []
        self._num_planned = 0
        self._units = deque([deque([number for number, _ in unit]) for unit in units(requests)])
        # What is left of the unit of each request that was sent.
        self._rest: dict[int, _Unit] = {}
        if num_clients is None:
            while self._units:
                unit = self._units.popleft()
                due_s = requests[unit[0]].due_s
                if due_s is None:
                    raise InvalidArgumentError(
                        f"request {unit[0]} has no due time: an open loop needs arrivals, such as a request rate"
                    )
                self._plan(unit, due_s, None)
            return
        if num_clients < 1:
            raise InvalidArgumentError(f"{num_clients} clients: a closed loop needs at least one")
        draw = random.Random(seed)
        for client in range(num_clients):
            self._take(draw.uniform(0, num_clients) * stagger_s, client)

    @property
    def next_s(self) -> float:
        """Returns when the next planned request is sent; infinity where none is planned."""
        return self._planned[0].at_s if self._planned else float("inf")

    def send(self) -> Send:
        """Returns the next planned request, which is sent now."""
        return heappop(self._planned)

    def ended(self, sent: Send, ended_s: float) -> None:
        """Notes that the answer of ``sent`` ended, and plans what follows it."""
        unit = self._rest.pop(sent.request)
        if not unit:
            if not self._is_open:
                self._take(ended_s, sent.client)
            return
        following = self._requests[unit[0]]
        at_s = ended_s + following.think_s
        if self._is_open:
            at_s = max(at_s, following.due_s or 0.0)
        self._plan(unit, at_s, sent.client)

    def _take(self, at_s: float, client: int | None) -> None:
        if self._units:
            self._plan(self._units.popleft(), at_s, client)

    def _plan(self, unit: _Unit, at_s: float, client: int | None) -> None:
        number = unit.popleft()
        self._rest[number] = unit
        heappush(self._planned, Send(at_s, self._num_planned, number, client))
        self._num_planned += 1
