"""The steps of an engine over time, small enough to keep beside results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.flight.timeline import StepSeries, series

_TIMES = ("start_s", "end_s", "used")
_COUNTS = ("decodes", "prompts", "running", "waiting", "preemptions")
# Seconds and shares in files are rounded to so many places.
_PLACES = 5


@dataclass(frozen=True)
class Timeline(StepSeries):
    """The series of a recording, with the use of the KV cache, as JSON."""

    # Share of the KV cache's blocks that requests hold.
    used: NDArray[np.float64]

    @classmethod
    def of(cls, recording: Recording) -> Timeline:
        """Returns the steps of a recording. Raises ``InvalidArgumentError`` if it holds none."""
        if not recording.steps:
            raise InvalidArgumentError("the recording holds no step, so there is nothing to draw")
        values = series(recording)
        used = 1 - values.blocks_free / (recording.header.engine.num_blocks - 1)
        counts = {name: getattr(values, name) for name in _COUNTS}
        return cls(start_s=values.start_s, end_s=values.end_s, used=used, **counts)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Timeline:
        """Returns what :meth:`as_json` wrote."""
        values: dict[str, Any] = {name: np.array(found[name], dtype=np.float64) for name in _TIMES}
        values |= {name: np.array(found[name], dtype=np.int64) for name in _COUNTS}
        return cls(**values)

    def as_json(self) -> dict[str, Any]:
        times = {name: np.round(getattr(self, name), _PLACES).tolist() for name in _TIMES}
        return times | {name: getattr(self, name).tolist() for name in _COUNTS}

    def between(self, begin_s: float, end_s: float) -> Timeline:
        """Returns the steps of an interval of time."""
        return self._chosen((self.end_s > begin_s) & (self.start_s < end_s))

    def thinned(self, num_steps: int) -> Timeline:
        """Returns at most about ``num_steps`` of the steps, evenly spaced, and each with preemptions."""
        if len(self.start_s) <= num_steps:
            return self
        chosen = self.preemptions > 0
        chosen[np.linspace(0, len(chosen) - 1, num_steps).astype(np.int64)] = True
        return self._chosen(chosen)

    def _chosen(self, chosen: NDArray[np.bool_]) -> Timeline:
        values: dict[str, Any] = {name: getattr(self, name)[chosen] for name in (*_TIMES, *_COUNTS)}
        return Timeline(**values)
