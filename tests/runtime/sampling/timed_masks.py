"""A grammar whose masks take given times."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastgen.runtime.requests.constraint import Mask
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.sampling import matcher as matching
from fastgen.runtime.sampling.mask_threads import MaskThreads
from fastgen.runtime.sampling.matcher import CompiledFormat, Constraint, Matcher

ANY = ResponseFormat("regex", ".*")


class TimedMasks:
    """A vocabulary of 32 tokens and the state of a grammar that always goes on. A mask takes the next of ``lengths_s``
    of a processor clock that shows nothing else."""

    all_tokens = np.full(1, -1, np.int32)

    def __init__(self, lengths_s: list[float]) -> None:
        self.lengths_s, self.clock_s = lengths_s, 0.0

    def next_tokens(self, state: Any) -> tuple[Mask, bool]:
        self.clock_s = self.lengths_s.pop(0)
        return np.full(1, 6, np.int32), False

    def mask_of(self, token_ids: Any) -> Mask:
        return np.zeros(1, np.int32)

    def thread_time(self) -> float:
        now_s, self.clock_s = self.clock_s, 0.0
        return now_s

    def deep_copy(self) -> TimedMasks:
        return self

    def consume_token(self, token_id: int) -> bool:
        return True

    def is_stopped(self) -> bool:
        return False


def timed(monkeypatch: pytest.MonkeyPatch, lengths_s: list[float]) -> Matcher:
    masks = TimedMasks(lengths_s)
    monkeypatch.setattr(matching, "time", SimpleNamespace(thread_time=masks.thread_time, monotonic=time.monotonic))
    constraint = Constraint(CompiledFormat(ANY, masks), masks, MaskThreads(), np.zeros(1, np.int32), 0)
    return constraint.matcher()
