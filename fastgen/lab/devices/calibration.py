"""The cost of a step, measured on this machine: from designed steps of an engine, or from a recorded flight."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Final, Literal

from pydantic import TypeAdapter

from fastgen.errors import RecordingError
from fastgen.json_lines import checked_line
from fastgen.lab.devices.designed_steps import DesignedSteps
from fastgen.lab.machine import machine_facts
from fastgen.runtime.engine import Engine
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.flight.step_times import measured_steps
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.runtime.step.forward import TapedForward
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.fit import Residuals, fit_step_cost, residuals
from fastgen.runtime.step_cost.sight import Sight

FORMAT: Final = "fastgen calibration"
VERSION: Final = 1
# Share of the time in which steps are not measured: a first step of a kind takes longer.
_WARM_UP = 0.1
# Steps that a fit uses; of more, so many are drawn.
_MOST_STEPS = 20_000
# Bounds of the recorder while steps are measured.
_RECORDED_STEPS, _RECORDED_BYTES = 500_000, 2**30


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A :class:`~fastgen.runtime.step_cost.cost.StepCost` with its origin and its errors. As a file it is JSON."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}
    format: Literal["fastgen calibration"] = FORMAT
    version: Literal[1] = VERSION
    model: str
    # Wall time, ISO 8601, UTC.
    made: str
    # Processor, cores, versions and commit.
    machine: dict[str, Any]
    # The sizes and rules of the engine whose steps these are.
    engine: dict[str, Any]
    num_steps: int
    cost: StepCost
    # Errors on the steps that it was fitted to, by kind: decodes, prompts, and both (mixed).
    residuals: dict[str, Residuals]
    # Median time between two steps while there was work.
    step_gap_s: float
    # Median time for which an arriving request keeps the engine from its steps; 0 if a recording does not contain it.
    arrival_s: float = 0.0

    def as_text(self) -> str:
        """Returns lines for people."""
        lines = [f"{self.num_steps:,} steps of {self.model}:"]
        for kind, found in self.residuals.items():
            lines.append(
                f"  {kind:8} {found.num_steps:7,} steps, error {100 * found.median:.1f} % in the median, "
                f"{100 * found.p90:.1f} % at P90, {100 * found.bias:+.1f} % in all"
            )
        return "\n".join(lines)


def calibrate(
    engine: Engine, model: str, *, seconds: float, seed: int = 0, sights: Sequence[Sight] = ()
) -> Calibration:
    """Returns the cost of the steps of ``engine``, which has no requests, measured for ``seconds`` seconds. ``sights``
    are the windows of the model's layers.

    :raises InvalidArgumentError: if the time does not suffice for enough steps.
    """
    recorder, steps = engine.recorder, DesignedSteps(engine, seed=seed)
    bounds = recorder.max_steps, recorder.max_bytes
    recorder.max_steps, recorder.max_bytes = _RECORDED_STEPS, _RECORDED_BYTES
    try:
        steps.warm_up()
        steps.run(_WARM_UP * seconds)
        begin_s = engine.clock()
        steps.run((1 - _WARM_UP) * seconds)
        found = calibration_of(recorder.recording(model), from_s=begin_s, sights=sights)
        return replace(found, arrival_s=median(steps.arrivals_s))
    finally:
        recorder.max_steps, recorder.max_bytes = bounds


def calibration_of(recording: Recording, *, from_s: float = 0.0, sights: Sequence[Sight] | None = None) -> Calibration:
    """Returns the cost of the steps in ``recording`` that began at ``from_s`` or later. ``sights`` are the
    windows of the model's layers. By default they are taken from the recording if it has one window for all layers;
    else windows are ignored.

    :raises InvalidArgumentError: for too few steps.
    """
    if sights is None:
        windows = recording.header.engine.windows
        sights = (Sight(windows[0], 1.0, 1.0),) if len(windows) == 1 and windows[0] is not None else ()
    timed = [(step, measured) for step, measured in measured_steps(recording, sights) if step.began_s >= from_s]
    pads = any(step.num_padding for step, _ in timed)  # to captured sizes
    gaps_s = [
        later.began_s - earlier.ended_s
        for (earlier, _), (later, _) in pairwise(timed)
        if earlier.ended_s is not None and later.step == earlier.step + 1 and earlier.running and later.num_decodes
    ]
    steps = [measured for _, measured in timed]
    if len(steps) > _MOST_STEPS:
        steps = random.Random(0).sample(steps, _MOST_STEPS)
    sizes = captured_sizes(recording.header.engine.token_budget)
    run_at = {"sizes": sizes} if pads else {"recorded": recorded_sizes(sizes)}
    cost = fit_step_cost(steps, **run_at, sights=sights)
    return Calibration(
        model=recording.header.model,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine_facts(),
        engine=json.loads(json.dumps(asdict(recording.header.engine))),
        num_steps=len(steps),
        cost=cost,
        residuals=dict(residuals(cost, steps)),
        step_gap_s=max(0.0, median(gaps_s)) if gaps_s else 0.0,
    )


def recorded_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of tokens that an engine that does not pad records when they first occur, given its captured
    ``sizes``. Others that occur often are recorded later, which costs do not tell apart.
    """
    return tuple(sorted({*range(1, min(TapedForward.SMALL, sizes[-1]) + 1), *sizes}))


def write_calibration(calibration: Calibration, path: str | Path) -> None:
    """Writes ``calibration`` to the file ``path``. Raises ``RecordingError`` if it cannot."""
    try:
        Path(path).write_bytes(_adapter().dump_json(calibration, indent=1) + b"\n")
    except OSError as error:
        raise RecordingError(f"the calibration cannot be written: {error.strerror}", file=str(path)) from error


def read_calibration(path: str | Path) -> Calibration:
    """Returns the calibration in the file ``path``.

    :raises RecordingError: if the file does not exist, or is no calibration.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RecordingError(f"the calibration cannot be read: {error.strerror}", file=str(path)) from error
    calibration: Calibration = checked_line(_adapter(), data, str(path), 1)
    return calibration


@cache
def _adapter() -> TypeAdapter[Calibration]:
    return TypeAdapter(Calibration)
