"""Random histories of blocks that are shared, copied, published, left behind and evicted, against brute force.

Beside the manager stands a cache whose places remember what was written there: for which group, after which tokens.
Whatever happens, each sequence finds in its places what it would have computed itself; and what is found in the prefix
cache, what is evicted and what an allocation takes is what longhand counting says.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fastgen.runtime.kv_cache.block_pool import PADDING_BLOCK
from fastgen.runtime.kv_cache.block_tables import BlockCopy, held_entries, max_blocks_held
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from tests.fast import cases

Tokens = tuple[int, ...]
MAX_CHUNK = 9
MAX_TOKENS = 40


class History:
    """One random history; the seed decides everything."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.block_size = rng.randint(1, 4)
        self.windows = [rng.choice([None, None, 2, 3, 5, 8, 13]) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.1:
            self.windows.append(1)  # where a token sees only itself, nothing need be found; so never the only one
        self.capacity = rng.randint(2, 60)
        self.is_caching = rng.random() < 0.9
        self.kv = KVCacheManager(
            self.capacity + 1,
            self.block_size,
            self.windows,
            max_chunk=MAX_CHUNK,
            prefix_caching=self.is_caching,
        )
        self.memory: dict[tuple[int, int], tuple[int, Tokens]] = {}
        self.published: dict[tuple[int, Tokens], int] = {}
        # When each cached block was released: what is smaller goes first.
        self.released: dict[int, tuple[int, int]] = {}
        # Of each sequence, how many blocks it has published or found.
        self.num_full: dict[Sequence, int] = {}
        # Sequences that hold something of what was withdrawn.
        self.private: set[Sequence] = set()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_requests = self.clock = 0
        self.expected = Counter({"lookup_tokens": 0, "hit_tokens": 0, "evictions": 0})
        self.seen: Counter[str] = Counter()

    def run(self, num_acts: int) -> None:
        acts = [
            self.arrive,
            self.admit,
            self.admit,
            self.fork,
            self.free,
            *[self.step] * 6,
            self.lose_step,
            self.withdraw,
        ]
        for _ in range(num_acts):
            self.rng.choice(acts)()
            self.check()
        for seq in list(self.running):
            self.kv.free(seq)
            self.running.remove(seq)
        self.private.clear()
        self.check()
        assert self.kv.pool.num_free == self.capacity

    # What happens

    def arrive(self) -> None:
        """A request whose tokens begin like others': there are only two kinds."""
        length = self.rng.randint(1, MAX_TOKENS)
        token_ids = [int(self.rng.random() < 0.08) for _ in range(length)]
        prompt_logprobs = 0 if self.rng.random() < 0.1 else None
        sampling = SamplingParams(n=1, max_new_tokens=50, prompt_logprobs=prompt_logprobs)
        self.num_requests += 1
        self.waiting += Request(self.num_requests, token_ids, sampling, 0.0).sequences

    def admit(self) -> None:
        """A waiting sequence, new or freed before, is looked up and given places; or not, if there are none."""
        if not self.waiting:
            return
        seq = self.waiting[0]
        expected = self.deepest_hit(seq) if self.looks_up(seq) else 0
        found = self.kv.attach_cached(seq)
        assert seq.num_computed_tokens == expected * self.block_size < seq.num_tokens
        assert sorted(found) == sorted(
            (group, index, self.published[group, tuple(seq.token_ids[: (index + 1) * self.block_size])])
            for group, window in enumerate(self.windows)
            for index in range(self.first_seen(expected, window), expected)
        )
        self.seen["hits"] += bool(expected)
        self.running.append(self.waiting.pop(0))
        self.num_full[seq] = expected
        self.check()
        num_tokens = self.rng.randint(1, min(MAX_CHUNK, seq.num_pending_tokens))
        if self.rng.random() < 0.2 or not self.allocate(seq, num_tokens):
            self.kv.detach(seq)
            self.seen["detached"] += bool(expected)
            assert (seq.num_computed_tokens, seq.block_tables, seq.num_cached_tokens) == (0, [], 0)
            self.waiting.append(self.running.pop())
            self.sync()
        elif self.looks_up(seq):
            self.expected.update(lookup_tokens=seq.num_tokens, hit_tokens=expected * self.block_size)
            assert seq.num_cached_tokens == expected * self.block_size

    def fork(self) -> None:
        """A running sequence goes on in two ways, from its last computed token or an earlier one."""
        parents = [seq for seq in self.running if seq.num_computed_tokens]
        if not parents or self.kv.pending_copies:
            return
        parent = self.rng.choice(parents)
        num_full = parent.num_computed_tokens // self.block_size
        least = 1 if self.windows == [None] * len(self.windows) else max(1, num_full * self.block_size)
        num_tokens = self.rng.choice([parent.num_computed_tokens, self.rng.randint(least, parent.num_computed_tokens)])
        self.num_requests += 1
        child = Request(self.num_requests, parent.token_ids[:num_tokens], SamplingParams(max_new_tokens=50), 0.0)
        seq = child.sequences[0]
        seq.token_ids.append(self.rng.randint(0, 1))
        self.kv.fork(parent, seq, num_tokens)
        assert seq.num_computed_tokens == num_tokens
        self.num_full[seq] = num_tokens // self.block_size
        self.running.append(seq)
        self.private |= {seq} if parent in self.private else set()
        self.seen["forks"] += 1

    def free(self) -> None:
        """A sequence ends, or is preempted and comes back."""
        if not self.running:
            return
        seq = self.running.pop(self.rng.randrange(len(self.running)))
        self.kv.free(seq)
        assert seq.block_tables == []
        self.private.discard(seq)
        self.sync()
        if self.rng.random() < 0.5:
            seq.num_computed_tokens = seq.num_cached_tokens = 0
            self.waiting.append(seq)

    def withdraw(self) -> None:
        """Withdraws what a sequence has computed wrongly: nothing that begins with its first block is found again."""
        if not self.running or self.rng.random() < 0.7:
            return
        seq = self.rng.choice(self.running)
        self.kv.withdraw(seq)
        if self.is_caching and self.num_full[seq] and seq not in self.private:
            size, first = self.block_size, tuple(seq.token_ids[: self.block_size])
            gone = {key: block_id for key, block_id in self.published.items() if key[1][:size] == first}
            self.published = {key: block_id for key, block_id in self.published.items() if key not in gone}
            self.released = {block_id: at for block_id, at in self.released.items() if block_id not in gone.values()}
            self.private |= {
                each for each in self.running if self.num_full[each] and tuple(each.token_ids[:size]) == first
            }
            self.seen["withdrawn"] += len(gone)
        self.private.add(seq)

    def step(self) -> None:
        chunks, copies = self.schedule()
        self.copy(copies)
        self.forward(chunks)
        for seq, num_tokens in chunks:
            seq.num_computed_tokens += num_tokens
        for copy in copies:
            self.kv.copies_done([copy])
            self.sync()
        for seq, _ in chunks:
            self.kv.advance(seq)
            self.publish(seq)
            self.sync()
            if not seq.num_pending_tokens:
                seq.token_ids.append(int(self.rng.random() < 0.08))
                if seq.num_tokens > 2 * MAX_TOKENS:
                    self.running.remove(seq)
                    self.kv.free(seq)
                    self.sync()

    def lose_step(self) -> None:
        """A step fails: before its copies, before its forward pass, or after it."""
        chunks, copies = self.schedule()
        how_far = self.rng.randrange(3)
        if how_far >= 1:
            self.copy(copies)
        if how_far >= 2:
            self.forward(chunks)
        self.seen["lost copies"] += len(copies)

    # Its parts

    def schedule(self) -> tuple[list[tuple[Sequence, int]], tuple[BlockCopy, ...]]:
        chunks = []
        for seq in self.rng.sample(self.running, self.rng.randint(0, len(self.running))):
            num_tokens = self.rng.randint(1, min(MAX_CHUNK, seq.num_pending_tokens))
            if self.allocate(seq, num_tokens):
                chunks.append((seq, num_tokens))
        return chunks, self.kv.pending_copies

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """``allocate``, compared with counting; whether there was room."""
        kv, size = self.kv, self.block_size
        references, tables = self.references(), [list(table) for table in seq.block_tables]
        num_held = len(tables[0]) if tables else 0
        index, offset = divmod(seq.num_computed_tokens, size)
        partial = {group: table[index] for group, table in enumerate(tables)} if offset else {}
        to_copy = {
            group: block_id
            for group, block_id in partial.items()
            if references[block_id] > 1 or block_id in self.published.values()
        }
        end = max(num_held, -(-(seq.num_computed_tokens + num_tokens) // size))
        needed = (end - num_held) * len(self.windows) + len(to_copy)
        num_free = self.capacity - len(references)
        most = kv.max_tokens(seq)
        assert (needed <= num_free) == (num_tokens <= most), "max_tokens says what can be allocated"

        allocation = kv.allocate(seq, num_tokens)
        if needed > num_free:
            assert allocation is None
            assert seq.block_tables == tables
            self.seen["no room"] += 1
            return False
        assert allocation is not None
        appended = [entry for entry in held_entries(seq) if entry.table_index >= allocation.first]
        given = [*(entry.block_id for entry in appended), *(copy.destination for copy in allocation.copies)]
        assert len(given) == len(set(given)) == needed
        assert references.keys().isdisjoint(given)
        assert PADDING_BLOCK not in given
        assert [entry[:2] for entry in appended] == [
            (group, index) for group in range(len(self.windows)) for index in range(num_held, end)
        ]
        assert [copy[:3] for copy in allocation.copies] == [(group, index, to_copy[group]) for group in sorted(to_copy)]
        for group, table in enumerate(seq.block_tables):
            changed = {entry.table_index: entry.block_id for entry in appended if entry.group == group}
            changed |= {copy.table_index: copy.destination for copy in allocation.copies if copy.group == group}
            old = dict(enumerate(tables[group] if tables else []))
            assert dict(enumerate(table)) == old | changed
            num_blocks = sum(block_id != PADDING_BLOCK for block_id in table)
            num_places = max(num_held * size, seq.num_computed_tokens + num_tokens)
            window = self.windows[group]
            assert num_blocks <= max_blocks_held(num_places, window, size, max_chunk=MAX_CHUNK)
        self.evict(len(given) - (num_free - len(self.released)))
        self.seen["copies"] += len(to_copy)
        return True

    def evict(self, count: int) -> None:
        """That the ``count`` blocks released longest ago were evicted, and no other."""
        gone = set(self.published.values()) - self.kv.pool.published
        assert len(gone) == max(0, count)
        left = [key for block_id, key in self.released.items() if block_id not in gone]
        assert all(self.released[block_id] <= min(left, default=(self.clock + 1, 0)) for block_id in gone)
        for block_id in gone:
            del self.released[block_id]
        self.published = {key: block_id for key, block_id in self.published.items() if block_id not in gone}
        self.expected["evictions"] += len(gone)
        self.seen["evictions"] += len(gone)

    def sync(self) -> None:
        """Notes which published blocks were released since the last time, or taken again."""
        self.clock += 1
        references = self.references()
        for (_, tokens), block_id in self.published.items():
            if block_id in references:
                self.released.pop(block_id, None)
            else:
                self.released.setdefault(block_id, (self.clock, -len(tokens)))

    def publish(self, seq: Sequence) -> None:
        size = self.block_size
        publishes = self.is_caching and seq not in self.private
        for index in range(self.num_full[seq], seq.num_computed_tokens // size if publishes else 0):
            tokens = tuple(seq.token_ids[: (index + 1) * size])
            for group in range(len(self.windows)):
                if (group, tokens) not in self.published:
                    self.published[group, tokens] = self.block_of(seq, group, tokens)
                else:
                    self.seen["both"] += 1
        self.num_full[seq] = seq.num_computed_tokens // size

    def block_of(self, seq: Sequence, group: int, tokens: Tokens) -> int:
        """Returns where the last of ``tokens`` was written for ``seq``; it may have left the table with this step."""
        block_id = seq.block_tables[group][(len(tokens) - 1) // self.block_size]
        if block_id != PADDING_BLOCK:
            return block_id
        place = self.block_size - 1
        known = self.kv.pool.published - set(self.published.values())
        (found,) = (b for b in known if self.memory.get((b, place)) == (group, tokens))
        return found

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """All are read before any is written."""
        read = [[self.memory.get((copy.source, i)) for i in range(self.block_size)] for copy in copies]
        for copy, contents in zip(copies, read, strict=True):
            for i, content in enumerate(contents):
                self.memory[copy.destination, i] = content

    def forward(self, chunks: list[tuple[Sequence, int]]) -> None:
        for seq, num_tokens in chunks:
            for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
                for group in range(len(self.windows)):
                    self.memory[self.place(seq, group, position)] = (group, tuple(seq.token_ids[: position + 1]))

    def place(self, seq: Sequence, group: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        block_id = seq.block_tables[group][index]
        assert block_id != PADDING_BLOCK
        return block_id, offset

    def looks_up(self, seq: Sequence) -> bool:
        return self.is_caching and seq.request.sampling.prompt_logprobs is None

    def first_seen(self, num_full: int, window: int | None) -> int:
        """The block of the first position that the token after ``num_full`` blocks sees."""
        seen = range(num_full * self.block_size + 1)
        return (seen if window is None else seen[-window:])[0] // self.block_size

    def deepest_hit(self, seq: Sequence) -> int:
        """The most full blocks, with a token left to compute, that are all there as far as they will be seen."""
        size = self.block_size
        return max(
            depth
            for depth in range((seq.num_tokens - 1) // size + 1)
            if all(
                (group, tuple(seq.token_ids[: (index + 1) * size])) in self.published
                for group, window in enumerate(self.windows)
                for index in range(self.first_seen(depth, window), depth)
            )
        )

    def references(self) -> Counter[int]:
        tables = [table for seq in self.running for table in seq.block_tables]
        held = Counter(block_id for table in tables for block_id in table if block_id != PADDING_BLOCK)
        return held + Counter(copy.source for copy in self.kv.pending_copies)

    def check(self) -> None:
        self.sync()
        self.kv.check_integrity(self.running)
        assert self.kv.pool.num_free == self.capacity - len(self.references())
        assert self.kv.pool.num_cached == len(self.released)
        assert self.kv.pool.published == set(self.published.values())
        if self.kv.prefix_cache is not None:
            assert vars(self.kv.prefix_cache.statistics) == self.expected
        awaited = {copy.destination for copy in self.kv.pending_copies}
        for seq in self.running:
            computed = seq.num_computed_tokens
            for group, window in enumerate(self.windows):
                for position in range(0 if window is None else max(0, computed - window + 1), computed):
                    place = self.place(seq, group, position)
                    if place[0] not in awaited:
                        assert self.memory[place] == (group, tuple(seq.token_ids[: position + 1]))


@pytest.mark.parametrize("seed", cases(range(250), fast=range(100)))
def test_random_histories(seed: int) -> None:
    History(seed).run(num_acts=80)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(1_000, 4_000, 50))
def test_many_random_histories(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        History(seed).run(num_acts=150)


def test_the_histories_reach_every_rule() -> None:
    """Guards the generator: what the rules are about does occur."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        history = History(seed)
        history.run(num_acts=80)
        seen += history.seen
    for what in ("hits", "detached", "forks", "lost copies", "no room", "copies", "evictions", "both", "withdrawn"):
        assert seen[what] > 20, (what, seen)
