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

**Sharing.** Full blocks are published in the prefix cache when they have been computed, and a sequence that begins
with the same tokens takes references on them instead of computing them again. A fork takes references on all blocks of
its parent. Nobody writes into a block that is shared or published: blocks found in the cache are full, and of a shared
block that is partly filled :meth:`KVCacheManager.allocate` makes a copy for who writes first (copy-on-write). The
source keeps a reference until the copy is known to be made, since a step that failed is made again.

**Windows.** A group with a window ``w`` keeps only the blocks that a later token sees. Entries left of these become the
padding block, and tables keep their length. With ``P = 4`` and ``w = 6``, after 13 tokens::

    token   0   1   2   3 | 4   5   6   7 | 8   9  10  11 | 12
                                    <---- token 12 saw ---->     the block of tokens 4 … 7 is kept, for token 7
    table [       0       |       2       |       5       |  9

What a window leaves behind is freed whenever a sequence has filled a block, not token by token.

**Spreading.** Many decodes may fill a block in the same step, and what is to be done then takes longer than the rest of
scheduling. So where there are many, a few in each step are given a *spare*, the block they will come to next, which is
taken back where anybody else wants it. The blocks of an answer are published when it ends, or its sequence is preempted
or forked, and not while it is made; with windows, which leave blocks behind, that is *due* for a few in each step too.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import count, islice

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.kv_cache.block_pool import PADDING_BLOCK, BlockPool
from fastgen.runtime.kv_cache.block_tables import (
    Allocation,
    BlockCopy,
    TableEntry,
    arithmetic,
    held_entries,
    max_blocks_held,
)
from fastgen.runtime.kv_cache.kv_state import KVState
from fastgen.runtime.kv_cache.prefix_cache import PrefixCache, PrefixNode, first_seen_block
from fastgen.runtime.kv_cache.spare_blocks import SpareBlocks
from fastgen.runtime.requests.request import Sequence


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
            raise InvalidArgumentError(
                f"block_size {block_size} and the number of windows, {len(windows)}, must be at least 1"
            )
        if any(window is not None and window < 1 for window in windows):
            raise InvalidArgumentError(f"windows {windows}: a token sees at least itself")
        self.prefix_cache = PrefixCache(block_size, windows) if prefix_caching else None
        self.pool = BlockPool(num_blocks, self.prefix_cache.forget if self.prefix_cache else None)
        self.block_size, self.windows, self.max_chunk = block_size, tuple(windows), max_chunk
        self.num_groups, self._has_windows = len(self.windows), any(self.windows)
        # Of each sequence that holds blocks, the node of the last block it has published, or took from the cache.
        self._nodes: dict[Sequence, PrefixNode] = {}
        # Those that publish no more, since what they hold is not to be trusted.
        self._private: set[Sequence] = set()
        # Those whose next token may go into a block that is not theirs alone, since one was forked from another. Any
        # other has its place for that token already, unless ``num_computed_tokens`` is a multiple of ``block_size``.
        self.may_share: set[Sequence] = set()
        # For whom each copy is that is due; it holds a reference on its source.
        self._pending_copies: dict[BlockCopy, Sequence] = {}
        # Those attached to what the cache has of them, but not given places for more yet.
        self._looked_up: set[Sequence] = set()
        # Decodes that have filled a block since they were advanced, in that order.
        self._due: dict[Sequence, None] = {}
        self.spares = SpareBlocks(self.pool, block_size, len(windows))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, spares included."""
        return self.pool.num_free + self.spares.num_blocks

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
        num_tokens = num_prompt_tokens + max_new_tokens - 1
        if self.num_groups * -(-num_tokens // self.block_size) <= self.pool.capacity:  # nearly always, and at once
            return
        needed = self.blocks_needed(num_tokens)
        if needed <= self.pool.capacity:
            return
        num_blocks = next(n for n in count() if self.blocks_needed((n + 1) * self.block_size) > self.pool.capacity)
        most = num_blocks * self.block_size + 1
        sums = arithmetic(num_prompt_tokens, max_new_tokens, self.windows, self.block_size, self.max_chunk)
        raise RequestTooLargeError(
            f"a prompt of {num_prompt_tokens} tokens with max_new_tokens={max_new_tokens} needs "
            f"{sums} = {needed} blocks, "
            f"the KV cache has {self.pool.capacity}; prompt and new tokens together may be at most {most}: shorten the "
            "prompt, lower max_new_tokens, or give the cache more memory (kv_cache_memory)",
            room=most - num_prompt_tokens,
        )

    def max_tokens(self, seq: Sequence) -> int:
        """How many tokens beyond those computed ``seq`` has places for, counting the blocks now free as its own."""
        num_held = (len(seq.block_tables[0]) if seq.block_tables else 0) - (seq in self.spares.holders)
        num_free = self.num_free - len(self._shared_entries(seq))
        if num_free < 0:  # not even the copies that its next token needs
            return 0
        return (num_held + num_free // self.num_groups) * self.block_size - seq.num_computed_tokens

    # A sequence's blocks, from admission to the end

    def attach_cached(self, seq: Sequence) -> list[TableEntry]:
        """Give a waiting ``seq`` what the prefix cache has of its tokens, but for at least one, which must be computed.

        Sets ``block_tables``, ``num_computed_tokens`` and, unless it was preempted, ``num_cached_tokens``. Returns the
        entries of its tables that hold a block: of one that was forked, those it has already. Nothing is looked up
        where prompt log-probabilities are asked for, since these need every token computed.
        """
        if self._looks_up(seq):
            assert self.prefix_cache is not None
            self.catch_up()
            assert not seq.num_computed_tokens, f"{seq} has computed tokens already"
            node = self.prefix_cache.find(seq.token_ids, (seq.num_tokens - 1) // self.block_size)
            seq.num_computed_tokens = node.depth * self.block_size
            if node.depth:
                seq.block_tables = self.prefix_cache.block_tables(node)
                for entry in held_entries(seq):
                    self.pool.share(entry.block_id)
                self._stand_at(seq, node)
            if not seq.num_preemptions:
                seq.num_cached_tokens = seq.num_computed_tokens
            self._looked_up.add(seq)
        return held_entries(seq)

    def detach(self, seq: Sequence) -> None:
        """Undo :meth:`attach_cached` of a sequence that could not be admitted after all."""
        if seq in self._looked_up:
            self.free(seq)
            seq.num_computed_tokens = 0
            if not seq.num_preemptions:
                seq.num_cached_tokens = 0

    def allocate(self, seq: Sequence, num_new_tokens: int) -> Allocation | None:
        """Make places for the ``num_new_tokens`` tokens of ``seq`` that follow the computed ones.

        Nothing is allocated where it has the places already and they are its own. ``None`` with nothing changed where
        the free blocks do not suffice for all groups. Of :attr:`Allocation.copies` the table entries are the
        destinations already; the copies are due until :meth:`copies_done`.
        """
        num_held = len(seq.block_tables[0]) if seq.block_tables else 0
        end = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        shared = self._shared_entries(seq)
        num_appended = max(0, end - num_held) * self.num_groups
        block_ids = self.pool.allocate(num_appended + len(shared))
        if block_ids is None:
            if not self._due and not self.spares.holders:
                return None
            self.settle()
            return self.allocate(seq, num_new_tokens)
        if end >= num_held:
            self.spares.holders.discard(seq)
        self.may_share.discard(seq)
        if seq in self._looked_up:
            self._note_lookup(seq)
        if not block_ids:
            return Allocation()
        if not seq.block_tables:
            seq.block_tables = [[] for _ in self.windows]
        unused = iter(block_ids)
        places = [(group, index) for group in range(self.num_groups) for index in range(num_held, end)]
        appended = [TableEntry(group, index, next(unused)) for group, index in places]
        for group, _, block_id in appended:
            seq.block_tables[group].append(block_id)
        copies = [BlockCopy(*entry, next(unused)) for entry in shared]
        for copy in copies:
            seq.block_tables[copy.group][copy.table_index] = copy.destination
            self._pending_copies[copy] = seq
        return Allocation(appended, copies)

    @property
    def pending_copies(self) -> tuple[BlockCopy, ...]:
        """All copies that are due, those of steps that failed included; the device makes them before its forward."""
        return tuple(self._pending_copies)

    def copies_done(self, copies: Iterable[BlockCopy]) -> None:
        """The step that made ``copies`` is committed: their sources may go. Those of sequences freed since are none."""
        for copy in copies:
            if copy in self._pending_copies:
                del self._pending_copies[copy]
                self.pool.free([copy.source])

    def advance(self, seq: Sequence) -> None:
        """``num_computed_tokens`` of ``seq`` has grown: publish the blocks that are full now, and free those that no
        later token sees. There is nothing to do unless a block has been filled since the last call.
        """
        num_full = seq.num_computed_tokens // self.block_size
        self._due.pop(seq, None)
        if self.prefix_cache is not None:
            self._publish(seq, num_full)
        if not self._has_windows:
            return
        left: list[TableEntry] = []
        for group, (table, window) in enumerate(zip(seq.block_tables, self.windows, strict=True)):
            index = first_seen_block(num_full, window, self.block_size)
            while index and table[index - 1] != PADDING_BLOCK:
                index -= 1
                left.append(TableEntry(group, index, table[index]))
        self.pool.free(entry.block_id for entry in sorted(left, key=lambda entry: -entry.table_index))
        for entry in left:
            seq.block_tables[entry.group][entry.table_index] = PADDING_BLOCK

    def advance_later(self, decodes: Iterable[Sequence]) -> None:
        """Each of ``decodes`` has filled a block: :meth:`advance` is due for it. Where no window leaves blocks behind,
        that is when it ends, is preempted or forked: nobody asks for an answer that is not there yet.
        """
        if self._has_windows:
            self._due.update(dict.fromkeys(decodes))

    def catch_up(self, most: int | None = None) -> None:
        """Do what is due, for ``most`` sequences at most."""
        for seq in tuple(islice(self._due, most)) if self._due else ():
            self.advance(seq)

    def settle(self) -> None:
        """Do all that is due, and take back all spares."""
        self.catch_up()
        if self.spares.holders:
            self.spares.take_back()

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Whether ``parent`` has computed its first ``num_tokens`` tokens, and still has what :meth:`fork` needs."""
        if not 0 < num_tokens <= parent.num_computed_tokens or parent in self._pending_copies.values():
            return False
        num_full, num_now = num_tokens // self.block_size, parent.num_computed_tokens // self.block_size
        return all(
            first_seen_block(num_full, window, self.block_size) == first_seen_block(num_now, window, self.block_size)
            for window in self.windows
        )

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let ``child``, which holds nothing, share the blocks of the first ``num_tokens`` computed tokens of
        ``parent``; these tokens must be the same in both, and count as computed for the child.

        Whoever writes into a last block that is partly filled gets a copy of it. Where ``num_tokens`` is less than the
        parent has computed, windows must not have left behind what the child needs.
        """
        assert not child.block_tables, f"{child} holds blocks already"
        self._publish_all(parent)
        assert 0 < num_tokens <= parent.num_computed_tokens, f"{num_tokens} tokens of {parent} are not computed"
        assert parent not in self._pending_copies.values(), f"{parent} awaits copies"
        num_full, end = num_tokens // self.block_size, -(-num_tokens // self.block_size)
        tables = []
        for table, window in zip(parent.block_tables, self.windows, strict=True):
            first = first_seen_block(num_full, window, self.block_size)
            assert PADDING_BLOCK not in table[first:end], f"{parent} has left behind blocks of its first {num_tokens}"
            tables.append([PADDING_BLOCK] * first + table[first:end])
        child.block_tables, child.num_computed_tokens = tables, num_tokens
        for entry in held_entries(child):
            self.pool.share(entry.block_id)
        if num_tokens % self.block_size:
            self.may_share |= {parent, child}
        if parent in self._private:
            self._private.add(child)
        elif (node := self._nodes.get(parent)) is not None:
            while node.parent is not None and node.depth > num_full:
                node = node.parent
            self._stand_at(child, node)

    def withdraw(self, seq: Sequence) -> None:
        """What was computed for ``seq`` proved to be wrong: nobody is to find it, or anything computed from it.

        Which of its blocks is at fault is not known, nor who took it from where. So all goes that begins with the same
        block, and those that hold some of that keep it, and publish no more.
        """
        if self.prefix_cache is None or not seq.block_tables:
            return
        self.catch_up()
        node = self._nodes.get(seq, self.prefix_cache.root)
        branch = set() if node is self.prefix_cache.root else self.prefix_cache.branch(node)
        block_ids = sorted(block_id for each in branch for block_id in each.block_ids if block_id != PADDING_BLOCK)
        for other in [seq, *(other for other, at in self._nodes.items() if at in branch)]:
            self._stand_at(other, None)
            self._private.add(other)
        for block_id in block_ids:
            self.pool.withdraw(block_id)
            self.prefix_cache.remove(block_id)

    def free(self, seq: Sequence) -> None:
        """Take back all that ``seq`` holds; of what stays cached, its last blocks will be evicted first."""
        self._publish_all(seq)
        self._due.pop(seq, None)
        self.spares.holders.discard(seq)
        if self._pending_copies:
            self.copies_done([copy for copy, owner in self._pending_copies.items() if owner is seq])
        tables = reversed(list(zip(*seq.block_tables, strict=True)))
        self.pool.free(block_id for row in tables for block_id in row if block_id != PADDING_BLOCK)
        seq.block_tables = []
        self.may_share.discard(seq)
        self._looked_up.discard(seq)
        self._private.discard(seq)
        self._stand_at(seq, None)

    def state(self) -> KVState:
        """What it goes by now, between two steps."""
        assert not self._looked_up
        return KVState(
            free=self.pool.free_order,
            cached=self.pool.cached,
            nodes=dict(self._nodes),
            private=list(self._private),
            may_share=list(self.may_share),
            due=list(self._due),
            spares=list(self.spares.holders),
            copies=list(self._pending_copies.items()),
        )

    def restore(self, state: KVState, held: Iterable[int]) -> None:
        """Be, new, as another was, whose sequences held the blocks ``held``; the tree of prefixes is there already."""
        published = [] if self.prefix_cache is None else self.prefix_cache.named
        sources = [copy.source for copy, _ in state.copies]
        self.pool.restore(state.free, state.cached, [*held, *sources], published)
        for seq, node in state.nodes.items():
            self._stand_at(seq, node)
        self._private.update(state.private)
        self.may_share.update(state.may_share)
        self._due.update(dict.fromkeys(state.due))
        self.spares.holders.update(state.spares)
        self._pending_copies.update(state.copies)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that ``sequences`` and pending copies account for every reference, that tables hold what is computed
        and not left behind, and that the prefix cache agrees.
        """
        sequences = list(sequences)
        sources = [copy.source for copy in self.pending_copies]
        self.pool.check_integrity([*(entry.block_id for seq in sequences for entry in held_entries(seq)), *sources])
        for seq in sequences:
            lengths = {len(table) for table in seq.block_tables}
            assert len(seq.block_tables) in (0, self.num_groups), f"{seq}: {len(seq.block_tables)} block tables"
            assert len(lengths) <= 1, f"{seq}: its block tables differ in length: {lengths}"
            num_places = max(lengths, default=0) * self.block_size
            assert seq.num_computed_tokens <= num_places, f"{seq}: blocks for {num_places} tokens only"
            num_full = seq.num_computed_tokens // self.block_size
            for table, window in zip(seq.block_tables, self.windows, strict=False):
                first = first_seen_block(num_full, window, self.block_size)
                is_left = seq in self._due or not any(table[:first])
                assert is_left, f"{seq}: blocks left behind by a window of {window}: {table[:first]}"
                assert all(table[first:]), f"{seq}: blocks missing from its table: {table}"
        for copy, owner in self._pending_copies.items():
            assert owner.block_tables[copy.group][copy.table_index] == copy.destination, (
                f"{owner} has no use for {copy}"
            )
        assert self._looked_up.issubset(sequences), f"neither admitted nor detached: {self._looked_up}"
        self.spares.check_integrity()
        known = self.may_share.union(self._nodes, self._private, self._pending_copies.values(), self._due)
        known |= self.spares.holders
        holders = {seq for seq in sequences if seq.block_tables}
        assert known <= holders, f"remembered and hold nothing: {known - holders}"
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity(self.pool.published, self._nodes.values())

    def _looks_up(self, seq: Sequence) -> bool:
        return self.prefix_cache is not None and not seq.block_tables and seq.request.sampling.prompt_logprobs is None

    def _shared_entries(self, seq: Sequence) -> list[TableEntry]:
        """The blocks that the next token of ``seq`` goes into and that are not its own."""
        index, offset = divmod(seq.num_computed_tokens, self.block_size)
        if not offset or seq not in self.may_share:
            return []
        entries = [TableEntry(group, index, table[index]) for group, table in enumerate(seq.block_tables)]
        return [entry for entry in entries if self.pool.is_shared(entry.block_id)]

    def _note_lookup(self, seq: Sequence) -> None:
        assert self.prefix_cache is not None
        self._looked_up.remove(seq)
        statistics = self.prefix_cache.statistics
        statistics.lookups += 1
        statistics.lookup_tokens += seq.num_tokens
        statistics.hit_tokens += seq.num_computed_tokens

    def _publish(self, seq: Sequence, num_full: int) -> None:
        cache, pool = self.prefix_cache, self.pool
        assert cache is not None
        if seq in self._private:
            return
        before = self._nodes.get(seq)
        node = start = cache.root if before is None else before
        while node.depth < num_full:
            depth = node.depth
            block_ids = tuple([table[depth] for table in seq.block_tables])
            node = cache.publish(node, seq.token_ids, block_ids)
            if node.block_ids == block_ids:
                pool.publish(block_ids)
            else:
                pool.publish([own for block_id, own in zip(node.block_ids, block_ids, strict=True) if block_id == own])
        if node is not start:
            self._nodes[seq] = node
            cache.move_user_down(before, node)

    def _publish_all(self, seq: Sequence) -> None:
        """Publish what of ``seq`` was left for later."""
        if self.prefix_cache is not None and seq.block_tables:
            self._publish(seq, seq.num_computed_tokens // self.block_size)

    def _stand_at(self, seq: Sequence, node: PrefixNode | None) -> None:
        """Remember the node below which ``seq`` publishes its next block; ``None`` where it holds nothing any more."""
        if self.prefix_cache is None:
            return
        before = self._nodes.pop(seq, None)
        if node is not None:
            self._nodes[seq] = node
        self.prefix_cache.move_user(before, node)
