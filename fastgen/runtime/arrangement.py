"""The arrangement of ranks on a machine: checked before anything is loaded, then started."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from fastgen.arguments import parse_bytes
from fastgen.compile.host.device import Device, current
from fastgen.compile.host.group_ranks import MeetingPoint, chosen_sums
from fastgen.errors import InvalidArgumentError
from fastgen.models.measure import ModelBuild
from fastgen.models.shard.shard import shard
from fastgen.models.spec import Rank
from fastgen.options import LoadOptions
from fastgen.runtime.memory.ledger import Ledger
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.model_source import ModelSource
from fastgen.runtime.ranks.setup import RankSetup, file_states
from fastgen.runtime.ranks.team import Team
from fastgen.version import __version__


def check_arrangement(options: LoadOptions, device: Device) -> None:
    """Raises :class:`InvalidArgumentError` for ranks that this machine has no devices for, or that cannot work."""
    count = options.tensor_parallel
    if count == 1:
        return
    if device.kind == "cuda":
        _check_gpus(count, device)
        chosen_sums()
    elif count > 2 * device.num_cores:
        raise InvalidArgumentError(
            f"tensor_parallel={count}: this machine has {device.num_cores} cores, and at most two ranks share one; ask "
            f"for at most {2 * device.num_cores}"
        )
    if options.sealed is not False:
        raise InvalidArgumentError(f"tensor_parallel={count}: a sealed bundle has the kernels of one rank only")


def _check_gpus(count: int, device: Device) -> None:
    """Raises :class:`InvalidArgumentError` unless there are ``count`` equal GPUs from ``device`` on."""
    first, end = device.index or 0, torch.cuda.device_count()
    if first + count > end:
        behind = f" from {device} on" if first else ""
        raise InvalidArgumentError(
            f"tensor_parallel={count}: each rank needs a GPU, and this machine has {end - first}{behind}; ask for at "
            f"most {end - first}, or load with device='cpu'"
        )
    for index in range(first + 1, first + count):
        other = current(f"cuda:{index}")
        if (other.name, other.memory_bytes) != (device.name, device.memory_bytes):
            raise InvalidArgumentError(
                f"tensor_parallel={count}: ranks need equal GPUs, and {device} is {device.name} of "
                f"{device.memory_bytes:,} bytes, {other} {other.name} of {other.memory_bytes:,} bytes; choose others "
                f"by CUDA_VISIBLE_DEVICES"
            )
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        raise InvalidArgumentError(f"tensor_parallel={count}: this torch ({torch.__version__}) is built without NCCL")


def threads_of_rank(options: LoadOptions, device: Device) -> int | None:
    """Returns the threads of each rank, at least one; ``None`` leaves them open."""
    if options.tensor_parallel == 1:
        return options.num_threads
    return max(1, (options.num_threads or device.num_cores) // options.tensor_parallel)


def device_of_rank(device: Device, options: LoadOptions) -> Device:
    """Returns the device with the memory that one rank may take: at most ``options.memory``, which the ranks of a CPU
    share, as they share its memory.
    """
    num_bytes = device.memory_bytes
    if options.memory is not None:
        num_bytes = min(num_bytes, parse_bytes(options.memory, "memory"))
    if device.kind == "cpu":
        num_bytes //= options.tensor_parallel
    return replace(device, memory_bytes=num_bytes)


def start_team(
    source: ModelSource,
    described: ModelBuild,
    config: EngineConfig,
    device: Device,
    num_threads: int | None,
    ledger: Ledger,
    *,
    is_timed: bool,
) -> Team:
    """Starts the other ranks of the model, of which ``described`` is the part of rank 0. They load meanwhile.
    ``is_timed`` is as in :func:`~fastgen.runtime.ranks.part.load_forward`.
    """
    count, files, meeting = described.spec.rank.count, file_states(source.checkpoint), _meeting_point(device)
    setups = [
        RankSetup(
            version=__version__,
            described=replace(described, spec=shard(source.spec, Rank(index, count), described.weight_format)),
            config=config,
            checkpoint=source.checkpoint,
            files=files,
            device=device if device.index is None else replace(device, index=device.index + index),
            num_threads=num_threads,
            activation_bytes=ledger.size_bytes("activations"),
            is_timed=is_timed,
            meeting=meeting,
        )
        for index in range(1, count)
    ]
    return Team(setups)


def _meeting_point(device: Device) -> MeetingPoint | None:
    """Returns where ranks with a GPU each meet; ``None`` on a CPU, where they share memory."""
    if device.kind == "cpu":
        return None
    return MeetingPoint("nccl", Path(tempfile.mkdtemp(prefix="fastgen-ranks-")) / "meeting", chosen_sums())
