"""Simulated servers of published models on devices by their datasheets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastgen.lab.devices.datasheets import datasheet
from fastgen.lab.devices.roofline import model_build, step_cost
from fastgen.lab.models import describe
from fastgen.lab.plan.capacity import Shape, ShardMemory, Sizes, capacity
from fastgen.lab.records import Run
from fastgen.lab.simulation import ServerSettings, Simulation
from fastgen.lab.workloads.request import PlannedRequest, Workload
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.step_cost.cost import StepCost

# The paper's clients begin U(0, clients) times this late, in seconds.
STAGGER_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Server:
    """A model on some devices under a policy, with all the memory that an engine would take."""

    model: str
    device: str
    tensor_parallel: int = 1
    policy: Any = "splitfuse"
    token_budget: int = 2048
    max_num_seqs: int = 256
    max_model_len: int | None = None
    # Whether a request reserves blocks for ``max_model_len`` tokens when it begins.
    reserves_context: bool = False
    # More settings of the simulated server.
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[ServerSettings, StepCost]:
        """Returns the settings of the simulated server, and the roofline cost of its steps.

        :raises OutOfMemoryError: if the model does not fit.
        """
        device, model = datasheet(self.device), describe(self.model)
        memory = ShardMemory(model, device, size=self.tensor_parallel, weight_format=None, kv_dtype=None)
        sizes = Sizes(max_num_seqs=self.max_num_seqs, max_model_len=self.max_model_len)
        fits = capacity(memory, Shape(1, 1), sizes, self.token_budget)
        settings: dict[str, Any] = {
            "num_blocks": fits.config.num_blocks,
            "block_size": fits.config.block_size,
            "max_model_len": fits.config.max_model_len,
            "token_budget": self.token_budget,
            "max_num_seqs": self.max_num_seqs,
            "policy": self.policy,
            "prefix_caching": False,
            "runs_ahead": True,
        }
        settings |= self.options
        if self.reserves_context:
            settings["kv_reservation"] = "context"
        build = model_build(model.spec, device, model.dtype)
        cost = step_cost(build, device, token_budget=self.token_budget, tensor_parallel=self.tensor_parallel)
        return ServerSettings(**settings), cost


def planned(workload: Workload, seed: int = 0) -> list[PlannedRequest]:
    """Returns the requests of a workload for a simulated server. With the default seed all runs get equal requests."""
    return workload.requests(vocab_size=32_000, seed=seed)


def closed_loop(server: Server, requests: Sequence[PlannedRequest], clients: int, *, replicas: int = 1) -> Run:
    """Returns the run of ``clients`` that draw from one queue of requests."""
    return _simulation(server, requests, clients, num_replicas=replicas).run()


def recorded(server: Server, requests: Sequence[PlannedRequest], clients: int) -> tuple[Run, Recording]:
    """Returns the run, and the flight recording of the one replica."""
    simulation = _simulation(server, requests, clients, records_flight=True)
    run = simulation.run()
    return run, simulation.recordings(server.model)[0]


def _simulation(server: Server, requests: Sequence[PlannedRequest], clients: int, **options: Any) -> Simulation:
    settings, cost = server.build()
    return Simulation(requests, settings, cost, num_clients=clients, stagger_s=STAGGER_S, **options)
