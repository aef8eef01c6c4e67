"""The message from which a rank builds its part of a model, and the memory that ranks share."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.compile.host.device import Device
from fastgen.compile.host.rank_memory import RankMemory
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.measure import ModelBuild
from fastgen.runtime.memory.held import plan_bytes, rank_memory_sizes
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.step.plans import PlanBoard


@dataclass(frozen=True)
class RankSetup:
    """A rank's part of a model, ``described``, on ``device``, for an engine of the sizes ``config``.

    ``activation_bytes`` is what steps leave in between by the ledger. ``version`` is that of the leader.
    """

    version: str
    described: ModelBuild
    config: EngineConfig
    checkpoint: Checkpoint
    device: Device
    num_threads: int | None
    activation_bytes: int


def memory_for(setup: RankSetup, fd: int | None = None) -> tuple[RankMemory, PlanBoard]:
    """Returns the memory that the ranks share, a new one or that of the file descriptor ``fd``, and its plans."""
    memory = RankMemory(*rank_memory_sizes(setup.described.spec, setup.config), fd=fd)
    return memory, PlanBoard(memory, plan_bytes(setup.config))
