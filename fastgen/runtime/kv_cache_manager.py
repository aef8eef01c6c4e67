"""Which sequence holds which blocks of the KV cache, which of them others may use too, and what can fit at all.

A sequence has one block table per KV group (the layers with one window). Entry ``i`` of a table is the block with the
keys and values of tokens ``i*P .. i*P + P - 1``. Here ``P = 4`` and there is one group; of 12 tokens 6 are computed,
and the next step takes 5 more::

    token   0   1   2   3 | 4   5   6   7 | 8   9  10  11
            <----- computed ----->|<-- this step --->|     num_computed_tokens = 6, num_tokens = 12
    table [       7       |       2       |       5       ]
                                              appended: allocate(seq, 5) -> [(group 0, index 2, block 5)]

Nothing is reserved for tokens that are not generated yet. The last token a request generates is never computed, since
nothing follows it, so a prompt of ``p`` tokens and ``m`` new ones fill at most ``p + m - 1`` places of each group.

**Sharing.** Full blocks are published in the prefix cache when they have been computed, and a sequence that begins with
the same tokens takes references on them instead of computing them again. A fork takes references on all blocks of its
parent. Nobody writes into a block that is shared or published: blocks found in the cache are full, and of a shared block
that is partly filled :meth:`KVCacheManager.allocate` makes a copy for who writes first (copy-on-write). The source keeps
a reference until the copy is known to be made, since a step that failed is made again.

**Windows.** A group with a window ``w`` keeps only the blocks that a later token sees. Entries left of these become the
padding block, and tables keep their length. With ``P = 4`` and ``w = 6``, after 13 tokens::

    token   0   1   2   3 | 4   5   6   7 | 8   9  10  11 | 12
                                    <---- token 12 saw ---->     the block of tokens 4 … 7 is kept, for token 7
    table [       0       |       2       |       5       |  9

What a window leaves behind is freed whenever a sequence has filled a block, not token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.block_pool import PADDING_BLOCK, BlockPool
from fastgen.runtime.prefix_cache import PrefixCache, PrefixNode, first_seen_block
from fastgen.runtime.request import Sequence


class TableEntry(NamedTuple):
    """``block_tables[group][index]`` of a sequence is ``block_id`` now."""

    group: int
    index: int
    block_id: int


class BlockCopy(NamedTuple):
    """Entry ``index`` of a sequence's table in ``group`` was block ``source`` and is ``destination`` now, which is to
    be given what ``source`` contains before the step's forward pass.
    """

    group: int
    index: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a sequence was given: blocks ``appended`` to its tables, and ``copies`` of blocks it shared."""

    appended: list[TableEntry] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


