"""Measures how far the simulator is from the real engine, on load that it was not calibrated on.

``python -m benchmarks.lab.accuracy [MODEL …] [--clock cpu|wall] [--rounds N] [--output FILE]`` runs workloads on each
model on this machine. A round is designed steps, a workload on the real engine, and designed steps again, so that a
machine whose speed changes is measured on both sides of the run. The cost of a step is fitted to the designed steps
alone. Then the workload runs in virtual time with that cost. The error of each metric is that of the simulation beside
the real run.

Beside it stands what is possible on the machine: the same simulation with a cost fitted to the real run's own steps.

With ``--clock cpu`` the engine computes on one thread, and its clock is the processor time of this process, so what
other programs take from it does not count. Nothing else differs: requests come by this clock, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar, cast

import fastgen
from benchmarks.new_file import new_file
from fastgen.lab.devices.calibration import recorded_sizes
from fastgen.lab.devices.designed_steps import DesignedSteps
from fastgen.lab.machine import machine_facts
from fastgen.lab.records import Run, write_run
from fastgen.lab.simulation import ServerSettings, Simulation
from fastgen.lab.simulation.replica import Replica
from fastgen.lab.workloads.arrivals import Poisson, with_arrivals
from fastgen.lab.workloads.request import PlannedRequest, Workload
from fastgen.lab.workloads.synthetic import Chats, RandomLengths
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine
from fastgen.runtime.flight.step_times import measured_steps
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.fit import MeasuredStep, fit_step_cost, residuals

SEED = 1
# Clients of closed loops begin within this many seconds for each of them.
_STAGGER_S = 0.01
_NO_COST = StepCost.linear(0.0, 0.0)
Kind = TypeVar("Kind", bound=Simulation)
# The sizes of the engine for models with a vocabulary of usual size.
_SIZES = {"max_num_seqs": 16, "token_budget": 128, "max_model_len": 1024, "kv_cache_memory": "400MiB"}
# Answers of a run that a percentile needs at least: ten beyond it.
_LEAST_BEYOND = 10


@dataclass(frozen=True)
class Case:
    """A workload, and how it is sent: at a rate, or by clients."""

    workload: Workload
    rate: float | None = None
    num_clients: int | None = None

    def requests(self, vocab_size: int) -> list[PlannedRequest]:
        planned = self.workload.requests(vocab_size=vocab_size, seed=SEED)
        return planned if self.rate is None else with_arrivals(planned, Poisson(self.rate), seed=SEED)


@dataclass(frozen=True)
class Model:
    """A model, how it is loaded, how long its steps are measured, and what is asked of it."""

    load: Mapping[str, Any]
    calibration_s: float
    cases: Mapping[str, Case]


def lengths(num_prompt: int, num_new: int, num_requests: int) -> Workload:
    return RandomLengths(num_prompt_tokens=num_prompt, num_new_tokens=num_new, num_requests=num_requests)


def chats(num_sessions: int, num_turns: int, num_prompt: int, num_new: int) -> Workload:
    """Returns chats with turns of many lengths.

    With equal lengths clients keep the steps that they begin with for a whole run: those that begin together always end
    together, and their prompts share steps. So tiny differences at the beginning decide everything. Of equal runs of
    the real engine one had 75 % more steps with prompts than another, and a TPOT that was 21 % longer.
    """
    return Chats(
        num_sessions=num_sessions,
        num_turns=num_turns,
        num_prompt_tokens=num_prompt,
        num_new_tokens=num_new,
        range_ratio=0.5,
    )


def models() -> dict[str, Model]:
    return {
        "tiny-llama": Model(
            {"max_num_seqs": 32, "token_budget": 256},
            12.0,
            {
                "random lengths, Poisson": Case(lengths(256, 64, 1000), rate=30.0),
                "random lengths, 8 clients": Case(lengths(512, 64, 1000), num_clients=8),
                "chats, 8 clients": Case(chats(170, 6, 60, 60), num_clients=8),
            },
        ),
        "llama-37m": Model(_SIZES, 20.0, cases(num_requests=1000, num_sessions=250, rate=8.0)),
        "llama-64m": Model(_SIZES, 30.0, cases(num_requests=1000, num_sessions=250, rate=4.5)),
        "llama-110m": Model(_SIZES, 40.0, cases(num_requests=100, num_sessions=24, rate=1.2)),
    }


def cases(*, num_requests: int, num_sessions: int, rate: float) -> dict[str, Case]:
    """Returns the three loads of a model with a vocabulary of usual size."""
    return {
        "random lengths, Poisson": Case(lengths(64, 24, num_requests), rate=rate),
        "random lengths, 6 clients": Case(lengths(96, 24, num_requests), num_clients=6),
        "chats, 6 clients": Case(chats(num_sessions, 4, 32, 24), num_clients=6),
    }


def values(run: Run) -> dict[str, list[float]]:
    """Returns the samples of each metric, in milliseconds."""
    records = run.complete
    return {
        "ttft": [1000 * record.ttft_s for record in records if record.ttft_s is not None],
        "tpot": [1000 * record.tpot_s for record in records if record.tpot_s is not None],
        "itl": [1000 * gap_s for record in records for gap_s in record.gaps_s],
        "e2el": [1000 * record.e2el_s for record in records],
    }


def figures(run: Run) -> dict[str, float]:
    """Returns mean and percentiles of each metric, as far as there are enough samples for them, and the throughput."""
    found = {"output_throughput": sum(record.num_generated for record in run.complete) / run.header.duration_s}
    for name, samples in values(run).items():
        ordered = sorted(samples)
        found[f"mean_{name}_ms"] = fmean(ordered)
        for percent in (50, 90, 99):
            if len(ordered) * (100 - percent) / 100 >= _LEAST_BEYOND or percent == 50:
                found[f"p{percent}_{name}_ms"] = ordered[round(percent / 100 * (len(ordered) - 1))]
    return found


def errors(simulated: Mapping[str, float], real: Mapping[str, float]) -> dict[str, float]:
    return {name: round(simulated[name] / real[name] - 1, 4) for name in real}


def freeze() -> None:
    """Keeps the steps that are recorded so far out of garbage collection. A server would keep few of them."""
    gc.collect()
    gc.freeze()


class CpuClock:
    """The processor time of this process, and the time that it was idle for want of requests."""

    def __init__(self) -> None:
        self._idle_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._idle_s

    def wait_until(self, time_s: float) -> None:
        self._idle_s += max(0.0, time_s - self())


class WallClock:
    def __call__(self) -> float:
        return time.perf_counter()

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self()))


class EngineReplica:
    """The real engine in the place of a simulated replica. Its times are seconds since it was made."""

    def __init__(self, engine: Engine, clock: CpuClock | WallClock, on_end: Callable[[Generation], None]):
        self._engine, self._clock, self._on_end = engine, clock, on_end
        self._begin_s = clock()
        engine.answers.on_end = self._end

    @property
    def next_step_s(self) -> float:
        return self._clock() - self._begin_s if self._engine.has_work else math.inf

    def submit(self, prompt_ids: Sequence[int], num_new: int, at_s: float) -> Generation:
        if not self._engine.has_work:
            self._clock.wait_until(self._begin_s + at_s)
        return self._engine.submit(prompt_ids, SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True))

    def step(self) -> None:
        self._engine.step()

    def _end(self, generation: Generation) -> None:
        times_s = generation.completions[0].token_times_s
        times_s[:] = [time_s - self._begin_s for time_s in times_s]
        self._on_end(generation)


class RealRun(Simulation):
    """A run whose clients and records are the simulation's, and whose steps are those of the real engine."""

    def use(self, engine: Engine, clock: CpuClock | WallClock) -> RealRun:
        self.replicas = [cast(Replica, EngineReplica(engine, clock, self._end))]
        return self


