"""Open loop: requests are sent when they are due, whether or not earlier ones were answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastgen.errors import InvalidArgumentError
from fastgen.lab.load.recorder import Prepared, Recorder
from fastgen.lab.load.units import Unit, units
from fastgen.lab.workloads.request import PlannedRequest


@dataclass(frozen=True)
class OpenLoop:
    """Sends each request at its ``due_s``. A later request of a session also waits for the answer before it.

    ``arrivals`` are the facts of what made the due times, such as a Poisson process and its rate.
    """

    arrivals: Mapping[str, Any] = field(default_factory=dict)
    num_warm_ups: int = 1
    num_clients: None = None

    def facts(self) -> dict[str, Any]:
        return {"loop": "open", "arrivals": dict(self.arrivals), "warm_ups": self.num_warm_ups}

    def check(self, requests: Sequence[PlannedRequest]) -> None:
        """Raises ``InvalidArgumentError`` for a request of which nothing says when it is due."""
        for unit in units(requests):
            number, first = unit[0]
            if first.due_s is None:
                raise InvalidArgumentError(
                    f"request {number} has no due time: an open loop needs arrivals, such as a request rate"
                )

    async def drive(self, requests: Sequence[PlannedRequest], recorder: Recorder) -> None:
        """Sends all requests. Returns when all have ended."""
        in_order = sorted(units(requests), key=lambda unit: unit[0][1].due_s or 0.0)
        async with asyncio.TaskGroup() as sent:
            for unit in in_order:
                due_s = unit[0][1].due_s or 0.0
                prepared = recorder.prepare(*unit[0])
                await recorder.until(due_s)
                sent.create_task(_send_unit(unit, due_s, prepared, recorder))


async def _send_unit(unit: Unit, due_s: float, prepared: Prepared, recorder: Recorder) -> None:
    """Sends the requests of ``unit``, of which the first is ``prepared`` and due now, one after another."""
    record = await recorder.send(prepared, due_s=due_s)
    for number, request in unit[1:]:
        due_s = max(request.due_s or 0.0, record.ended_s + request.think_s)
        prepared = recorder.prepare(number, request)
        await recorder.until(due_s)
        record = await recorder.send(prepared, due_s=due_s)
