"""Memory that the ranks of one machine share, and sums and gathers through it.

The memory has no name, so nothing of it remains when the ranks end, however they end. It begins with lines of 64 bytes:
the state, and for each rank how many exchanges it has begun, and how many ranks sleep until it begins one. Two areas
for each rank follow. In an exchange a rank fills one of its areas, writes its number of exchanges, waits until all
ranks have written that number, and reads the areas of all. In the next exchange it fills its other area. So an area is
filled again only after all ranks have begun the exchange between, and that is after they have read it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fastgen.errors import RankError

LINE_BYTES = 64
# Least bytes of an area. A longer message is exchanged in pieces.
AREA_BYTES = 1 << 20
# Seconds for which a rank waits for another in the middle of a step.
TIMEOUT_S = 10.0
# The same while weights are loaded: other ranks may build kernels, or read from a slow disk.
LOADING_TIMEOUT_S = 1800.0
RUNNING, ENDED = 0, -1  # other states are 1 + the rank that did not come
# Looks at a word before other processes get the core, and for how many seconds then, at first and at most.
_SPINS = 1000
_NAP_S = 20e-6
_LONGEST_NAP_S = 1e-3


def areas_offset(count: int) -> int:
    """Returns the bytes before the areas of ``count`` ranks: lines of words, in whole pages."""
    return -(-(1 + count) * LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def memory_bytes(count: int, area_bytes: int, other_bytes: int) -> int:
    """Returns the bytes of the memory of ``count`` ranks."""
    return areas_offset(count) + 2 * count * area_bytes + other_bytes


class RankMemory:
    """Shared memory of ``count`` ranks, with areas of ``area_bytes`` and ``other_bytes`` for other uses. It is made
    anew, or is that of the file descriptor ``fd``, which is handed to other processes."""

    def __init__(self, count: int, area_bytes: int, other_bytes: int = 0, fd: int | None = None):
        self.count, self.area_bytes, self.other_bytes = count, area_bytes, other_bytes
        self.areas_offset = areas_offset(count)
        self._others_offset = self.areas_offset + 2 * count * area_bytes
        self.size_bytes = memory_bytes(count, area_bytes, other_bytes)
        self.fd = _unnamed_file(self.size_bytes) if fd is None else fd
        weakref.finalize(self, os.close, self.fd)  # the mapping keeps the memory
        self.shared = torch.frombuffer(mmap.mmap(self.fd, self.size_bytes), dtype=torch.uint8)
        words = self.shared[: self.areas_offset].numpy().view(np.int64)[:: LINE_BYTES // 8]
        self._state, self._begun = words[:1], words[1 : 1 + count]

    @property
    def state(self) -> int:
        return int(self._state[0])

    def end(self) -> None:
        """Ends every wait of every rank, now and from now on."""
        self._state[0] = ENDED

    def area(self, number: int, index: int, like: Tensor) -> Tensor:
        """Returns where rank ``index`` puts a tensor ``like`` this in exchange ``number``."""
        first = self.areas_offset + ((number & 1) * self.count + index) * self.area_bytes
        return self.shared[first : first + like.nbytes].view(like.dtype).view(like.shape)

    @property
    def others(self) -> Tensor:
        """Returns the bytes for other uses."""
        return self.shared[self._others_offset :]

    def begin(self, index: int) -> int:
        """Returns the number of the next exchange of rank ``index``."""
        return int(self._begun[index]) + 1

    def meet(self, number: int, index: int, timeout_s: float) -> None:
        """Waits until all ranks have begun exchange ``number``.

        :raises RankError: if one does not within the time, or the ranks end.
        """
        self._begun[index] = number
        if not wait_for(lambda: bool((self._begun >= number).all()), self, timeout_s):
            if self.state == RUNNING:
                self._state[0] = 1 + int((self._begun < number).argmax())
            self.check()

    def check(self) -> None:
        """Raises :class:`RankError` if the ranks cannot continue together."""
        state = self.state
        if state != RUNNING:
            raise RankError(
                "the ranks of this model have ended"
                if state == ENDED
                else f"rank {state - 1} of {self.count} did not come to a sum over ranks in time; the others have ended"
            )


def wait_for(condition: Callable[[], bool], memory: RankMemory, timeout_s: float) -> bool:
    """Waits until ``condition()`` is true. Returns false if it is not within the time, or the ranks end."""
    deadline_s = time.monotonic() + timeout_s
    spins, nap_s = _SPINS, _NAP_S
    while True:
        for _ in range(spins):
            if condition():
                return True
        if memory.state != RUNNING or time.monotonic() > deadline_s:
            return bool(condition())
        time.sleep(nap_s)
        spins, nap_s = max(1, spins // 2), min(2 * nap_s, _LONGEST_NAP_S)


def _unnamed_file(size_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("fastgen ranks")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size_bytes)
    return fd


class SharedRanks:
    """Rank ``index`` of those that share ``memory``."""

    symmetric = None

    def __init__(self, memory: RankMemory, index: int, timeout_s: float = TIMEOUT_S):
        self.memory, self.index, self.timeout_s = memory, index, timeout_s

    @property
    def count(self) -> int:
        return self.memory.count

    def all_max(self, x: Tensor) -> None:
        """Replaces the contiguous ``x`` by the largest of all ranks' numbers in each place."""
        for piece in torch.split(x.view(-1), self.memory.area_bytes // x.element_size()):
            for other in self._exchange(piece, LOADING_TIMEOUT_S):
                torch.maximum(piece, other, out=piece)

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Writes the contiguous ``x`` of all ranks into ``out [n, ...]``, contiguous too, in their order."""
        at_once, to = self.memory.area_bytes // x.element_size(), out.view(self.count, -1)
        for piece, places in zip(torch.split(x.view(-1), at_once), torch.split(to, at_once, dim=1), strict=True):
            for place, given in zip(places, self._exchange(piece), strict=True):
                place.copy_(given)

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """Gives rank ``i`` the piece ``x[i]``. Writes those that all ranks have for this one into ``out [n, ...]``."""
        others = torch.empty_like(out)
        for index, piece in enumerate(x):
            self.all_gather(piece, out if index == self.index else others)

    def broadcast(self, x: Tensor) -> None:
        """Replaces the contiguous ``x`` by that of rank 0."""
        for piece in torch.split(x.view(-1), self.memory.area_bytes // x.element_size()):
            piece.copy_(self._exchange(piece)[0])

    def _exchange(self, x: Tensor, timeout_s: float | None = None) -> Sequence[Tensor]:
        number = self._give(x, timeout_s)
        return [self.memory.area(number, index, x) for index in range(self.count)]

    def _give(self, x: Tensor, timeout_s: float | None = None) -> int:
        number = self.memory.begin(self.index)
        self.memory.area(number, self.index, x).copy_(x)
        self.memory.meet(number, self.index, self.timeout_s if timeout_s is None else timeout_s)
        return number
