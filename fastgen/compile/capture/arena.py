"""Memory for what a captured step allocates: the CPU's counterpart of a CUDA graph's memory pool.

Pieces are handed out while a step is recorded and come back with their last tensor, so a step's intermediate results
share memory as they would without a recording. The same requests in the same order get the same addresses, and all
tapes of an arena share its memory: they run one at a time.
"""

from __future__ import annotations

import bisect
import weakref

import torch
from torch import Tensor

from fastgen.compile.host.huge_pages import HUGE_PAGE, in_huge_pages

_ALIGNMENT = 64  # bytes: a cache line
# Bytes by which an arena grows at least.
SLAB = HUGE_PAGE

# A piece counts as large if it takes more than this part of its slab.
_LARGE = 16

# First byte and end.
Piece = tuple[int, int]


def aligned(size_bytes: int) -> int:
    """Returns the bytes of a piece for a tensor of ``size_bytes``."""
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """Grows by slabs, never moves, and gives all back when it and the tapes that use it are gone.

    With ``expected_bytes`` it begins with a slab of this size, in which pieces fit that would not fit in smaller slabs.
    """

    def __init__(self, expected_bytes: int = 0) -> None:
        self._slabs = [_Slab(max(expected_bytes, SLAB))] if expected_bytes else []

    @property
    def size_bytes(self) -> int:
        return sum(slab.memory.numel() for slab in self._slabs)

    @property
    def num_pieces(self) -> int:
        """Returns how many pieces tensors hold now."""
        return sum(len(slab.space.taken) for slab in self._slabs)

    def like(self, described: Tensor) -> Tensor:
        """Returns an uninitialised tensor of ``described``'s shape, strides and dtype; that one may be on ``meta``."""
        if described.numel() == 0:  # needs no memory
            return _nothing_like(described)
        size = aligned(described.untyped_storage().nbytes())
        for slab in self._slabs:
            if (piece := slab.take(size)) is not None:
                break
        else:
            self._slabs.append(_Slab(max(size, SLAB)))
            piece = self._slabs[-1].take(size)
            assert piece is not None
        return piece.view(described.dtype).as_strided(described.shape, described.stride())

    def fixed(self, tensor: Tensor) -> Tensor:
        """Returns the same numbers at the same address, without holding a piece: its memory may be handed out again."""
        if tensor.numel() == 0:
            return _nothing_like(tensor)
        for slab in self._slabs:
            offset = tensor.data_ptr() - slab.memory.data_ptr()
            if 0 <= offset < slab.memory.numel():
                numbers = slab.memory.view(tensor.dtype)
                place = numbers.storage_offset() + offset // tensor.itemsize
                return numbers.as_strided(tensor.shape, tensor.stride(), place)
        return tensor.detach()


def _nothing_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


class Space:
    """Decides where pieces lie in ``size_bytes`` bytes; has no memory itself."""

    def __init__(self, size_bytes: int):
        self.size_bytes = size_bytes
        self.taken: list[Piece] = []  # in order
        self._at_end = False

    def take(self, size: int) -> Piece | None:
        """Returns a piece of the first gap that is large enough, at its beginning; of large pieces every other one
        comes from the end of the last such gap. Returns ``None`` if there is no such gap.

        A step is a chain: each result is made beside the one before, which is then dropped. In a row they would leave
        holes, each too small for the next.
        """
        if not self.taken:
            self._at_end = False  # so that the same requests get the same addresses
        ends = [end for _, end in self.taken]
        gaps = zip([0, *ends], [*(start for start, _ in self.taken), self.size_bytes], strict=True)
        fitting = [gap for gap in gaps if gap[1] - gap[0] >= size]
        if not fitting:
            return None
        at_end = self._at_end
        if size * _LARGE > self.size_bytes:
            self._at_end = not at_end
        else:
            at_end = False
        piece = (fitting[-1][1] - size, fitting[-1][1]) if at_end else (fitting[0][0], fitting[0][0] + size)
        bisect.insort(self.taken, piece)
        return piece

    def give_back(self, piece: Piece) -> None:
        self.taken.remove(piece)


class _Slab:
    def __init__(self, size_bytes: int):
        size_bytes = -(-size_bytes // SLAB) * SLAB
        self.memory = in_huge_pages(size_bytes)  # kernels read rows of results that lie some pages apart
        self.space = Space(size_bytes)

    def take(self, size: int) -> Tensor | None:
        piece = self.space.take(size)
        if piece is None:
            return None
        # torch keeps this array for as long as a tensor uses it, so its end is the piece's.
        array = self.memory.numpy()[slice(*piece)]
        weakref.finalize(array, self.space.give_back, piece).atexit = False
        return torch.from_numpy(array)
