"""A simulated device: the real engine and scheduler over made-up tokens, a cost model and a virtual clock.

For studies of policies and tests of what a schedule does to time: hours of traffic run in seconds, and the same on
every machine. The tokens are a function of the sequence alone, so here too an answer does not depend on other requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, cast

from fastgen.runtime.answers.counted import CountedAnswers
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.requests.sampled import SampledToken
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies.policy import Policy
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.scheduling.waiting_queue import DEFAULT_AGING_S
from fastgen.runtime.step.faults import Phase
from fastgen.runtime.step.model_runner import ModelRunner
from fastgen.runtime.step.step import Step
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.sight import seen_work
from fastgen.runtime.step_cost.work import StepWork

# Any token id of a prompt is below this.
VOCAB_SIZE = 2**31
_NUM_ANSWER_TOKENS = 1000


class VirtualClock:
    """Seconds since the beginning. They pass only when a caller sets them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SimulatedRunner:
    """Takes the place of a :class:`~fastgen.runtime.step.model_runner.ModelRunner`; its steps advance ``clock``.

    The device computes one step after another. Where the engine runs ahead, the host's part of a step passes while the
    device computes the step before.
    """

    # Nothing takes part that could be lost.
    lost: str | None = None

    def __init__(self, cost: StepCost, clock: VirtualClock, *, seed: int = 0, makes_tokens: bool = True):
        self.cost, self.clock, self._makes_tokens = cost, clock, makes_tokens
        self._random, self._varies = random.Random(seed), bool(cost.scatter or cost.noise)
        # When the device has computed all steps launched so far.
        self._free_s = 0.0
        # When the device has computed each step that was not collected yet.
        self._ends_s: dict[Step, float] = {}
        # The decodes of the last step, if it had nothing else.
        self._decodes: SequenceOf[Sequence] = ()

    def close(self) -> None:
        """Does nothing: no other process takes part."""

    def launch(self, step: Step) -> None:
        cost, clock = self.cost, self.clock
        ratio = cost.draw_ratio(self._random) if self._varies else 1.0
        clock.now_s += cost.host_s * ratio
        self._free_s = max(clock.now_s, self._free_s) + cost.device_s(self._work(step.schedule)) * ratio
        self._ends_s[step] = self._free_s
        if cost.sizes:
            step.num_padding = step.schedule.size - step.schedule.num_tokens

    def _work(self, schedule: Schedule) -> StepWork:
        work, decodes, self._decodes = schedule.work, self._decodes, () if schedule.chunks else schedule.decodes
        if self.cost.sights:
            chunks = [(chunk.start, chunk.num_tokens) for chunk in schedule.chunks]
            work = seen_work(work, schedule.positions, chunks, self.cost.sights)
        return work if work.num_built or decodes == self._decodes else work._replace(num_built=1)

    def sample(self, step: Step) -> None:
        if not self._makes_tokens:
            return
        sampling = [*step.schedule.decodes, *(chunk.seq for chunk in step.schedule.chunks if chunk.samples)]
        step.sampled = [(seq, SampledToken(_next_token(seq))) for seq in sampling]

    def collect(self, step: Step) -> None:
        self.clock.now_s = max(self.clock.now_s, self._ends_s.pop(step))


class CountingEngine(Engine):
    """An engine whose answers are counted and not made. It records nothing, so a step with 32 decodes takes a
    quarter of the time.

    A failure ends the simulation: it is raised.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.observers.set()
        self.scheduler.running.has_device = False
        self.answers = CountedAnswers(
            self.scheduler,
            self.observers,
            self._attempt,
            eos_token_ids=self.eos_token_ids,
            new_detokenizer=None,
            clock=lambda: self.clock(),
        )

    def _fail(self, phase: Phase, subject: Any, error: Exception) -> None:
        raise error


class Arrival(NamedTuple):
    """A request that arrives at ``at_s``."""

    at_s: float
    prompt_ids: SequenceOf[int]
    sampling: SamplingParams


class SimulatedServer:
    """An engine on a simulated device. It has no end-of-text tokens, so answers are ``max_new_tokens`` long.

    ``max_model_len`` is by default what the whole KV cache holds. Where ``makes_tokens`` is false, answers have times
    and no tokens, nothing is recorded, and requests have one completion.
    """

    def __init__(
        self,
        cost: StepCost,
        *,
        token_budget: int,
        max_num_seqs: int,
        num_blocks: int,
        block_size: int = 16,
        policy: Policy | None = None,
        aging_s: float = DEFAULT_AGING_S,
        prefix_caching: bool = False,
        windows: SequenceOf[int | None] = (None,),
        max_model_len: int | None = None,
        runs_ahead: bool = False,
        kv_reservation: str | None = None,
        makes_tokens: bool = True,
        seed: int = 0,
    ):
        self.clock = VirtualClock()
        kv = KVCacheManager(num_blocks, block_size, windows, max_chunk=token_budget, prefix_caching=prefix_caching)
        self.max_model_len = max_model_len or kv.pool.capacity // kv.num_groups * block_size
        scheduler = Scheduler(
            kv,
            token_budget=token_budget,
            max_num_seqs=max_num_seqs,
            policy=policy,
            aging_s=aging_s,
            kv_reservation=kv_reservation,
            max_model_len=self.max_model_len,
        )
        self.engine = (Engine if makes_tokens else CountingEngine)(
            cast(ModelRunner, SimulatedRunner(cost, self.clock, seed=seed, makes_tokens=makes_tokens)),
            scheduler,
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            eos_token_ids=frozenset(),
            new_detokenizer=None,
            clock=self.clock,
            runs_ahead=runs_ahead,
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
    return (
        31 * seq.token_ids[-1] + 17 * seq.num_tokens + 7 * seq.index + len(seq.request.prompt_ids)
    ) % _NUM_ANSWER_TOKENS
