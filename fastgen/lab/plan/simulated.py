"""A point of a plan run in virtual time: the scheduler itself, over the cost of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.metrics.summary import Summary, summarize
from fastgen.lab.plan.arrangements import Arrangement, Point, Question
from fastgen.lab.plan.capacity import Shape
from fastgen.lab.records import Run
from fastgen.lab.simulation import ServerSettings, simulate
from fastgen.lab.workloads.paper import Paper
from fastgen.models.builder import kv_windows

# Requests for each client, and at least and most in all.
_PER_CLIENT, _LEAST, _MOST = 5, 200, 600
# The standard deviation of lengths, as a share of the mean, and the deviations for which a context must have room. An
# answer is longer than the mean by four deviations once in 30,000.
_DEVIATION, _SIGMAS = 0.3, 4
# Factor between the numbers of clients that are tried.
_CHANGE = 1.2
# Seconds between clients that begin one after another, as the paper's.
_STAGGER_S = 0.01
_SEED = 42


@dataclass(frozen=True)
class Simulated:
    """Holds the figures that clients of one copy of the model see in a simulated run."""

    point: Point
    run: Run
    # Share of the requests that keep the SLO; 1 without one.
    good: float
    slo: SLO | None

    @property
    def clients(self) -> int:
        """Returns the clients of the run, which may be fewer than the point's."""
        clients: int = self.run.header.load["clients"]
        return clients

    @property
    def varies(self) -> bool:
        """Tells if the lengths of the requests vary."""
        return bool(self.run.header.workload["deviation"])

    @property
    def requests_per_s(self) -> float:
        """Returns the good requests a second; all without an SLO."""
        return self.good * len(self.run.records) / self.run.header.duration_s

    @cached_property
    def summary(self) -> Summary:
        """Returns the figures of the run, each with its interval."""
        return summarize(self.run, slo=self.slo)


def simulate_point(question: Question, arrangement: Arrangement, point: Point, clients: int) -> Simulated:
    """Returns a closed loop of ``clients`` on one copy. Lengths are drawn as the paper's: normal, with a standard
    deviation of 0.3 of the mean, and prompts are cut where ``max_model_len`` demands it. All are equal where that would
    cut many."""
    config, shape = arrangement.capacities[point.token_budget].config, question.shape
    settings = ServerSettings(
        num_blocks=config.num_blocks,
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        windows=tuple(kv_windows(question.model.spec)),
        max_model_len=config.max_model_len,
        prefix_caching=False,
        runs_ahead=True,
        step_gap_s=question.step_gap_s,
        arrival_s=question.arrival_s,
    )
    num_requests = min(_MOST, max(_LEAST, _PER_CLIENT * clients))
    most_prompt = _longest_prompt(shape, config.max_model_len)
    workload = Paper(
        mean_prompt_tokens=shape.prompt,
        mean_new_tokens=shape.answer,
        num_requests=num_requests,
        max_prompt_tokens=most_prompt or shape.prompt,
        deviation=_DEVIATION if most_prompt else 0.0,
        lengths="clamped",
    )
    requests = workload.requests(vocab_size=question.model.spec.vocab_size, seed=_SEED)
    cost = arrangement.costs[point.token_budget]
    run = simulate(
        requests, settings, cost, num_clients=clients, stagger_s=_STAGGER_S, seed=_SEED, workload=workload.facts()
    )
    slo = question.slo
    good = 1.0 if slo is None else sum(map(slo.is_good, run.records)) / len(run.records)
    return Simulated(point, run, good, slo)


def _longest_prompt(shape: Shape, max_model_len: int) -> int | None:
    """Returns the length at which prompts are cut; ``None`` if more than one in six would be."""
    room = max_model_len - math.ceil(shape.answer * (1 + _SIGMAS * _DEVIATION))
    return room if room >= shape.prompt * (1 + _DEVIATION) else None


def confirmed(question: Question, arrangement: Arrangement, point: Point) -> Simulated:
    """Returns the run with the most good requests a second of those that keep the SLO for the asked share of requests,
    with numbers of clients near that of ``point``; or with one client, if even that one does not keep it."""
    most = arrangement.capacities[point.token_budget].concurrent
    clients = point.steady.clients
    best = simulate_point(question, arrangement, point, clients)
    if question.clients:
        return best
    if best.good < question.attainment:
        while best.good < question.attainment and best.clients > 1:
            clients = min(best.clients - 1, max(1, int(best.clients / _CHANGE)))
            best = simulate_point(question, arrangement, point, clients)
        return best
    while question.slo is not None and best.clients < most:
        clients = min(most, max(best.clients + 1, int(best.clients * _CHANGE)))
        more = simulate_point(question, arrangement, point, clients)
        if more.good < question.attainment or more.requests_per_s <= best.requests_per_s:
            break
        best = more
    return best
