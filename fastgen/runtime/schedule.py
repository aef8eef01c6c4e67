"""What one step computes, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastgen.runtime.kv_cache_manager import BlockCopy, KVCacheManager
from fastgen.runtime.request import Sequence


class BlockUpdate(NamedTuple):
    """``block_tables[group, seat, table_index] = block_id`` on the device."""

    seat: int
    group: int
    table_index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Tokens ``start .. end - 1`` of ``seq``; ``samples`` where nothing remains pending, so that the step samples
    the next token.

    The last ``len(drafts)`` of them are guesses that ``seq`` does not have yet; the step samples behind each of them
    too.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_rows(self) -> int:
        """How many of its last tokens need logits."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one step computes: one token of each of the ``decodes``, which all sample, and the ``chunks``.

    ``positions`` has for each decode where its token stands. Chunks are in order of urgency; those with drafts, which
    are decodes too, come last. ``block_updates`` are the entries of the block tables that the device has not been
    given, and ``block_copies`` are to be made before the forward pass. ``preempted`` lost their seats and blocks before
    the step. ``size`` is the captured size to run at.
    """

    decodes: tuple[Sequence, ...]
    positions: tuple[int, ...]
    chunks: tuple[ScheduledTokens, ...]
    block_updates: tuple[BlockUpdate, ...]
    block_copies: tuple[BlockCopy, ...]
    preempted: tuple[Sequence, ...]
    size: int

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """How many tokens need logits."""
        return len(self.decodes) + sum(chunk.num_rows for chunk in self.chunks)

    @property
    def entries(self) -> tuple[ScheduledTokens, ...]:
        """The decodes, each as the chunk of one token that it is, and the chunks: for tests and tools. A step itself
        makes no object for a decode.
        """
        pairs = zip(self.decodes, self.positions, strict=True)
        return (*(ScheduledTokens(seq, position, 1, samples=True) for seq, position in pairs), *self.chunks)
