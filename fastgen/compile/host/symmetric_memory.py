"""Symmetric memory: each rank has a buffer of one size, and kernels of every rank read and write those of all.

Between GPUs it is that of :mod:`torch.distributed._symmetric_memory`, by which they map each other's memory. Between
processes of a CPU it is a file that all map.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# A buffer begins with two halves, which messages use in turns. Then come signals of 4 bytes: one for each program of a
# kernel and each rank.
HALF_BYTES = 4 << 20
NUM_PROGRAMS = 32


def buffer_bytes(count: int) -> int:
    """Returns the bytes of the buffer of each of ``count`` ranks."""
    return 2 * HALF_BYTES + 4 * NUM_PROGRAMS * count


class SymmetricMemory:
    """The buffers of all ranks, at ``addresses`` in the order of the ranks, as kernels on ``device`` reach them.
    ``owner`` is what keeps them mapped. With ``is_measured`` they are used for sizes of messages that are faster
    through them, and otherwise for all that they have room for.
    """

    def __init__(self, addresses: Sequence[int], device: torch.device, owner: Any, *, is_measured: bool):
        self._owner, self.is_measured = owner, is_measured
        self.buffers = torch.tensor(addresses, device=device)
        # How often each program has met those of the other ranks.
        self.epochs = torch.zeros(NUM_PROGRAMS, dtype=torch.int32, device=device)
        # Not 0 once no program shall wait. It is in the host's memory, where it can be written while a GPU waits.
        self.ended = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def end(self) -> None:
        """Ends every wait of this rank's kernels, now and from now on. What they write from then on is wrong."""
        self.ended.fill_(1)


def of_file(file: Path, count: int, *, is_measured: bool) -> SymmetricMemory:
    """Returns the memory of ``count`` ranks of a CPU that all map ``file``, which the first one makes."""
    size = buffer_bytes(count)
    shared = torch.from_file(str(file), shared=True, size=count * size, dtype=torch.uint8)
    addresses = range(shared.data_ptr(), shared.data_ptr() + count * size, size)
    return SymmetricMemory(addresses, shared.device, shared, is_measured=is_measured)


def of_gpus(
    store: Any, name: str, index: int, count: int, device: torch.device, *, is_measured: bool
) -> SymmetricMemory:
    """Returns the memory that rank ``index`` of ``count`` shares from the GPU ``device``, when all ranks of ``store``
    ask for theirs by the same ``name``.

    Raises ``RuntimeError`` if GPUs cannot map each other's memory.
    """
    from torch._C import _distributed_c10d as c10d  # not above: some builds of torch lack it

    named: Any = c10d  # newer versions have a type of their own for names
    group = named.ProcessGroup(store, index, count)  # by whose name torch finds the store
    group._set_group_name(name)
    named._register_process_group(name, group)
    own = named._SymmetricMemory.empty_strided_p2p((buffer_bytes(count),), (1,), torch.uint8, device)
    own.zero_()
    torch.cuda.synchronize(device)  # others signal as soon as they have met this rank
    handle = named._SymmetricMemory.rendezvous(own, name)
    return SymmetricMemory(handle.buffer_ptrs, device, (own, handle, group), is_measured=is_measured)
