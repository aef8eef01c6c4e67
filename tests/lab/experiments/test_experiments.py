"""Latency, serve, policies and startup, on runs that are made, and on tiny-llama."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.lab.experiments.latency import latency
from fastgen.lab.experiments.policies import policies
from fastgen.lab.experiments.pooled import pooled
from fastgen.lab.experiments.serve import AtOnce, serve
from fastgen.lab.experiments.startup import PHASES, Startup, startup
from fastgen.lab.load.engine_target import EngineTarget
from fastgen.lab.load.generator import Load, LoadGenerator
from fastgen.lab.records import Run
from fastgen.lab.workloads.arrivals import Constant
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.lab.workloads.synthetic import FixedLengths, Intruders
from fastgen.runtime.flight.replay import first_difference
from tests.lab.experiments.made_runs import record, run

SMALL = FixedLengths(num_prompt_tokens=24, num_new_tokens=6, num_requests=8)


class Noted:
    """A ``Runs`` that notes what it is asked and answers every request after 0.1 s."""

    def __init__(self, interrupt_after: float = math.inf) -> None:
        self.asked: list[tuple[Sequence[PlannedRequest], Load, Mapping[str, Any]]] = []
        self._interrupt_after = interrupt_after

    def __call__(self, requests: Sequence[PlannedRequest], load: Load, workload: Mapping[str, Any]) -> Run:
        self.asked.append((requests, load, workload))
        records = [record(number, ttft_s=0.1, sent_s=0.0, ended_s=0.2) for number in range(len(requests))]
        return run(records, interrupted=len(self.asked) > self._interrupt_after, duration_s=0.2)


@pytest.fixture(scope="module")
def target() -> Iterator[EngineTarget]:
    llm = fastgen.load("tiny-llama", max_num_seqs=4, num_threads=1, prefix_caching=False)
    with EngineTarget(llm.release_engine(), {"model": "tiny-llama"}) as target:
        yield target


def test_serve_makes_the_load_that_is_asked_for() -> None:
    noted = Noted()
    serve(noted, SMALL, Constant(4.0), vocab_size=50, seed=3, num_warm_ups=2)
    serve(noted, SMALL, 5, vocab_size=50, seed=3)
    serve(noted, Intruders(num_long=1), None, vocab_size=50)
    (at_rate, open_loop, facts), (by_clients, closed_loop, _), (own_times, _, _) = noted.asked
    assert [request.due_s for request in at_rate] == [number / 4 for number in range(8)]
    assert open_loop.facts()["arrivals"] == {"name": "constant", "rate": 4.0, "seed": 3}
    assert open_loop.num_warm_ups == 2
    assert facts == {"name": "fixed", "prompt": 24, "answer": 6, "n": 8, "seed": 3, "requests": 8}
    assert closed_loop.num_clients == closed_loop.num_warm_ups == 5
    assert [request.prompt_ids for request in by_clients] == [request.prompt_ids for request in at_rate]
    assert own_times[-1].due_s == 2.0


def test_latency_repeats_a_batch_with_other_prompts() -> None:
    noted = Noted()
    found = latency(noted, batch_size=3, num_prompt_tokens=7, num_new_tokens=2, vocab_size=50, num_repeats=12)
    assert len(noted.asked) == 15, "three do not count"
    prompts = {tuple(request.prompt_ids) for requests, _, _ in noted.asked for request in requests}
    assert len(prompts) == 45
    assert found.latencies_s == [0.2] * 12
    facts = found.as_json()
    assert facts["avg_latency"] == pytest.approx(0.2)
    assert facts["avg_latency_interval"] == pytest.approx([0.2, 0.2])
    assert facts["percentiles"]["50"] == pytest.approx(0.2)
    assert facts["percentiles"]["99"] is None, "of too few batches"
    json.dumps(facts)


def test_latency_keeps_what_was_measured_before_an_interruption() -> None:
    found = latency(Noted(4), batch_size=1, num_prompt_tokens=7, num_new_tokens=2, vocab_size=50, num_warm_ups=1)
    assert len(found.runs) == 4


def test_pooled_runs_follow_each_other() -> None:
    one = run([record(0, ttft_s=0.1, session="s")], lag_s={"p99": 0.1}, duration_s=2.0)
    two = run([record(0, ttft_s=0.2, session="s")], lag_s={"p99": 0.3}, invalid="late", duration_s=3.0)
    both = pooled([one, two])
    first, second = both.records
    assert first == replace(one.records[0], session="0.s")
    assert (second.request, second.session, second.sent_s) == (1, "1.s", 2.0)
    assert second.ttft_s == pytest.approx(0.2)
    assert (both.header.duration_s, both.header.lag_s, both.header.invalid) == (5.0, {"p99": 0.3}, "late")
    assert both.header.load["runs"] == 2


def test_policies_run_in_turns_on_one_engine(target: EngineTarget) -> None:
    runs = LoadGenerator(target)
    vocab_size = target.engine.vocab_size
    names = ["splitfuse", "prefill_first", "orca"]

    def measure(seed: int) -> Run:
        return serve(runs, SMALL, AtOnce(), vocab_size=vocab_size, seed=seed)

    found = policies(target, names, measure, num_rounds=2)
    order = [(turn.round, turn.policy) for turn in found.turns]
    assert order == [
        *((0, name) for name in names),
        *((1, name) for name in ("prefill_first", "orca", "splitfuse")),
    ]
    assert found.names == names
    for turn in found.turns:
        assert turn.run.header.target["engine"]["policy"] == turn.policy
        assert len(turn.run.complete) == 8
        assert turn.run.header.workload["seed"] == turn.round
    assert len(found.run("orca").records) == 16
    recording = target.engine.recorder.recording("tiny-llama")
    assert recording.header.engine.policy == "splitfuse"
    assert first_difference(recording) is None, "the recording began with the policy"


def test_policies_that_cannot_be_compared_are_refused(target: EngineTarget) -> None:
    def measure(seed: int) -> Run:
        raise AssertionError("nothing is to be measured")

    for names in (["orca"], ["orca", "orca"]):
        with pytest.raises(InvalidArgumentError, match="two or more different"):
            policies(target, names, measure)
    with pytest.raises(InvalidArgumentError, match="did you mean 'orca'"):
        policies(target, ["splitfuse", "orka"], measure)
    caching = fastgen.load("tiny-llama", max_num_seqs=2, num_threads=1)
    with (
        EngineTarget(caching.release_engine(), {}) as other,
        pytest.raises(InvalidArgumentError, match="without a prefix cache"),
    ):
        policies(other, ["splitfuse", "orca"], measure)


@pytest.mark.slow  # three processes that load a model
def test_startup_times_fresh_processes(tmp_path: Path) -> None:
    found = startup({"model": "tiny-llama", "target": "torch", "num_threads": 1}, num_cold=1, num_warm=1)
    assert (len(found.cold), len(found.warm)) == (1, 1)
    for sample in (*found.cold, *found.warm):
        times = [sample[phase] for phase in PHASES]
        assert times == sorted(times)
        assert times[0] > 0
    facts = found.as_json()
    assert facts["cold_startup_times"] == [found.cold[0]["loaded"]]
    assert facts["avg_warm_startup_time"] == found.warm[0]["loaded"]


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_said_of_its_startup() -> None:
    with pytest.raises(FastgenError, match=r"could not load the model: .*no-such-model"):
        startup({"model": "./no-such-model"}, num_cold=1, num_warm=0)


def test_startup_figures_have_a_range() -> None:
    found = Startup(cold=({"loaded": 3.0},), warm=({"loaded": 1.0}, {"loaded": 2.0}, {"loaded": 4.0}))
    assert found.figure("warm", "loaded").value == 2.0
    assert found.figure("warm", "loaded").interval == (1.0, 4.0)
    assert found.figure("cold", "loaded").interval is None
