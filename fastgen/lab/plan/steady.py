"""Expected latency and throughput of a closed loop, in closed form.

Clients send a request each, and the next when it is answered. A prompt is computed in chunks, in the room that the
decodes leave in a step; prompts wait for each other in a queue there. Decodes wait for nobody: they get a token a step.
So this is a closed queueing network with one server, the prompts' room, and a delay, the answers. Its means follow from
mean value analysis (Reiser and Lavenberg, "Mean-value analysis of closed multichain queuing networks", 1980) in the
approximation of Bard and Schweitzer, in which a request finds the queue as ``(n - 1) / n`` of its own mean. Serving a
prompt takes always the same time, so the one being served is half done on average.

Only means come out, of the policy ``splitfuse``, requests of equal lengths and no noise. Percentiles come from a
simulation with the scheduler itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastgen.lab.plan.capacity import Shape
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.work import StepWork

_ROUNDS = 200
_DAMPING = 0.5
# Relative change of the throughput at which the rounds end.
_CLOSE = 1e-6


@dataclass(frozen=True)
class Steady:
    """Means of a closed loop with ``clients``. Times are in seconds."""

    clients: int
    ttft_s: float
    # Between two tokens of an answer: the mean, and a gap in which the step is filled with prompts.
    tpot_s: float
    longest_gap_s: float
    requests_per_s: float
    # Decodes of a step on average.
    decodes: float

    @property
    def e2el_s(self) -> float:
        """Returns the time of a whole answer."""
        return self.clients / self.requests_per_s

    @property
    def tokens_per_s_per_user(self) -> float:
        """Returns the speed at which one user sees the tokens after the first."""
        return 1 / self.tpot_s


def decode_work_of(shape: Shape, num_decodes: float) -> StepWork:
    """Returns the mean work of a step that decodes and does nothing else."""
    count = max(1, round(num_decodes))
    return StepWork(count, round(count * shape.mean_context), 0, count)


def mixed_work_of(shape: Shape, num_decodes: float, num_prompt_tokens: float) -> StepWork:
    """Returns the mean work of a step with so many prompt tokens beside the decodes; these are half way through their
    prompts on average."""
    decodes, tokens = round(num_decodes), max(1, round(num_prompt_tokens))
    context = decodes * shape.mean_context + shape.prompt / 2 + tokens / 2
    return StepWork(decodes + tokens, round(context), round(tokens * shape.prompt / 2), decodes, 1)


def steady_state(cost: StepCost, shape: Shape, *, token_budget: int, clients: int, most_running: int) -> Steady:
    """Returns the means with ``clients``, of which at most ``most_running`` have a request that runs; the others
    wait."""

    def seconds(work: StepWork) -> float:
        return max(cost.device_s(work), cost.host_s)

    running = min(clients, most_running, token_budget)
    num_later = max(shape.answer - 1, 0)
    rate = decodes = ttft_s = longest_gap_s = 0.0
    tpot_s = seconds(decode_work_of(shape, 1))
    for _ in range(_ROUNDS):
        room = max(token_budget - decodes, 1.0)
        # By itself a prompt takes whole steps; in a queue the rest of a step goes to the next prompt.
        num_steps = math.ceil(shape.prompt / room)
        alone_s = num_steps * seconds(mixed_work_of(shape, decodes, shape.prompt / num_steps))
        full_s = seconds(mixed_work_of(shape, decodes, room))
        in_queue_s = min(alone_s, shape.prompt / room * full_s)
        busy = min(1.0, rate * in_queue_s)
        found = max(0.0, rate * ttft_s * (running - 1) / running - busy / 2)
        ttft_s = alone_s + found * in_queue_s
        # The share of the time in which prompts of other requests are computed, and the tokens a second then and else.
        prompt_s = (1 - busy) * alone_s + busy * in_queue_s
        mixed = min(1.0, rate * prompt_s) * (running - 1) / running
        mixed_s = (1 - busy) * alone_s / num_steps + busy * full_s
        tpot_s = 1 / (mixed / mixed_s + (1 - mixed) / seconds(decode_work_of(shape, decodes)))
        longest_gap_s = max(tpot_s, mixed_s if running > 1 else 0.0)
        new_rate = min(running / (ttft_s + num_later * tpot_s), 1 / in_queue_s)
        if abs(new_rate - rate) <= _CLOSE * new_rate:
            break
        rate += _DAMPING * (new_rate - rate)
        decodes = min(rate * num_later * tpot_s, running - busy)
    # What is left of a cycle is spent waiting: for the room of prompts, and for one of the running requests to end.
    ttft_s = max(ttft_s, clients / rate - num_later * tpot_s)
    return Steady(clients, ttft_s, tpot_s, longest_gap_s, rate, decodes)