class Bench:
    """One model's engine, on which steps are measured and workloads run, in turns."""

    def __init__(self, name: str, path: str, model: Model, directory: Path, clock: CpuClock | WallClock):
        self.name, self.model, self.directory, self.clock = name, model, directory, clock
        threads = 1 if isinstance(clock, CpuClock) else None
        llm = fastgen.load(path, **model.load, num_threads=threads)
        self.vocab_size, self.config = llm.spec.vocab_size, llm.config
        self.engine: Engine = llm.release_engine()
        self.engine.clock = clock
        self.engine.answers.gives_text = False
        self.engine.recorder.max_steps, self.engine.recorder.max_bytes = 10**6, 2**30
        # How long an arriving request keeps the engine, by the last designed steps.
        self.arrival_s = 0.0
        DesignedSteps(self.engine).warm_up()

    def designed(self, seed: int) -> list[MeasuredStep]:
        self.engine.answers.on_end = None  # that of the last run
        freeze()
        begin_s, steps = self.engine.clock(), DesignedSteps(self.engine, seed=seed)
        steps.run(self.model.calibration_s / 2)
        self.arrival_s = median(steps.arrivals_s)
        return self.steps_since(begin_s)

    def steps_since(self, begin_s: float) -> list[MeasuredStep]:
        recording = self.engine.recorder.recording(self.name)
        return [measured for step, measured in measured_steps(recording) if step.began_s >= begin_s]

    def step_gap_s(self) -> float:
        steps = self.engine.recorder.recording(self.name).steps
        gaps_s = [later.began_s - earlier.end_s for earlier, later in pairwise(steps) if later.num_decodes]
        return max(0.0, median(gaps_s))

    def settings(self) -> ServerSettings:
        config = self.config
        return ServerSettings(
            num_blocks=config.num_blocks,
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            prefix_caching=config.prefix_caching,
            step_gap_s=self.step_gap_s(),
            arrival_s=self.arrival_s,
        )

    def round(self, number: int, name: str, case: Case) -> dict[str, Any]:
        """Returns the errors of one round of ``case``; its real and its simulated run are written beside them."""
        before = self.designed(2 * number)
        settings = self.settings()
        freeze()
        begin_s = self.engine.clock()
        requests = case.requests(self.vocab_size)
        real = self.simulation(requests, case, settings, _NO_COST, RealRun).use(self.engine, self.clock).run()
        own = self.steps_since(begin_s)
        designed = [*before, *self.designed(2 * number + 1)]
        facts = {"settings": settings.facts()}
        for kind, steps in {"held_out": designed, "own": own}.items():
            cost = fit_step_cost(steps, recorded=recorded_sizes(captured_sizes(self.config.token_budget)))
            run = self.simulation(requests, case, settings, cost, Simulation).run()
            facts[kind] = {
                "errors": errors(figures(run), figures(real)),
                "fit": {each: asdict(found) for each, found in residuals(cost, steps).items()},
                "on_the_run": {each: asdict(found) for each, found in residuals(cost, own).items()},
                "cost": asdict(cost),
            }
            self.keep(run, number, name, kind)
        self.keep(real, number, name, "real")
        return facts | {"real": figures(real)}

    def simulation(
        self,
        requests: Sequence[PlannedRequest],
        case: Case,
        settings: ServerSettings,
        cost: StepCost,
        kind: type[Kind],
    ) -> Kind:
        return kind(
            requests,
            settings,
            cost,
            num_clients=case.num_clients,
            stagger_s=_STAGGER_S,
            seed=SEED,
            workload=case.workload.facts(),
        )

    def keep(self, run: Run, number: int, name: str, kind: str) -> None:
        slug = f"{self.name}_{name}_{kind}_{number}".replace(", ", "_").replace(" ", "-")
        write_run(run, self.directory / f"{slug}.jsonl")


