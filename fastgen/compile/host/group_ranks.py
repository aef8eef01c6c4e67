"""Ranks as a process group of torch.distributed: NCCL between GPUs, gloo between processes of a CPU.

NCCL and gloo add numbers in an order that depends on the size of a message and on the links between devices. So here
they only move numbers, and each rank adds them in the order of the ranks: the bits of a sum then depend neither on
other rows nor on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fastgen.compile.host.device import being_current
from fastgen.compile.host.rank_memory import LOADING_TIMEOUT_S
from fastgen.compile.host.symmetric_memory import SymmetricMemory, of_file, of_gpus
from fastgen.errors import InvalidArgumentError, RankError

Library = Literal["nccl", "gloo"]
# How ranks add: by exchanges of the library, through symmetric memory where that was measured to be faster, or through
# it wherever it has room.
Sums = Literal["library", "measured", "symmetric"]
_SUMS: tuple[Sums, ...] = get_args(Sums)

# By default torch ends the whole process when a rank does not come or NCCL seems to hang. Here the leader notices that
# a rank is lost, and ends the group.
_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class GroupRanks:
    """One rank of the process ``group``. On a GPU all is launched on the current stream, and can be captured."""

    symmetric: SymmetricMemory | None = None

    def __init__(self, group: Any, index: int, count: int):
        from torch._C import _distributed_c10d as c10d  # not above: some builds of torch lack it

        self._group, self.index, self.count = group, index, count
        self._gathers, self._swaps = c10d.AllgatherOptions(), c10d.AllToAllOptions()
        self._broadcasts = c10d.BroadcastOptions()
        self._broadcasts.rootRank, self._broadcasts.rootTensor = 0, 0
        for options in (self._gathers, self._swaps, self._broadcasts):
            options.asyncOp = False

    def all_max(self, x: Tensor) -> None:
        """Replaces the contiguous ``x`` by the largest of all ranks' numbers in each place."""
        parts = x.new_empty(self.count, *x.shape)
        self.all_gather(x, parts)
        torch.amax(parts, 0, out=x)

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Writes the contiguous ``x`` of all ranks into ``out [n, ...]``, contiguous too, in their order."""
        self._exchange(self._group._allgather_base, out.view(-1), x.view(-1), self._gathers)

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """Gives rank ``i`` the piece ``x[i]``. Writes those that all ranks have for this one into ``out [n, ...]``."""
        self._exchange(self._group.alltoall_base, out.view(-1), x.view(-1), [], [], self._swaps)

    def broadcast(self, x: Tensor) -> None:
        """Replaces the contiguous ``x`` by that of rank 0."""
        self._exchange(self._group.broadcast, [x], self._broadcasts)

    def abort(self) -> None:
        """Ends every exchange of this rank, also those that a GPU waits in. No exchange may follow."""
        if self.symmetric is not None:
            self.symmetric.end()
        self._group.abort()

    @staticmethod
    def _exchange(call: Callable[..., Any], *arguments: Any) -> None:
        """Exchanges by a ``call`` of the library. Raises :class:`RankError` if that finds that a rank is lost."""
        try:
            work = call(*arguments)
            if work is not None:  # what runs on the current stream gives nothing to wait for
                work.wait()
        except RuntimeError as error:
            raise RankError(f"an exchange with the other ranks failed: {str(error).splitlines()[0]}") from error


class MeetingPoint(NamedTuple):
    """The place where the ranks of a group find each other, and how they add. ``library`` connects them. It makes the
    ``file``, which is not there before."""

    library: Library
    file: Path
    sums: Sums = "library"


def chosen_sums() -> Sums:
    """Returns how ranks with a GPU each are to add: ``FASTGEN_RANK_SUMS`` in the environment. Raises
    :class:`InvalidArgumentError`."""
    value = os.environ.get("FASTGEN_RANK_SUMS", "library")
    for each in _SUMS:
        if each == value:
            return each
    raise InvalidArgumentError(f"FASTGEN_RANK_SUMS={value}: ranks add by one of {', '.join(_SUMS)}")


def open_group(meeting: MeetingPoint, index: int, count: int, device: torch.device) -> GroupRanks:
    """Returns rank ``index`` of ``count``, which computes on ``device``, when all have come to the ``meeting`` point.

    The group is none of those that :mod:`torch.distributed` knows by name, so the process may have others. Raises
    ``RuntimeError`` or :class:`RankError` if the ranks cannot be connected.
    """
    from torch._C import _distributed_c10d as c10d

    store = c10d.FileStore(str(meeting.file), count)
    timeout = timedelta(seconds=LOADING_TIMEOUT_S)
    group: Any
    if meeting.library == "gloo":
        group = c10d.ProcessGroupGloo(store, index, count, timeout)
    else:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _settings(_NCCL_SETTINGS):
            group = c10d.ProcessGroupNCCL(store, index, count, options)
    ranks = GroupRanks(group, index, count)
    with being_current(device):
        here = torch.full((1,), index, device=device)
        there = here.new_empty(count)
        ranks.all_gather(here, there)  # NCCL connects in the first exchange
        assert there.tolist() == list(range(count)), "each rank is connected under its own number"
        if meeting.sums != "library":
            is_measured, memory = meeting.sums == "measured", meeting.file.with_suffix(".memory")
            if device.type == "cpu":
                ranks.symmetric = of_file(memory, count, is_measured=is_measured)
            else:
                others = c10d.PrefixStore("symmetric memory", store)
                ranks.symmetric = of_gpus(others, str(memory), index, count, device, is_measured=is_measured)
    return ranks


@contextmanager
def _settings(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, within the block."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
