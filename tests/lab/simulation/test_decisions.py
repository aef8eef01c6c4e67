"""The simulator decides as the real engine does: fed with the times of a recorded flight, step by step the same."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

import fastgen
from fastgen.lab.simulation import ServerSettings, Simulation
from fastgen.lab.simulation.replica import Replica
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.runtime.flight.recording import Recording, Step
from fastgen.runtime.flight.replay import DECISIONS
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.step.step import Step as EngineStep
from fastgen.runtime.step_cost.cost import StepCost

NUM_REQUESTS = 60
# Small, so that slots and blocks run out.
SIZES: dict[str, Any] = {"token_budget": 64, "max_num_seqs": 8, "block_size": 8, "max_model_len": 256}
NUM_BLOCKS = 90


def prompts() -> list[list[int]]:
    """Returns prompts, some of which begin like others."""
    draw = random.Random(1)
    shared = [draw.randrange(200) for _ in range(60)]
    return [
        shared[: draw.choice([0, 0, 30, 60])] + [draw.randrange(200) for _ in range(draw.randint(1, 120))]
        for _ in range(NUM_REQUESTS)
    ]


def flown(**options: Any) -> Recording:
    """Returns the recording of a real engine, to which requests came while it ran."""
    with fastgen.load("tiny-llama") as llm:
        block_bytes = llm.ledger.size_bytes("KV cache") // llm.config.num_blocks // 2  # blocks of 8, not of 16
    llm = fastgen.load("tiny-llama", kv_cache_memory=NUM_BLOCKS * block_bytes, **SIZES, **options)
    assert llm.config.num_blocks == NUM_BLOCKS
    engine, draw = llm.release_engine(), random.Random(2)
    left = prompts()[::-1]
    while left or engine.has_work:
        if left and draw.random() < 0.3:
            for _ in range(draw.choice([1, 1, 5])):
                if left:
                    sampling = SamplingParams(max_new_tokens=draw.randint(1, 60), temperature=0.0, ignore_eos=True)
                    engine.submit(left.pop(), sampling)
        engine.step()
        time.sleep(engine.idle_s)
    return engine.recorder.recording("tiny-llama")


class Fed:
    """Lets a replica's steps begin and end when the recorded ones did."""

    def __init__(self, replica: Replica, recording: Recording):
        self.replica, self.steps, self.number = replica, recording.steps, 0
        self.step_of_replica = replica.step
        replica.step = self.step  # type: ignore[method-assign]
        replica.engine.runner.launch = self.launch  # type: ignore[method-assign]
        replica.engine.runner.collect = lambda step: None  # type: ignore[method-assign, misc]

    def step(self) -> None:
        self.replica.clock.now_s = self.steps[self.number].began_s
        self.step_of_replica()
        self.number += 1
        if self.number < len(self.steps):  # between two steps requests come
            self.replica.clock.now_s = self.steps[self.number].began_s

    def launch(self, step: EngineStep) -> None:
        ended_s = self.steps[self.number].ended_s
        assert ended_s is not None
        self.replica.clock.now_s = ended_s


def decided(step: Step) -> dict[str, Any]:
    return {name: getattr(step, name) for name in DECISIONS}


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"itl_target_ms": 10.0}, marks=pytest.mark.slow),
        pytest.param({"policy": "prefill_first"}, marks=pytest.mark.slow),
        {"policy": "orca", "prefix_caching": False},
        pytest.param({"kv_reservation": "request"}, marks=pytest.mark.slow),
        {"kv_reservation": "context"},
    ],
    ids=str,
)
def test_every_step_is_the_one_that_the_real_engine_ran(options: dict[str, Any]) -> None:
    recording = flown(**options)
    requests = [
        PlannedRequest(prompt_ids=prompt, num_new_tokens=arrival.max_new_tokens, due_s=arrival.clock_s)
        for prompt, arrival in zip(prompts(), recording.arrivals.values(), strict=True)
    ]
    simulation = Simulation(
        requests,
        ServerSettings(num_blocks=NUM_BLOCKS, **SIZES, **options),
        StepCost.linear(0.0, 0.0),
        records_flight=True,
    )
    (replica,) = simulation.replicas
    Fed(replica, recording)
    run = simulation.run()
    (simulated,) = simulation.recordings("tiny-llama")
    assert len(simulated.steps) == len(recording.steps)
    for real, virtual in zip(recording.steps, simulated.steps, strict=True):
        assert decided(virtual) == decided(real), f"step {real.step}"
    assert [record.num_generated for record in run.records] == [request.num_new_tokens for request in requests]
    if "itl_target_ms" not in options:  # with a target, what runs together depends on how long steps took
        assert any(step.preempted for step in recording.steps) == ("kv_reservation" not in options)