def in_short(rounds: Sequence[Mapping[str, Any]], kind: str) -> dict[str, float]:
    """Returns for each metric the median over the rounds of the absolute error."""
    by_round = [each[kind]["errors"] for each in rounds]
    return {name: round(median(abs(errors[name]) for errors in by_round), 4) for name in by_round[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="of tiny-llama, llama-37m, llama-64m and llama-110m; by default all"
    )
    parser.add_argument("--directory", type=Path, required=True, help="where the models are, or are written")
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--raw", type=Path, required=True, help="a directory for the runs' records")
    parser.add_argument("--output", type=new_file)
    options = parser.parse_args()
    options.raw.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name, model in models().items():
        if options.models and name not in options.models:
            continue
        path = name
        if name != "tiny-llama":
            from benchmarks.cpu.models import write_model

            path = str(write_model(name, options.directory))
        bench = Bench(name, path, model, options.raw, CpuClock() if options.clock == "cpu" else WallClock())
        for case_name, case in model.cases.items():
            rounds = [bench.round(number, case_name, case) for number in range(options.rounds)]
            results[f"{name}: {case_name}"] = {
                "commit": machine_facts()["commit"],
                "error": in_short(rounds, "held_out"),
                "error_of_own_steps": in_short(rounds, "own"),
                "rounds": rounds,
            }
            print(f"{name}: {case_name}")
            for metric, share in results[f"{name}: {case_name}"]["error"].items():
                own = results[f"{name}: {case_name}"]["error_of_own_steps"][metric]
                print(f"  {metric:20} {100 * share:6.1f} %   with the run's own steps {100 * own:6.1f} %")
    if options.output is not None:
        facts = {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine_facts(),
            "clock": options.clock,
        }
        options.output.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
