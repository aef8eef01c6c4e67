"""Load for comparisons of routers: conversations, and prompts that begin with one of many prefixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastgen.lab.workloads.request import PlannedRequest

VOCAB_SIZE = 32_000
# A conversation: turns, tokens that each adds and is answered with, and seconds from an answer to the next turn.
NUM_TURNS, NUM_PROMPT, NUM_NEW, THINK_S = 10, 150, 350, 5.0
# About how long a turn takes, with the time to think.
_TURN_S = 17.0
# Prompts that share prefixes: tokens of a prefix, of what follows it, and of the answer, and how unevenly prefixes are
# asked for: the nth most frequent one comes 1 / n ** exponent as often as the first.
PREFIX, AFTER, ANSWER, EXPONENT = 2048, 128, 64, 1.1
PREFIXES_EACH = 8


@dataclass(frozen=True)
class Load:
    """A kind of load. ``requests`` takes the rate of a replica, their number, the seconds and the seed."""

    title: str
    requests: Callable[[float, int, float, int], list[PlannedRequest]]


def conversations(
    rate: float, num_replicas: int, duration_s: float, seed: int, *, num_shared: int = 0
) -> list[PlannedRequest]:
    """Returns conversations of which ``rate`` begin each second for each replica. All begin with the same
    ``num_shared`` tokens. Turns that would come after ``duration_s`` are left out.
    """
    draw = np.random.default_rng((seed, 1))
    shared = draw.integers(0, VOCAB_SIZE, num_shared).tolist()
    starts_s = np.cumsum(draw.exponential(1 / (rate * num_replicas), int(2 * rate * num_replicas * duration_s)))
    return [
        PlannedRequest(
            prompt_ids=(shared if not turn else []) + draw.integers(0, VOCAB_SIZE, NUM_PROMPT).tolist(),
            num_new_tokens=NUM_NEW,
            due_s=float(start_s) if not turn else 0.0,
            session=f"conversation {number}",
            think_s=THINK_S if turn else 0.0,
            continues=turn > 0,
        )
        for number, start_s in enumerate(starts_s)
        for turn in range(NUM_TURNS)
        if start_s + turn * _TURN_S < duration_s
    ]


def prefixes(rate: float, num_replicas: int, duration_s: float, seed: int) -> list[PlannedRequest]:
    """Returns ``rate`` requests each second for each replica, with :data:`PREFIXES_EACH` prefixes for each replica."""
    draw = np.random.default_rng((seed, 2))
    shared = draw.integers(0, VOCAB_SIZE, (PREFIXES_EACH * num_replicas, PREFIX)).tolist()
    weights = 1 / np.arange(1, len(shared) + 1) ** EXPONENT
    times_s = np.cumsum(draw.exponential(1 / (rate * num_replicas), int(rate * num_replicas * duration_s)))
    chosen = draw.choice(len(shared), len(times_s), p=weights / weights.sum())
    return [
        PlannedRequest(
            prompt_ids=shared[prefix] + draw.integers(0, VOCAB_SIZE, AFTER).tolist(),
            num_new_tokens=ANSWER,
            due_s=float(due_s),
        )
        for prefix, due_s in zip(chosen, times_s, strict=True)
    ]
