"""Log-probabilities as MessagePack. A number takes 9 bytes, and some 60 as an object of Python; and thousands of dicts
of them take long to free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar, cast, overload

import msgspec

from fastgen.runtime.requests.outputs import Logprobs

Item = TypeVar("Item", bound=Logprobs | None)

# Positions that are packed together; each may have 129 log-probabilities.
PIECE_POSITIONS = 32

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[dict[int, float] | None]).decode


def pack(logprobs: Sequence[Logprobs | None]) -> list[bytes]:
    """Returns ``logprobs`` in pieces of ``PIECE_POSITIONS``."""
    starts = range(0, len(logprobs), PIECE_POSITIONS)
    return [_encode(logprobs[start : start + PIECE_POSITIONS]) for start in starts]


class PackedLogprobs(Sequence[Item]):
    """The log-probabilities of successive tokens. They are unpacked whenever it is iterated over, piece by piece; for a
    single one, all of them are.
    """

    def __init__(self, pieces: Iterable[bytes] = (), number: int = 0):
        self._pieces: list[bytes] = []
        self._number = 0
        self.add(pieces, number)

    def add(self, pieces: Iterable[bytes], number: int) -> None:
        """Adds those of the next ``number`` tokens, as :func:`pack` returned them."""
        self._pieces += pieces
        self._number += number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Item]:
        return cast("Iterator[Item]", chain.from_iterable(map(_decode, self._pieces)))

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        return [*self][index]
