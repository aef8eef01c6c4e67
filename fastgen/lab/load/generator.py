"""One run: a load put on a target, from warm-up to the header of its records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from fastgen.errors import InvalidArgumentError
from fastgen.lab.load.lag import LoopLag, lag_percentiles, why_invalid
from fastgen.lab.load.recorder import Recorder
from fastgen.lab.load.target import Answer, Target
from fastgen.lab.machine import machine_facts
from fastgen.lab.records import Run, RunHeader
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.runtime.progress import progress_bar


class Load(Protocol):
    """A rule for when requests are sent: :class:`~fastgen.lab.load.open_loop.OpenLoop` or
    :class:`~fastgen.lab.load.closed_loop.ClosedLoop`."""

    @property
    def num_clients(self) -> int | None:
        """Returns how many clients a closed loop has; ``None`` for an open one."""
        ...

    @property
    def num_warm_ups(self) -> int:
        """Returns how many requests are sent before the run, at once."""
        ...

    def facts(self) -> dict[str, Any]:
        """Returns all its parameters as JSON."""
        ...

    def check(self, requests: Sequence[PlannedRequest]) -> None:
        """Raises ``InvalidArgumentError`` for requests that it cannot send."""
        ...

    async def drive(self, requests: Sequence[PlannedRequest], recorder: Recorder) -> None:
        """Sends all requests. Returns when all have ended."""
        ...


# Carries out one run of these requests, on whatever it was made for. The last argument is the workload's facts.
Runs = Callable[[Sequence[PlannedRequest], Load, Mapping[str, Any]], Run]


@dataclass(frozen=True)
class LoadGenerator:
    """Puts loads on ``target``, one run after another: a :data:`Runs`.

    Ctrl-C on the main thread ends a run early. What was measured until then is returned, with a header that says
    ``interrupted``.
    """

    target: Target
    # Shows a progress bar with this title on a terminal.
    title: str = "requests"

    def __call__(self, requests: Sequence[PlannedRequest], load: Load, workload: Mapping[str, Any]) -> Run:
        """Raises ``FastgenError`` if the target cannot be reached, or does not take such requests."""
        if not requests:
            raise InvalidArgumentError("the workload has no requests, so there is nothing to measure")
        load.check(requests)
        return asyncio.run(self._run(requests, load, workload))

    async def _run(self, requests: Sequence[PlannedRequest], load: Load, workload: Mapping[str, Any]) -> Run:
        # The first Ctrl-C cancels this task: asyncio.run arranges that. It raises KeyboardInterrupt only where the
        # task ends with the cancellation, which this one does not once the run has begun.
        try:
            await self.target.open(requests)
            await self._warm_up([_other_prompt(each) for each in requests[: load.num_warm_ups]])
            lag, is_interrupted = LoopLag(), False
            began = datetime.now(UTC).isoformat(timespec="milliseconds")
            with progress_bar(self.title) as progress:
                recorder = Recorder(self.target, lambda done: progress(done, len(requests)))
                lag.start()
                try:
                    await load.drive(requests, recorder)
                except asyncio.CancelledError:
                    is_interrupted = True
                    if (task := asyncio.current_task()) is not None:
                        task.uncancel()
                lag.stop()
        finally:
            await self.target.close()
        records = recorder.records
        lag_s = lag_percentiles(records, lag.samples_s)
        header = RunHeader(
            target=self.target.facts(),
            workload=dict(workload),
            load=load.facts(),
            machine=machine_facts(),
            began=began,
            duration_s=max((record.ended_s for record in records), default=0.0),
            lag_s=lag_s,
            invalid=why_invalid(lag_s, records),
            interrupted=is_interrupted,
        )
        return Run(header, records)

    async def _warm_up(self, requests: Sequence[PlannedRequest]) -> None:
        """Sends requests at once, outside the record. Raises ``FastgenError`` if one fails."""
        prepared = [self.target.prepare(request) for request in requests]
        try:
            async with asyncio.TaskGroup() as group:
                for each in prepared:
                    group.create_task(self.target.send(each, Answer()))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None


def _other_prompt(request: PlannedRequest) -> PlannedRequest:
    """Returns a request of the same size, whose prompt a prefix cache does not take for the beginning of this one."""
    return replace(request, prompt_ids=request.prompt_ids[::-1], session=None, continues=False)
