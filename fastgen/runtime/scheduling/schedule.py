"""The schedule: what one step computes, as a value."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fastgen.runtime.kv_cache.block_tables import BlockCopy, BlockUpdate
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.step_cost.work import StepWork, decode_work


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Tokens ``start .. end - 1`` of ``seq``. With ``samples`` nothing remains pending, so the step samples the next
    token.

    The last of them are ``drafts``: guesses that are not tokens of ``seq`` yet. The step samples behind each of them
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
        """Returns how many of the last tokens need logits."""
        return 1 + len(self.drafts) if self.samples else 0

    def check(self, kv: KVCacheManager) -> None:
        """Asserts that its tokens are pending, that the sequence runs and has blocks for them."""
        seq = self.seq
        assert seq.slot is not None, f"{self} has no slot"
        known_end = self.end - len(self.drafts)
        assert seq.num_computed_tokens == self.start < known_end <= seq.num_tokens, f"{self} is not what is pending"
        assert self.samples == (known_end == seq.num_tokens), f"{self} samples before it has caught up"
        assert self.samples or not self.drafts, f"{self} has drafts before it has caught up"
        assert len(seq.block_tables) == kv.num_groups, f"{self} has {len(seq.block_tables)} block tables"
        for table in seq.block_tables:
            assert self.end <= len(table) * kv.block_size, f"{self} has only the blocks {table}"


class Schedule(NamedTuple):
    """The decisions for one step: one token of each of the ``decodes``, which all sample, and the ``chunks``.

    ``positions`` has the position of each decode's token. Chunks of prompts come in order of urgency, then those of
    decodes with drafts. ``block_updates`` are the entries of block tables that the device does not have yet.
    ``block_copies`` are made before the forward pass, all at once. ``preempted`` sequences lost their slots and blocks
    before the step. ``size`` is the captured size to run at.
    """

    decodes: tuple[Sequence, ...]
    positions: tuple[int, ...]
    chunks: tuple[ScheduledTokens, ...]
    block_updates: tuple[BlockUpdate, ...]
    block_copies: tuple[BlockCopy, ...]
    preempted: tuple[Sequence, ...]
    num_tokens: int
    size: int

    @property
    def entries(self) -> tuple[ScheduledTokens, ...]:
        """Returns decodes, each as a chunk of one token, and chunks; for tests and tools. The step itself makes no
        object a decode.
        """
        decodes = zip(self.decodes, self.positions, strict=True)
        return (*(ScheduledTokens(seq, position, 1, samples=True) for seq, position in decodes), *self.chunks)

    @property
    def work(self) -> StepWork:
        """Returns the work that the time of the step depends on."""
        work = decode_work(self.positions)
        for chunk in self.chunks:
            work = work.with_chunk(chunk.start, chunk.num_tokens, chunk.num_rows)
        return work

    def check(self, kv: KVCacheManager, token_budget: int) -> None:
        """Asserts what a step relies on: it fits its size; its tokens are pending, of running sequences, and have
        blocks.
        """
        entries = self.entries
        num_tokens = sum(entry.num_tokens for entry in entries)
        assert num_tokens == self.num_tokens, f"{num_tokens} tokens are said to be {self.num_tokens}"
        assert 0 < num_tokens <= self.size <= token_budget, f"{num_tokens} tokens at size {self.size}"
        for entry in entries:
            entry.check(kv)
        slots = {entry.seq.slot for entry in entries}
        assert len(slots) == len(entries), f"{len(entries)} entries on the slots {slots}"
        prompts = [chunk.seq for chunk in self.chunks if not chunk.drafts]
        for first, second in pairwise(prompts):
            assert first.urgency < second.urgency, f"{second} stands behind {first}"


def tokens_of(decodes: SequenceOf[Sequence], chunks: SequenceOf[ScheduledTokens]) -> int:
    """Returns the number of tokens of a step: one for each decode, and those of the chunks."""
    return len(decodes) + (sum(chunk.num_tokens for chunk in chunks) if chunks else 0)
