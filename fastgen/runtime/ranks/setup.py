"""The message from which a rank builds its part of a model, and the memory that ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastgen.compile.host.device import Device
from fastgen.compile.host.group_ranks import MeetingPoint
from fastgen.compile.host.rank_memory import RankMemory
from fastgen.errors import FastgenError
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.measure import ModelBuild
from fastgen.runtime.memory.held import plan_bytes, rank_memory_sizes
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.step.mailbox import Mailbox
from fastgen.runtime.step.plans import PlanBoard
from fastgen.version import __version__


@dataclass(frozen=True)
class RankSetup:
    """A rank's part of a model, ``described``, on ``device``, for an engine of the sizes ``config``.

    ``files`` are the states of the checkpoint's files as the leader finds them; see :func:`file_states`.
    ``activation_bytes`` is what steps leave in between by the ledger. ``version`` is that of the leader. Ranks that do
    not exchange through memory have a ``meeting`` point. ``is_timed`` is as in
    :func:`~fastgen.runtime.ranks.part.load_forward`.
    """

    version: str
    described: ModelBuild
    config: EngineConfig
    checkpoint: Checkpoint
    files: dict[Path, tuple[int, int]]
    device: Device
    num_threads: int | None
    activation_bytes: int
    is_timed: bool
    meeting: MeetingPoint | None = None


def file_states(checkpoint: Checkpoint) -> dict[Path, tuple[int, int]]:
    """Returns the size in bytes and the time of the last change, in nanoseconds, of each file with weights."""
    states = {file: file.stat() for file in {header.file for header in checkpoint.tensors.values()}}
    return {file: (state.st_size, state.st_mtime_ns) for file, state in states.items()}


def check_same(setup: RankSetup) -> None:
    """Checks that this process has the version and the checkpoint of the leader. Raises :class:`FastgenError`."""
    if setup.version != __version__:
        raise FastgenError(f"this rank is of version {__version__}, and the leader of {setup.version}")
    found = file_states(setup.checkpoint)
    for file, state in setup.files.items():
        if found[file] != state:
            raise FastgenError(f"{file} has changed since the leader opened it; load the model again")


class SharedMemory(NamedTuple):
    """The memory that the ranks share, and its parts beside those for sums."""

    memory: RankMemory
    board: PlanBoard
    mailbox: Mailbox


def memory_for(setup: RankSetup, fd: int | None = None) -> SharedMemory:
    """Returns the memory that the ranks share, a new one or that of the file descriptor ``fd``."""
    memory = RankMemory(*rank_memory_sizes(setup.described.spec, setup.config), fd=fd)
    payload_bytes = plan_bytes(setup.config)
    behind = memory.others[PlanBoard.size_bytes(memory.count, payload_bytes) :]
    return SharedMemory(memory, PlanBoard(memory, payload_bytes), Mailbox(behind, setup.config.max_rows))
