"""The KV cache manager: which sequence holds which blocks, which blocks are shared, and which requests can fit at all.

A sequence has one block table per KV group (the layers with one window). Entry ``i`` of a table is the block with the
keys and values of tokens ``i*P .. i*P + P - 1``. Here ``P = 4`` and there is one group; of 12 tokens 6 are computed,
and the next step takes 5 more::

    token   0   1   2   3 | 4   5   6   7 | 8   9  10  11
            <----- computed ----->|<-- this step --->|     num_computed_tokens = 6, num_tokens = 12
    table [       7       |       2       |       5       ]
                                              appended by allocate(seq, 5), which returns first=2

Nothing is reserved for tokens that are not generated yet. The last token of a request is never computed, because
nothing follows it. So a prompt of ``p`` tokens and ``m`` new ones fill at most ``p + m - 1`` places of each group.

**Sharing.** Full blocks are published in the prefix cache once they are computed. A sequence that begins with the same
tokens takes references on them instead of computing them again. A fork takes references on all blocks of its parent. A
shared or published block is never written: blocks found in the cache are full, and for a shared block that is partly
filled :meth:`KVCacheManager.allocate` makes a copy for the sequence that writes first (copy-on-write). The source keeps
a reference until the copy is known to be made, because a failed step is made again.

**Windows.** A group with a window ``w`` keeps only the blocks that a later token sees. Entries left of these become the
padding block, and tables keep their length. With ``P = 4`` and ``w = 6``, after 13 tokens::

    token   0   1   2   3 | 4   5   6   7 | 8   9  10  11 | 12
                                    <---- token 12 saw ---->     the block of tokens 4 … 7 is kept, for token 7
    table [       0       |       2       |       5       |  9

Blocks that a window leaves behind are freed whenever the sequence has filled a block, not token by token.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import islice

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.kv_cache.block_pool import PADDING_BLOCK, BlockPool
from fastgen.runtime.kv_cache.block_tables import (
    Allocation,
    BlockCopy,
    TableEntry,
    held_entries,
)
from fastgen.runtime.kv_cache.capacity import Capacity
from fastgen.runtime.kv_cache.kv_state import KVState
from fastgen.runtime.kv_cache.prefix_cache import PrefixCache, PrefixNode, first_seen_block
from fastgen.runtime.requests.request import Sequence


class KVCacheManager:
    """Block tables over one pool of ``num_blocks`` blocks of ``block_size`` tokens, which all KV groups share.

    ``num_blocks`` counts the padding block, as the first axis of the cache tensors does. ``windows`` has an entry for
    each KV group: how many positions a token sees there, its own included, or ``None`` for all. ``max_chunk`` is the
    most tokens of a sequence that one step takes (the token budget). It bounds what a windowed group holds at once.
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
        self.capacity = Capacity(self.pool.capacity, block_size, self.windows, max_chunk)
        self.num_groups, self._has_windows = len(self.windows), any(self.windows)
        # For each sequence that holds blocks: the node of the last block that it published or took from the cache.
        self._nodes: dict[Sequence, PrefixNode] = {}
        # Sequences that publish no more, because their blocks may be wrong.
        self._private: set[Sequence] = set()
        # Sequences whose next token may go into a shared block, after a fork. Any other sequence has a place for its
        # next token already, unless ``num_computed_tokens`` is a multiple of ``block_size``.
        self.may_share: set[Sequence] = set()
        # The sequence of each pending copy. A copy holds a reference on its source.
        self._pending_copies: dict[BlockCopy, Sequence] = {}
        # Sequences that hold cached blocks, but have no places for more tokens yet.
        self._looked_up: set[Sequence] = set()

    @property
    def num_free(self) -> int:
        """Returns how many blocks can be allocated now."""
        return self.pool.num_free

    def max_tokens(self, seq: Sequence) -> int:
        """Returns how many tokens beyond the computed ones ``seq`` can place if it gets all blocks that are free."""
        num_held = len(seq.block_tables[0]) if seq.block_tables else 0
        num_free = self.num_free - len(self._shared_entries(seq))
        if num_free < 0:  # too few even for the copies that its next token needs
            return 0
        return (num_held + num_free // self.num_groups) * self.block_size - seq.num_computed_tokens

    # The blocks of a sequence, from admission to the end

    def attach_cached(self, seq: Sequence) -> list[TableEntry]:
        """Gives a waiting ``seq`` the blocks that the prefix cache has for its tokens. At least one token is left to
        compute.

        Sets ``block_tables``, ``num_computed_tokens`` and, unless it was preempted, ``num_cached_tokens``. Returns the
        entries of its tables that hold a block; a forked sequence has some already. Nothing is looked up where prompt
        log-probabilities are requested, because these need every token computed.
        """
        if self._looks_up(seq):
            assert self.prefix_cache is not None
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
        """Undoes :meth:`attach_cached`, or :meth:`fork`, for a sequence that could not be admitted after all."""
        self.free(seq)
        seq.num_computed_tokens = 0
        if not seq.num_preemptions:
            seq.num_cached_tokens = 0

    def allocate(self, seq: Sequence, num_new_tokens: int) -> Allocation | None:
        """Makes places for the ``num_new_tokens`` tokens of ``seq`` that follow the computed ones.

        Allocates nothing where the places exist and belong to the sequence alone. Returns ``None`` with nothing changed
        where the free blocks do not suffice for all groups. Table entries of :attr:`Allocation.copies` are the
        destinations already; the copies stay pending until :meth:`copies_done`.
        """
        num_held = len(seq.block_tables[0]) if seq.block_tables else 0
        end = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        num_appended = max(0, end - num_held)
        shared = self._shared_entries(seq)
        block_ids = self.pool.allocate(num_appended * self.num_groups + len(shared))
        if block_ids is None:
            return None
        self.may_share.discard(seq)
        if seq in self._looked_up:
            self._note_lookup(seq)
        unused = iter(block_ids)
        if num_appended:
            if not seq.block_tables:
                seq.block_tables = [[] for _ in self.windows]
            for table in seq.block_tables:
                table += islice(unused, num_appended)
        copies = [BlockCopy(*entry, next(unused)) for entry in shared]
        for copy in copies:
            seq.block_tables[copy.group][copy.table_index] = copy.destination
            self._pending_copies[copy] = seq
        return Allocation(num_held, copies)

    def append_blocks(self, decodes: SequenceOf[Sequence]) -> bool:
        """Appends a block to each table of each of ``decodes``, whose blocks are full. Appends none and returns
        ``False`` where the free blocks do not suffice.
        """
        block_ids = self.pool.allocate(len(decodes) * self.num_groups)
        if block_ids is None:
            return False
        unused = iter(block_ids)
        for seq in decodes:
            for table in seq.block_tables:
                table.append(next(unused))
        return True

    @property
    def pending_copies(self) -> tuple[BlockCopy, ...]:
        """Returns all copies that are not known to be made, also those of failed steps. The device makes them first."""
        return tuple(self._pending_copies)

    def copies_done(self, copies: Iterable[BlockCopy]) -> None:
        """Releases the sources of ``copies``, whose step is committed. Copies for sequences freed since are ignored."""
        for copy in copies:
            if copy in self._pending_copies:
                del self._pending_copies[copy]
                self.pool.free([copy.source])

    def advance(self, seq: Sequence) -> None:
        """Publishes the blocks of ``seq`` that are full now, and frees those that no later token sees. Called when its
        ``num_computed_tokens`` has grown; it does nothing unless a block was filled since the last call.
        """
        num_full = seq.num_computed_tokens // self.block_size
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

    def advance_decode(self, seq: Sequence) -> None:
        """Frees what no later token of ``seq``, a decode that has filled a block, sees.

        Without windows the block is published later, when the sequence ends, is preempted or forked. Prompts rarely
        repeat an answer before it ends, and with many decodes publishing each full block takes longer than the rest of
        scheduling. With windows it is published now, before a window leaves it behind.
        """
        if self._has_windows:
            self.advance(seq)

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Returns whether ``parent`` has computed its first ``num_tokens`` tokens and still has the blocks for
        :meth:`fork`.
        """
        if not 0 < num_tokens <= parent.num_computed_tokens or parent in self._pending_copies.values():
            return False
        num_full, num_now = num_tokens // self.block_size, parent.num_computed_tokens // self.block_size
        return all(
            first_seen_block(num_full, window, self.block_size) == first_seen_block(num_now, window, self.block_size)
            for window in self.windows
        )

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Lets ``child``, which holds nothing, share the blocks of the first ``num_tokens`` computed tokens of
        ``parent``. These tokens must be the same in both; they count as computed for the child.

        The sequence that writes first into a partly filled last block gets a copy of it. Where ``num_tokens`` is less
        than the parent has computed, no window may have left behind what the child needs.
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
        """Removes from the prefix cache what was computed for ``seq`` and everything computed from it, because it is
        wrong.

        It is unknown which of its blocks is at fault and where a block came from. So every published block with the
        same first block is removed, and the sequences that hold such blocks keep them but publish no more.
        """
        if self.prefix_cache is None or not seq.block_tables:
            return
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
        """Frees everything that ``seq`` holds. Of the blocks that stay cached, its last ones are evicted first."""
        self._publish_all(seq)
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
        """Returns the state between two steps."""
        assert not self._looked_up
        return KVState(
            free=self.pool.free_order,
            cached=self.pool.cached,
            nodes=dict(self._nodes),
            private=list(self._private),
            may_share=list(self.may_share),
            copies=list(self._pending_copies.items()),
        )

    def restore(self, state: KVState, held: Iterable[int]) -> None:
        """Restores ``state`` into a new manager whose sequences held the blocks ``held``. The tree of prefixes is
        restored already.
        """
        published = [] if self.prefix_cache is None else self.prefix_cache.named
        sources = [copy.source for copy, _ in state.copies]
        self.pool.restore(state.free, state.cached, [*held, *sources], published)
        for seq, node in state.nodes.items():
            self._stand_at(seq, node)
        self._private.update(state.private)
        self.may_share.update(state.may_share)
        self._pending_copies.update(state.copies)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that ``sequences`` and pending copies account for every reference, that tables hold what is computed
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
                assert not any(table[:first]), f"{seq}: blocks left behind by a window of {window}: {table[:first]}"
                assert all(table[first:]), f"{seq}: blocks missing from its table: {table}"
        for copy, owner in self._pending_copies.items():
            assert owner.block_tables[copy.group][copy.table_index] == copy.destination, (
                f"{owner} has no use for {copy}"
            )
        assert self._looked_up.issubset(sequences), f"neither admitted nor detached: {self._looked_up}"
        known = self.may_share.union(self._nodes, self._private, self._pending_copies.values())
        holders = {seq for seq in sequences if seq.block_tables}
        assert known <= holders, f"remembered and hold nothing: {known - holders}"
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity(self.pool.published, self._nodes.values())

    def _looks_up(self, seq: Sequence) -> bool:
        return self.prefix_cache is not None and not seq.block_tables and seq.request.sampling.prompt_logprobs is None

    def _shared_entries(self, seq: Sequence) -> list[TableEntry]:
        """Returns the blocks that the next token of ``seq`` goes into and that others hold too."""
        if seq not in self.may_share or not seq.num_computed_tokens % self.block_size:
            return []
        index = seq.num_computed_tokens // self.block_size
        entries = [TableEntry(group, index, table[index]) for group, table in enumerate(seq.block_tables)]
        return [entry for entry in entries if self.pool.is_shared(entry.block_id)]

    def _note_lookup(self, seq: Sequence) -> None:
        assert self.prefix_cache is not None
        self._looked_up.remove(seq)
        statistics = self.prefix_cache.statistics
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
        """Publishes all full blocks of ``seq``."""
        if self.prefix_cache is not None and seq.block_tables:
            self._publish(seq, seq.num_computed_tokens // self.block_size)

    def _stand_at(self, seq: Sequence, node: PrefixNode | None) -> None:
        """Sets the node below which ``seq`` publishes its next block; ``None`` where it holds nothing any more."""
        if self.prefix_cache is None:
            return
        before = self._nodes.pop(seq, None)
        if node is not None:
            self._nodes[seq] = node
        self.prefix_cache.move_user(before, node)
