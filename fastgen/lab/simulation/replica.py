"""One engine on a simulated device, with a clock of its own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

from fastgen.lab.simulation.settings import ServerSettings
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies import choose_policy
from fastgen.runtime.simulated import SimulatedServer
from fastgen.runtime.step_cost.cost import StepCost


class Replica:
    """Answers requests in virtual time. ``on_end`` is called with each answer that is complete.

    With ``records_flight`` the engine's recorder and counters are on, which takes two to four times as long; answers
    and their times are the same.
    """

    def __init__(
        self,
        settings: ServerSettings,
        cost: StepCost,
        on_end: Callable[[Generation], None],
        *,
        seed: int = 0,
        records_flight: bool = False,
    ):
        self._server = SimulatedServer(
            cost,
            token_budget=settings.token_budget,
            max_num_seqs=settings.max_num_seqs,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            policy=choose_policy(settings.policy, settings.itl_target_ms),
            aging_s=settings.aging_s,
            prefix_caching=settings.prefix_caching,
            windows=settings.windows,
            max_model_len=settings.max_model_len,
            runs_ahead=settings.runs_ahead,
            kv_reservation=settings.kv_reservation,
            makes_tokens=records_flight,
            seed=seed,
        )
        self.engine, self.clock = self._server.engine, self._server.clock
        self.engine.answers.on_end = on_end
        self._step_gap_s, self._arrival_s = settings.step_gap_s, settings.arrival_s
        if records_flight:  # all of it, however long
            self.engine.recorder.max_steps = self.engine.recorder.max_bytes = sys.maxsize
        # Until when the policy waits for more requests.
        self._resumes_s = 0.0
        self._samplings: dict[int, SamplingParams] = {}

    @property
    def next_step_s(self) -> float:
        """Returns when the next step can begin; infinity while there is nothing to run."""
        return max(self.clock.now_s, self._resumes_s) if self.engine.has_work else math.inf

    def submit(self, prompt_ids: Sequence[int], num_new: int, at_s: float) -> Generation:
        """Queues a request that arrives at ``at_s``, perhaps in the middle of a step.

        :raises InvalidArgumentError: if it can never be served.
        """
        if num_new not in self._samplings:  # one object for equal parameters: these are checked once
            self._samplings[num_new] = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
        step_end_s = max(self.clock.now_s, at_s)
        self.clock.now_s = at_s
        try:
            return self.engine.submit(prompt_ids, self._samplings[num_new])
        finally:
            self.clock.now_s = self._resumes_s = step_end_s + self._arrival_s

    def step(self) -> None:
        """Runs the next step. The clock shows then when the one after it may begin."""
        clock, engine = self.clock, self.engine
        clock.now_s = max(clock.now_s, self._resumes_s)
        engine.step()
        clock.now_s += self._step_gap_s
        self._resumes_s = clock.now_s + engine.idle_s

    def recording(self, model: str) -> Recording:
        """Returns the flight recording, if it ``records_flight``; else one without events."""
        return self.engine.recorder.recording(model)
