"""A simulated device: the real engine and scheduler over made-up tokens, a cost model and a virtual clock.

For studies of policies and tests of what a schedule does to time: hours of traffic run in seconds, and the same on
every machine. The tokens are a function of the sequence alone, so here too an answer does not depend on other requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, cast

from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.requests.sampled import SampledToken
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies.policy import Policy
from fastgen.runtime.scheduling.policies.step_time import StepWork
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.scheduling.waiting_queue import DEFAULT_AGING_S
from fastgen.runtime.step.model_runner import ModelRunner
from fastgen.runtime.step.step import Step

VOCAB_SIZE = 1000


@dataclass(frozen=True)
class CostModel:
    """The time of a step: ``step_s + token_s * tokens + context_s * context + pair_s * pairs`` seconds, with the counts
    of :class:`~fastgen.runtime.scheduling.policies.step_time.StepWork`, times a log-normal factor whose logarithm has
    the standard deviation ``noise``.
    """

    step_s: float
    token_s: float
    context_s: float = 0.0
    pair_s: float = 0.0
    noise: float = 0.0

    def mean_s(self, work: StepWork) -> float:
        return (
            self.step_s
            + self.token_s * work.num_tokens
            + self.context_s * work.num_context
            + self.pair_s * work.num_pairs
        )


class VirtualClock:
    """Seconds since the beginning. They pass only when a caller sets them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SimulatedRunner:
    """Takes the place of a :class:`~fastgen.runtime.step.model_runner.ModelRunner`; a step advances ``clock``."""

    def __init__(self, cost: CostModel, clock: VirtualClock, *, seed: int = 0):
        self.cost, self.clock = cost, clock
        self._random = random.Random(seed)

    def launch(self, step: Step) -> None:
        noise = self._random.lognormvariate(0.0, self.cost.noise) if self.cost.noise else 1.0
        self.clock.now_s += self.cost.mean_s(step.schedule.work) * noise

    def sample(self, step: Step) -> None:
        sampling = [*step.schedule.decodes, *(chunk.seq for chunk in step.schedule.chunks if chunk.samples)]
        step.sampled = [(seq, SampledToken(_next_token(seq))) for seq in sampling]

    def collect(self, step: Step) -> None:
        pass


class Arrival(NamedTuple):
    """A request that arrives at ``at_s``."""

    at_s: float
    prompt_ids: SequenceOf[int]
    sampling: SamplingParams


class SimulatedServer:
    """An engine on a simulated device. It has no end-of-text tokens, so answers are ``max_new_tokens`` long."""

    def __init__(
        self,
        cost: CostModel,
        *,
        token_budget: int,
        max_num_seqs: int,
        num_blocks: int,
        block_size: int = 16,
        policy: Policy | None = None,
        aging_s: float = DEFAULT_AGING_S,
        prefix_caching: bool = False,
        seed: int = 0,
    ):
        self.clock = VirtualClock()
        kv = KVCacheManager(num_blocks, block_size, max_chunk=token_budget, prefix_caching=prefix_caching)
        scheduler = Scheduler(kv, token_budget=token_budget, max_num_seqs=max_num_seqs, policy=policy, aging_s=aging_s)
        self.engine = Engine(
            cast(ModelRunner, SimulatedRunner(cost, self.clock, seed=seed)),
            scheduler,
            vocab_size=VOCAB_SIZE,
            max_model_len=kv.pool.capacity * block_size,
            eos_token_ids=frozenset(),
            new_detokenizer=None,
            clock=self.clock,
        )

    def serve(self, arrivals: Iterable[Arrival]) -> list[Generation]:
        """Answers all ``arrivals``, in order of time. A request that arrives during a step waits for the step's end."""
        generations: list[Generation] = []
        for arrival in arrivals:
            self.run(until_s=arrival.at_s)
            step_end_s = max(self.clock.now_s, arrival.at_s)
            self.clock.now_s = arrival.at_s
            generations.append(self.engine.submit(arrival.prompt_ids, arrival.sampling))
            self.clock.now_s = step_end_s
        self.run()
        return generations

    def run(self, until_s: float = float("inf")) -> None:
        """Runs steps as long as there is work and the clock is before ``until_s``."""
        while self.engine.has_work and self.clock.now_s < until_s:
            self.engine.step()
            if idle_s := self.engine.idle_s:
                self.clock.now_s = min(self.clock.now_s + idle_s, until_s)


def _next_token(seq: Sequence) -> int:
    return (31 * seq.token_ids[-1] + 17 * seq.num_tokens + 7 * seq.index + len(seq.request.prompt_ids)) % VOCAB_SIZE
