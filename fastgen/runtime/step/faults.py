"""Failures inside a step: in which phase, and what the requests that they end report."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

import torch

_LOWER = "lower token_budget, max_num_seqs, max_model_len or kv_cache_memory when loading"

_Ts = TypeVarTuple("_Ts")
_R = TypeVar("_R")


class Phase(enum.Enum):
    """The phases in which something may raise. The phase decides which requests end."""

    # Scheduling the next step before the tokens of the last are known: none. It is scheduled again with them.
    SCHEDULE_AHEAD = enum.auto()
    # Scheduling: none. It is tried once more, since nothing that was allocated is lost.
    SCHEDULE = enum.auto()
    # Scheduling, the second time: those that run and the next in the queue, so that the failure cannot repeat forever.
    SCHEDULE_AGAIN = enum.auto()
    # Making what the answers of a new request need: that request.
    PREPARE = enum.auto()
    # Launch, sample, commit and collect: all requests of the step, since it is unknown how far the step got.
    RUN = enum.auto()
    # Handling a sequence's own tokens: its request.
    UPDATE = enum.auto()
    # Decoding the rest of an answer's text when it ends anyway: its request, with an error.
    TEXT = enum.auto()
    # Learning from the time that a step took: none. The step is complete.
    LEARN = enum.auto()


@dataclass(frozen=True)
class Failure:
    """An exception that a phase raised."""

    error: Exception

    @property
    def cause(self) -> str:
        return cause_of(self.error)


class Attempt(Protocol):
    """Calls ``function``. If it raises, applies what a failure of ``phase`` does to ``subject``, and returns it."""

    def __call__(
        self, phase: Phase, subject: object, function: Callable[[Unpack[_Ts]], _R], *args: *_Ts
    ) -> _R | Failure: ...


def cause_of(error: Exception) -> str:
    """Returns the text of ``error`` for the outputs of the requests that it ends. Where memory ran out, the text says
    what to lower.
    """
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"out of memory, {_LOWER} ({text})" if _is_out_of_memory(error) else text


def _is_out_of_memory(error: Exception) -> bool:
    """Returns whether memory ran out. On a CPU torch raises a plain ``RuntimeError``, which only its text shows."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
