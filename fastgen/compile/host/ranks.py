"""Ranks: processes that share a model, and what they send each other."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fastgen.compile.host.symmetric_memory import SymmetricMemory


def share(total: int, index: int, count: int) -> tuple[int, int]:
    """Returns the first of ``total`` things that rank ``index`` of ``count`` has, and the end; shares are as equal as
    they can be."""
    return total * index // count, total * (index + 1) // count


class Ranks(Protocol):
    """One rank's connection to all ranks. Each of them makes the same calls in the same order."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def symmetric(self) -> SymmetricMemory | None:
        """Returns the memory through which kernels add; ``None`` where there is none."""

    def all_max(self, x: Tensor) -> None:
        """Replaces the contiguous ``x`` by the largest of all ranks' numbers in each place. It is called while weights
        are loaded, when ranks may be minutes apart."""

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Writes the contiguous ``x`` of all ranks into ``out [n, ...]``, contiguous too, in their order."""

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """Gives rank ``i`` the piece ``x[i]`` of the contiguous ``x [n, ...]``. Writes the pieces that all ranks have
        for this one into ``out [n, ...]``, contiguous too, in their order."""

    def broadcast(self, x: Tensor) -> None:
        """Replaces the contiguous ``x`` by that of rank 0."""


_NOT_CONNECTED = "a rank's model runs only where it is connected to the others"


class DescribedRanks:
    """Ranks of a model that is described on the ``meta`` device, where there is nothing to send."""

    index, count, symmetric = 0, 1, None

    def all_max(self, x: Tensor) -> None:
        """Does nothing."""
        assert x.is_meta, "a rank's weights are loaded only where it is connected to the others"

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Does nothing."""
        assert x.is_meta, _NOT_CONNECTED

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """Does nothing."""
        assert x.is_meta, _NOT_CONNECTED

    def broadcast(self, x: Tensor) -> None:
        """Does nothing."""
        assert x.is_meta, _NOT_CONNECTED