class KVCacheManager:
    """Block tables over one pool of ``num_blocks`` blocks of ``block_size`` tokens, which all KV groups share.

    ``num_blocks`` counts the padding block, as the cache tensors' first axis does. ``windows`` has an entry for each KV
    group: how many positions a token sees there, its own included, or ``None`` for all. ``max_chunk`` is the most
    tokens of a sequence that one step takes, the token budget; it bounds what a windowed group holds at once.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: SequenceOf[int | None] = (None,),
        *,
        max_chunk: int | None = None,
        prefix_caching: bool = False,
    ):
        if block_size < 1 or not windows:
            raise InvalidArgumentError(f"block_size {block_size} and the number of windows {windows} must be at least 1")
        if any(window is not None and window < 1 for window in windows):
            raise InvalidArgumentError(f"windows {windows}: a token sees at least itself")
        self.prefix_cache = PrefixCache(block_size, windows) if prefix_caching else None
        self.pool = BlockPool(num_blocks, self.prefix_cache.forget if self.prefix_cache else None)
        self.block_size, self.windows, self.max_chunk = block_size, tuple(windows), max_chunk
        self.num_groups = len(self.windows)
        self._nodes: dict[Sequence, PrefixNode] = {}
        """Of each sequence that holds blocks, the node of the last block it has published, or took from the cache."""
        self._may_share: set[Sequence] = set()
        """Those whose next token may go into a block that is not theirs alone, because one was forked from another."""
        self._pending_copies: dict[int, tuple[Sequence, BlockCopy]] = {}
        """By destination; each holds a reference on its source."""

    # What fits

    def blocks_needed(self, num_tokens: int) -> int:
        """The most blocks that a sequence of ``num_tokens`` tokens ever holds at once, over all groups."""
        return sum(
            max_blocks_held(num_tokens, window, self.block_size, max_chunk=self.max_chunk) for window in self.windows
        )

    def check_fits(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Refuse a sequence that could not finish even with the whole cache to itself.

        :raises RequestTooLargeError: with the arithmetic.
        """
        raise NotImplementedError

    def max_tokens(self, seq: Sequence) -> int:
        """How many tokens beyond those computed ``seq`` has places for, counting the blocks now free as its own."""
        raise NotImplementedError

    # A sequence's blocks, from admission to the end

    def attach_cached(self, seq: Sequence) -> list[TableEntry]:
        """Give a waiting ``seq`` what the prefix cache has of its tokens, but for at least one, which must be computed.

        Sets ``block_tables``, ``num_computed_tokens`` and, unless it was preempted, ``num_cached_tokens``. Returns the
        entries of its tables that hold a block: of one that was forked, those it has already. Nothing is looked up
        where prompt log-probabilities are asked for, since these need every token computed.
        """
        raise NotImplementedError

    def detach(self, seq: Sequence) -> None:
        """Undo :meth:`attach_cached` of a sequence that could not be admitted after all."""
        raise NotImplementedError

    def allocate(self, seq: Sequence, num_new_tokens: int) -> Allocation | None:
        """Make places for the ``num_new_tokens`` tokens of ``seq`` that follow the computed ones.

        Nothing is allocated where it has the places already and they are its own. ``None`` with nothing changed where
        the free blocks do not suffice for all groups. Of :attr:`Allocation.copies` the table entries are the
        destinations already; the copies are due until :meth:`copies_done`.
        """
        raise NotImplementedError

    @property
    def pending_copies(self) -> tuple[BlockCopy, ...]:
        """All copies that are due, those of steps that failed included; the device makes them before its forward."""
        return tuple(copy for _, copy in self._pending_copies.values())

    def copies_done(self, copies: Iterable[BlockCopy]) -> None:
        """The step that made ``copies`` is committed: their sources may go. Those of sequences freed since are none."""
        raise NotImplementedError

    def advance(self, seq: Sequence) -> None:
        """``num_computed_tokens`` of ``seq`` has grown: publish the blocks that are full now, and free those that no
        later token sees. There is nothing to do unless a block has been filled since the last call.
        """
        raise NotImplementedError

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let ``child``, which holds nothing, share the blocks of the first ``num_tokens`` computed tokens of
        ``parent``; these tokens must be the same in both, and count as computed for the child.

        Whoever writes into a last block that is partly filled gets a copy of it. Where ``num_tokens`` is less than the
        parent has computed, windows must not have left behind what the child needs.
        """
        raise NotImplementedError

    def free(self, seq: Sequence) -> None:
        """Take back all that ``seq`` holds; of what stays cached, its last blocks will be evicted first."""
        raise NotImplementedError

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that ``sequences`` and pending copies account for every reference, that tables hold what is computed
        and not left behind, and that the prefix cache agrees.
        """
        raise NotImplementedError


def max_blocks_held(num_tokens: int, window: int | None, block_size: int, *, max_chunk: int | None) -> int:
    """The most blocks of one KV group that a sequence of ``num_tokens`` tokens holds at once, in steps of at most
    ``max_chunk``.

    With a window ``w``, before a chunk of ``c`` tokens that begins in block ``b``, what is kept reaches from the block
    of token ``b*P - w + 1`` to the last of the chunk: ``ceil((w - 1)/P)`` blocks, ``b``, and ``ceil((c - 1)/P)`` more.
    """
    num_blocks = -(-num_tokens // block_size)
    if window is None or max_chunk is None:
        return num_blocks
    return min(num_blocks, -(-(window - 1) // block_size) + 1 - (-(max_chunk - 1) // block_size))
