"""Closed loop: each of N clients sends its next request when the one before it was answered."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastgen.errors import InvalidArgumentError
from fastgen.lab.load.recorder import Recorder
from fastgen.lab.load.units import Unit, units
from fastgen.lab.workloads.request import PlannedRequest

# The FastGen paper's: client i begins U(0, clients) times this late.
STAGGER_S = 0.010


@dataclass(frozen=True)
class ClosedLoop:
    """Has ``num_clients`` clients that draw from one queue, as in the FastGen paper's benchmark.

    A client takes a request without a session, or a whole session, whose thinking times it keeps. The ``due_s`` of
    requests are not used. Each client begins U(0, ``num_clients``) times ``stagger_s`` seconds late, drawn with
    ``seed``. With ``warms_up`` it sends one request before the run, which is not recorded.
    """

    num_clients: int
    stagger_s: float = STAGGER_S
    seed: int = 0
    warms_up: bool = True

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise InvalidArgumentError(f"{self.num_clients} clients: a closed loop needs at least one")

    @property
    def num_warm_ups(self) -> int:
        """Returns how many requests are sent before the run: one by each client, at once."""
        return self.num_clients if self.warms_up else 0

    def facts(self) -> dict[str, Any]:
        return {
            "loop": "closed",
            "clients": self.num_clients,
            "stagger_s": self.stagger_s,
            "seed": self.seed,
            "warm_ups": self.num_warm_ups,
        }

    def check(self, requests: Sequence[PlannedRequest]) -> None:
        """Accepts every request."""

    async def drive(self, requests: Sequence[PlannedRequest], recorder: Recorder) -> None:
        """Sends all requests. Returns when all have ended."""
        queue = deque(units(requests))
        draw = random.Random(self.seed)
        starts_s = [draw.uniform(0, self.num_clients) * self.stagger_s for _ in range(self.num_clients)]
        async with asyncio.TaskGroup() as clients:
            for client, start_s in enumerate(starts_s):
                clients.create_task(_serve_queue(queue, client, start_s, recorder))


async def _serve_queue(queue: deque[Unit], client: int, start_s: float, recorder: Recorder) -> None:
    await recorder.until(start_s)
    free_s = start_s
    while queue:
        for place, (number, request) in enumerate(queue.popleft()):
            due_s = free_s + (request.think_s if place else 0.0)
            prepared = recorder.prepare(number, request)
            if due_s > recorder.now_s:
                await recorder.until(due_s)
            record = await recorder.send(prepared, due_s=due_s, client=client)
            free_s = record.ended_s
