"""Expected latency and throughput of a closed loop, in closed form.

Clients send a request each, and the next when it is answered. A prompt is computed in chunks, in the room that the
decodes leave in a step; prompts wait for each other in a queue there. Decodes never wait: they get a token a step.
So this is a closed queueing network with one server, the prompts' room, and a delay, the answers. Its means follow from
mean value analysis (Reiser and Lavenberg, "Mean-value analysis of closed multichain queuing networks", 1980): the queue
that one of ``n`` clients finds is the mean of a loop with ``n - 1``. Serving a prompt takes always the same time, so
the one being served is half done on average. Answers are slower while prompts are computed, and slower answers bring
fewer prompts; the throughput at which both agree is found by bisection.

Only means come out, of the policy ``splitfuse``, requests of equal lengths and no noise. Percentiles come from a
simulation with the scheduler itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from fastgen.lab.plan.capacity import Shape
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.sight import Sight
from fastgen.runtime.step_cost.work import StepWork

_HALVINGS: Final = 40


@dataclass(frozen=True)
class Steady:
    """Means of a closed loop with ``clients``. Times are in seconds."""

    clients: int
    ttft_s: float
    # Between two tokens of an answer: the mean, and a gap in which the step is filled with prompts.
    tpot_s: float
    longest_gap_s: float
    requests_per_s: float
    # Answers beside one's own that decode in a step on average.
    decodes: float

    @property
    def e2el_s(self) -> float:
        """Returns the time of a whole answer."""
        return self.clients / self.requests_per_s

    @property
    def tokens_per_s_per_user(self) -> float:
        """Returns the speed at which one user sees the tokens after the first."""
        return 1 / self.tpot_s


def decode_work_of(shape: Shape, num_decodes: float, sights: Sequence[Sight] = ()) -> StepWork:
    """Returns the mean work of a step that only decodes, on layers with these ``sights``."""
    count = max(1, round(num_decodes))
    return StepWork(count, round(count * _mean_context(shape, sights)), 0, count)


def mixed_work_of(shape: Shape, num_decodes: float, num_prompt_tokens: float, sights: Sequence[Sight] = ()) -> StepWork:
    """Returns the mean work of a step with ``num_decodes`` decodes and a chunk of ``num_prompt_tokens``. The chunk lies
    half way through its prompt on average."""
    decodes, tokens = round(num_decodes), max(1, round(num_prompt_tokens))
    read, pairs = shape.prompt / 2 + tokens / 2, tokens * shape.prompt / 2
    if sights:
        last = max(0.0, shape.prompt - tokens)  # where the last chunk of a prompt begins
        before = sum(share * _mean_seen(0.0, last, window) for window, share, _ in sights)
        read = min(read, before + tokens)
        pairs = sum(share * tokens * _mean_seen(0.0, shape.prompt, window) for window, _, share in sights)
    context = decodes * _mean_context(shape, sights) + read
    return StepWork(decodes + tokens, round(context), round(pairs), decodes, 1, 1)


def _mean_context(shape: Shape, sights: Sequence[Sight]) -> float:
    """Returns how many tokens a decode reads on average."""
    if not sights:
        return shape.mean_context
    return sum(share * _mean_seen(shape.prompt, shape.total, window) for window, share, _ in sights)


def _mean_seen(first: float, last: float, window: int | None) -> float:
    """Returns the mean number of positions that a token reads while its context grows from ``first`` to ``last``."""
    if window is None or window >= last:
        return (first + last) / 2
    if window <= first:
        return window
    return ((first + window) / 2 * (window - first) + window * (last - window)) / (last - first)


def steady_states(cost: StepCost, shape: Shape, *, token_budget: int, most: int) -> list[Steady]:
    """Returns the means with 1, 2 … ``most`` clients. All their requests run."""
    num_later = max(shape.answer - 1, 0)
    found: list[Steady] = []
    # The last round, with one client less, found these: prompts in the queue, its share of time not empty, decodes.
    queued = busy = decodes = 0.0
    for clients in range(1, most + 1):
        times = _times(cost, shape, decodes, busy, token_budget)
        ttft_s = times.alone_s + max(0.0, queued - busy / 2) * times.in_queue_s
        # The share of prompts that are other requests': all but one's own, or all if there is always a queue.
        others_s = times.prompt_s * max((clients - 1) / clients, busy)

        rate = _rate(times, clients, ttft_s, num_later, others_s)
        tpot_s = times.gap_s(rate * others_s)
        # The rest of a cycle is spent waiting for the room of prompts.
        ttft_s = max(ttft_s, clients / rate - num_later * tpot_s)
        longest_gap_s = max(tpot_s, times.mixed_s if clients > 1 else 0.0)
        found.append(Steady(clients, ttft_s, tpot_s, longest_gap_s, rate, decodes))
        queued, busy, decodes = rate * ttft_s, min(1.0, rate * times.prompt_s), rate * num_later * tpot_s
    return found


class _Times(NamedTuple):
    """Seconds of a prompt by itself, in a queue and on average, and of steps with and without prompts."""

    alone_s: float
    in_queue_s: float
    prompt_s: float
    mixed_s: float
    plain_s: float

    def gap_s(self, mixed: float) -> float:
        """Returns the mean gap of an answer if prompts are computed for a share ``mixed`` of the time."""
        share = min(1.0, mixed)
        return 1 / (share / self.mixed_s + (1 - share) / self.plain_s)


def _times(cost: StepCost, shape: Shape, decodes: float, busy: float, token_budget: int) -> _Times:
    def seconds(work: StepWork) -> float:
        return max(cost.device_s(work), cost.host_s)

    room = max(token_budget - decodes, 1.0)
    # By itself a prompt takes whole steps; in a queue the rest of a step goes to the next prompt.
    num_steps = math.ceil(shape.prompt / room)
    step_s = seconds(mixed_work_of(shape, decodes, shape.prompt / num_steps, cost.sights))
    full_s = seconds(mixed_work_of(shape, decodes, room, cost.sights))
    alone_s = num_steps * step_s
    in_queue_s = min(alone_s, shape.prompt / room * full_s)
    return _Times(
        alone_s,
        in_queue_s,
        prompt_s=(1 - busy) * alone_s + busy * in_queue_s,
        mixed_s=(1 - busy) * step_s + busy * full_s,
        plain_s=seconds(decode_work_of(shape, decodes + 1, cost.sights)),
    )


def _rate(times: _Times, clients: int, ttft_s: float, num_later: int, others_s: float) -> float:
    """Returns the requests a second at which ``clients`` spend all their time on their requests, or the most that the
    room for prompts allows."""
    low, high = 0.0, 1 / times.in_queue_s
    for _ in range(_HALVINGS):
        rate = (low + high) / 2
        cycle_s = ttft_s + num_later * times.gap_s(rate * others_s)
        low, high = (rate, high) if rate * cycle_s <= clients else (low, rate)
    return low


def with_waiting(running: Steady, clients: int) -> Steady:
    """Returns the means where more ``clients`` than run send requests: the others wait for one to end."""
    waited_s = clients / running.requests_per_s - running.e2el_s
    return replace(running, clients=clients, ttft_s=running.ttft_s + waited_s)
