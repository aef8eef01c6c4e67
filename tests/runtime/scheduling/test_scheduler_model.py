"""The scheduler over random histories, against a brute-force model of the same rules and a device that remembers.

A history adds requests, cancels, runs steps, and loses steps half way, over caches as small as the largest request.
After each act every owner's integrity is checked; in each step

- the model, which recounts everything from nothing, decides the same;
- the device writes each token into its place through block tables that know only what the schedules told, and finds
  there every token it wrote before.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import pytest

from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.schedule import Schedule, ScheduledTokens
from fastgen.runtime.scheduling.scheduler import Scheduler

Key = tuple[int, int]
# Whose tokens, from where, and how many.
Entry = tuple[Key, int, int]


@dataclass
class ModelSequence:
    key: Key
    num_prompt: int
    num_tokens: int
    urgency: tuple[int, int, int]
    computed: int = 0
    # Each stands for one block in every KV group; sequences may have the same.
    blocks: list[int] = field(default_factory=list)
    running: bool = False
    waits_for_first: bool = False
    was_preempted: bool = False
    # Until it has a token of its own, it ends in a block of that one's.
    came_from_other: bool = False
    # Whether a step was committed since it was admitted.
    has_run: bool = False

    @property
    def is_decode(self) -> bool:
        return self.has_run and self.computed >= self.num_prompt and self.num_tokens == self.computed + 1


@dataclass
class Model:
    """The rules of the scheduler under SplitFuse, written out longhand over one list of sequences."""

    block_size: int
    num_groups: int
    capacity: int
    budget: int
    max_num_seqs: int
    aging_s: float
    sequences: list[ModelSequence] = field(default_factory=list)
    # Of which block a sequence waits to get a copy, as long as no step was committed.
    sources: dict[Key, int] = field(default_factory=dict)
    # Who waits for a slot, in the order in which they came into their classes, and when that was.
    queued: list[tuple[ModelSequence, float]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    now_s: float = 0.0

    def add(self, num_prompt: int, request_id: int, n: int, priority: int, now_s: float) -> None:
        turn = next(self.numbers)
        for index in range(n):
            seq = ModelSequence((request_id, index), num_prompt, num_prompt, (priority, turn, index))
            seq.waits_for_first = index > 0
            self.sequences.append(seq)
        self.queued.append((self.sequences[-n], now_s))

    def drop(self, key: Key) -> None:
        (seq,) = (s for s in self.sequences if s.key == key)
        self.sequences.remove(seq)
        self.sources.pop(key, None)
        self.queued = [(s, since) for s, since in self.queued if s is not seq]
        if seq.key[1] == 0:
            self.call_siblings(seq)

    def call_siblings(self, first: ModelSequence) -> None:
        for seq in self.sequences:
            if seq.key[0] == first.key[0] and seq.waits_for_first:
                seq.waits_for_first, seq.urgency = False, (*first.urgency[:2], seq.key[1])
                self.queued.append((seq, self.now_s))

    def committed(self, key: Key, num_tokens: int) -> None:
        (seq,) = (s for s in self.sequences if s.key == key)
        seq.computed += num_tokens
        seq.has_run = True
        if seq.key[1] == 0 and seq.computed >= seq.num_prompt:
            self.call_siblings(seq)

    def age(self) -> None:
        for _ in range(2):
            levels = sorted({seq.urgency[0] for seq, _ in self.queued})
            if len(levels) < 2 or self.now_s - self.queued[0][1] < self.aging_s:
                return
            seq, _ = self.queued.pop(0)
            self.queued.append((seq, self.now_s))
            if seq.urgency[0] > levels[0]:
                level = levels[levels.index(seq.urgency[0]) - 1]
                seq.urgency = (level, next(self.numbers), seq.key[1])

    def num_free(self) -> int:
        held = {block for seq in self.sequences for block in seq.blocks}.union(self.sources.values())
        return self.capacity - self.num_groups * len(held)

    def num_blocks(self, num_tokens: int) -> int:
        return len(range(0, num_tokens, self.block_size))

    def num_missing(self, seq: ModelSequence, num_tokens: int) -> int:
        """Blocks that the next ``num_tokens`` of ``seq`` need beyond those it has to itself."""
        num_more = max(0, self.num_blocks(seq.computed + num_tokens) - len(seq.blocks))
        return self.num_groups * (num_more + self.writes_into_shared(seq))

    def writes_into_shared(self, seq: ModelSequence) -> bool:
        return bool(seq.computed % self.block_size) and seq.came_from_other

    def give(self, seq: ModelSequence, num_tokens: int) -> None:
        if self.writes_into_shared(seq):
            self.sources[seq.key] = seq.blocks[-1]
            seq.blocks[-1] = next(self.numbers)
        seq.came_from_other = False
        while len(seq.blocks) < self.num_blocks(seq.computed + num_tokens):
            seq.blocks.append(next(self.numbers))

    def sizes(self) -> list[int]:
        multiples = {64: range(64, 513, 64), 128: range(512, self.budget + 1, 128)}
        named = {1, 2, 4, 8, 16, 32, *multiples[64], *multiples[128]}
        return [n for n in range(1, self.budget + 1) if n in named or n == self.budget]

    def running(self) -> list[ModelSequence]:
        return sorted((s for s in self.sequences if s.running), key=lambda s: s.urgency)

    def preempt(self) -> Key:
        victim = self.running()[-1]
        victim.running, victim.computed, victim.blocks, victim.was_preempted = False, 0, [], True
        victim.has_run = False
        self.sources.pop(victim.key, None)
        self.queued.append((victim, self.now_s))
        return victim.key

    def share(self, seq: ModelSequence) -> None:
        """It has what another sequence of its request has computed of the prompt, but for one token of its own."""
        num_tokens = min(seq.num_prompt, seq.num_tokens - 1)
        for other in self.sequences:
            computed = other.computed if other.running and other.key not in self.sources else 0
            if other is not seq and other.key[0] == seq.key[0] and 0 < num_tokens <= computed:
                seq.computed, seq.blocks = num_tokens, other.blocks[: self.num_blocks(num_tokens)]
                seq.came_from_other = True
                return

    def room(self, num_decodes: int, prompts: list[ModelSequence]) -> int:
        """The fewest passes, and the smallest size that can do it in so many; many passes fill the budget."""
        pending = sum(s.num_tokens - s.computed for s in prompts)
        if not pending:
            return 0
        if pending >= 8 * (self.budget - num_decodes):
            return self.budget - num_decodes
        passes = next(f for f in itertools.count(1) if f * (self.budget - num_decodes) >= pending)
        return next(size for size in self.sizes() if passes * (size - num_decodes) >= pending) - num_decodes

    def step(self, now_s: float) -> tuple[list[Entry], list[Entry], list[Key], int] | None:
        """``(decodes, chunks, preempted, size)``."""
        self.now_s = now_s
        self.age()
        if not self.sequences:
            return None
        decodes: list[Entry] = []
        chunks: list[Entry] = []
        preempted: list[Key] = []
        first = next(iter(self.running()), None)
        if first is not None and not first.is_decode:
            while self.num_missing(first, 1) > self.num_free():
                preempted.append(self.preempt())
            self.give(first, 1)
        for seq in self.running():
            while seq.is_decode and self.num_missing(seq, 1) > self.num_free():
                preempted.append(self.preempt())
            if seq.is_decode:
                decodes.append((seq.key, seq.computed, 1))
                self.give(seq, 1)

        prompts = [s for s in self.running() if not s.is_decode]
        if not preempted:
            slots = self.max_num_seqs - len(self.running())
            prompts += sorted((s for s, _ in self.queued), key=lambda s: s.urgency)[:slots]
        prompts.sort(key=lambda s: s.urgency)
        room = self.room(len(decodes), prompts)
        prompts_left = prompts
        while prompts_left:
            seq, *prompts_left = prompts_left
            if not seq.running:
                self.share(seq)
            wanted = seq.num_tokens - seq.computed
            given = 0
            while given < min(wanted, room) and self.num_missing(seq, given + 1) <= self.num_free():
                given += 1
            num_in_slots = len(self.running())
            whole = self.num_groups * (self.num_blocks(seq.num_tokens) - len(seq.blocks) + num_in_slots)
            if not seq.running and seq.was_preempted and num_in_slots and whole > self.num_free():
                given = 0
            if given:
                chunks.append((seq.key, seq.computed, given))
                self.give(seq, given)
                if not seq.running:
                    self.queued = [(s, since) for s, since in self.queued if s is not seq]
                    seq.running = True
                room -= given
            elif not seq.running:
                seq.computed, seq.blocks, seq.came_from_other = 0, [], False
                if room:  # nobody passes it by, but who runs goes on
                    prompts_left = [s for s in prompts_left if s.running]
                    continue
            if given < wanted:
                break
        total = sum(num_tokens for _, _, num_tokens in (*decodes, *chunks))
        return decodes, chunks, preempted, next(size for size in self.sizes() if size >= total)


class Device:
    """A KV cache whose places remember which token of which sequence was written, and block tables as the schedules
    tell them.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.tables: dict[tuple[int, int, int], int] = {}
        self.places: dict[tuple[int, int], tuple[object, int, int]] = {}

    def update_tables(self, schedule: Schedule) -> None:
        assert len({update[:3] for update in schedule.block_updates}) == len(schedule.block_updates)
        for slot, group, index, block_id in schedule.block_updates:
            self.tables[slot, group, index] = block_id

    def copy_blocks(self, schedule: Schedule) -> None:
        copied = {
            (copy.destination, offset): self.places[copy.source, offset]
            for copy, offset in itertools.product(schedule.block_copies, range(self.block_size))
            if (copy.source, offset) in self.places
        }
        self.places |= copied

    def forward(self, entries: SequenceOf[ScheduledTokens], num_groups: int) -> None:
        """Write each scheduled token's place, then read all places each sequence attends to."""
        for entry in entries:
            for group, position in itertools.product(range(num_groups), range(entry.start, entry.end)):
                self.places[self.place(entry.seq, group, position)] = self.content(entry.seq, group, position)
        for entry in entries:
            for group, position in itertools.product(range(num_groups), range(entry.end)):
                read = self.places[self.place(entry.seq, group, position)]
                assert read == self.content(entry.seq, group, position), f"{entry} reads {read} at {position}"

    def place(self, seq: Sequence, group: int, position: int) -> tuple[int, int]:
        block_id = self.tables[seq.slot, group, position // self.block_size]
        assert block_id == seq.block_tables[group][position // self.block_size]
        assert block_id != 0
        return block_id, position % self.block_size

    def content(self, seq: Sequence, group: int, position: int) -> tuple[object, int, int]:
        """The prompt is the same for all sequences of a request."""
        return seq.key[0] if position < seq.num_prompt_tokens else seq.key, group, position


class History:
    """One random history; ``self.seed`` decides everything."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.block_size, self.num_groups = rng.choice([1, 2, 3, 4, 8]), rng.randint(1, 3)
        self.budget = rng.choice([8, rng.randint(1, 12), rng.randint(1, 64)])
        self.max_num_seqs = rng.randint(1, min(8, self.budget))
        self.max_total = rng.choice([4, 12, 24, 40, 90])  # prompt and new tokens of one request
        largest = self.num_groups * -(-(self.max_total - 1) // self.block_size)
        capacity = rng.choice([largest, largest + rng.randint(0, 3), rng.randint(1, 5) * largest])
        kv = KVCacheManager(capacity + 1, self.block_size, (None,) * self.num_groups)
        aging_s = rng.choice([2.0, 10.0, 1000.0])
        self.scheduler = Scheduler(kv, token_budget=self.budget, max_num_seqs=self.max_num_seqs, aging_s=aging_s)
        self.model = Model(self.block_size, self.num_groups, capacity, self.budget, self.max_num_seqs, aging_s)
        self.device = Device(self.block_size)
        self.priorities = rng.choice([[0], [0, 1], [-5, 0, 5, 6]])
        self.now_s = 0.0
        # Of each unfinished sequence: how many tokens it will have when it stops.
        self.lengths: dict[Key, int] = {}
        self.open: dict[Key, Sequence] = {}
        self.first_scheduled: list[Key] = []
        self.num_requests = 0

    def run(self, num_acts: int) -> None:
        weights = {
            self.add: self.rng.choice([1, 3]),
            self.cancel: self.rng.choice([0, 1]),
            self.step: 6,
            self.lose_step: 1,
        }
        for act in self.rng.choices(list(weights), list(weights.values()), k=num_acts):
            act()
            self.check()
        # The most urgent that runs gets on in every step, and loses what it has only to one that is more urgent still.
        for _ in range(sum(self.lengths.values()) * (1 + len(self.open))):
            if not self.open:
                break
            self.step()
            self.check()
        assert not self.open
        assert self.scheduler.schedule(self.now_s) is None
        assert self.scheduler.kv.num_free == self.scheduler.kv.pool.capacity
        if len(self.priorities) == 1:
            assert self.first_scheduled == sorted(self.first_scheduled)

    def add(self) -> None:
        total = self.rng.randint(2 if self.rng.random() < 0.5 else self.max_total, self.max_total)
        num_prompt = self.rng.choice([1, total - 1, total // 2, self.rng.randint(1, total - 1)])
        n, priority = self.rng.choice([1, 1, 1, 3]), self.rng.choice(self.priorities)
        sampling = SamplingParams(n=n, max_new_tokens=total - num_prompt, priority=priority)
        request = Request(self.num_requests, range(num_prompt), sampling, arrival_s=self.now_s)
        self.num_requests += self.rng.randint(1, 2)
        self.scheduler.add(request)
        self.model.add(num_prompt, request.request_id, n, priority, self.now_s)
        for seq in request.sequences:
            self.open[seq.key] = seq
            self.lengths[seq.key] = self.rng.choice([total, self.rng.randint(num_prompt + 1, total)])

    def cancel(self) -> None:
        if self.open:
            self.finish(self.rng.choice(list(self.open)))

    def finish(self, key: Key) -> None:
        self.scheduler.finish(self.open.pop(key))
        self.model.drop(key)
        del self.lengths[key]

    def plan(self) -> Schedule | None:
        """The next schedule, compared with the model's and with what every schedule must satisfy."""
        self.now_s += self.rng.choice([0.0, 1.0, 1.0, 5.0])
        running = sorted(self.scheduler.running, key=lambda seq: seq.urgency)
        decodes = [s for s in running if s.num_computed_tokens == s.num_tokens - 1 >= s.num_prompt_tokens]
        expected, schedule = self.model.step(self.now_s), self.scheduler.schedule(self.now_s)
        if schedule is None:
            assert expected is None
            return None
        found = [(entry.seq.key, entry.start, entry.num_tokens) for entry in schedule.entries]
        num_decodes = len(schedule.decodes)
        preempted = [seq.key for seq in schedule.preempted]
        assert expected is not None
        assert (sorted(found[:num_decodes]), found[num_decodes:], preempted, schedule.size) == (
            sorted(expected[0]),
            *expected[1:],
        )
        schedule.check(self.scheduler.kv, self.budget)

        taken = {entry.seq: entry for entry in schedule.entries}
        assert min(self.scheduler.running, key=lambda seq: seq.urgency) in taken, "the most urgent that runs gets on"
        for seq in decodes:
            assert seq in schedule.preempted or taken[seq].num_tokens == 1, "no decode is delayed but for blocks"
        self.check_size(schedule)
        if len(self.priorities) == 1:
            self.check_updates(schedule)
        for chunk in schedule.chunks:
            if chunk.seq.index == 0 and chunk.seq.key not in self.first_scheduled:
                self.first_scheduled.append(chunk.seq.key)
        return schedule

    def check_updates(self, schedule: Schedule) -> None:
        """A step's uploads are bounded, those of lost steps included, as long as no request overtakes another."""
        in_flight = self.num_groups * (self.budget // self.block_size + 2 * self.max_num_seqs)
        shared = sum(
            len(table) for seq in self.scheduler.running if len(seq.request.sequences) > 1 for table in seq.block_tables
        )
        assert len(schedule.block_updates) <= in_flight + shared

    def check_size(self, schedule: Schedule) -> None:
        """A captured size is met exactly unless prompts, slots or blocks run out."""
        if schedule.num_tokens == schedule.size:
            return
        kv, scheduler = self.scheduler.kv, self.scheduler
        ends = {entry.seq: entry.end for entry in schedule.entries}
        could_admit = len(scheduler.running) < self.max_num_seqs and not schedule.preempted
        candidates = [*scheduler.running, *(scheduler.waiting if could_admit else ())]
        for seq in sorted(candidates, key=lambda seq: seq.urgency):
            end = ends.get(seq, seq.num_computed_tokens)
            if end == seq.num_tokens:
                continue
            if seq in scheduler.waiting and seq.num_preemptions:
                whole = self.num_groups * (-(-seq.num_tokens // self.block_size) + len(scheduler.running))
                assert kv.num_free < whole
            else:
                assert kv.num_free < self.num_groups
                assert seq in scheduler.waiting or end == len(seq.block_tables[0]) * self.block_size
            return

    def step(self) -> None:
        if (schedule := self.plan()) is None:
            return
        if self.rng.random() < 0.1:  # the step is on its way when somebody hangs up
            self.cancel()
        entries = [entry for entry in schedule.entries if entry.seq.key in self.open]
        self.run_on_device(schedule, entries)
        self.scheduler.commit(schedule)
        self.model.sources.clear()
        for entry in entries:
            key = entry.seq.key
            self.model.committed(key, entry.num_tokens)
            assert entry.samples == (entry.seq.num_computed_tokens == entry.seq.num_tokens)
            if entry.samples:
                entry.seq.token_ids.append(self.rng.randrange(1000))
                next(s for s in self.model.sequences if s.key == key).num_tokens += 1
                if entry.seq.num_tokens == self.lengths[key]:
                    self.finish(key)

    def lose_step(self) -> None:
        """A step fails, before or after the device heard of its blocks, or when it had written its tokens."""
        if (schedule := self.plan()) is None:
            return
        how_far = self.rng.randrange(3)
        if how_far == 1:
            self.device.update_tables(schedule)
        if how_far == 2:
            self.run_on_device(schedule, schedule.entries)

    def run_on_device(self, schedule: Schedule, entries: SequenceOf[ScheduledTokens]) -> None:
        self.device.update_tables(schedule)
        self.device.copy_blocks(schedule)
        self.device.forward(entries, self.num_groups)

    def check(self) -> None:
        self.scheduler.check_integrity()
        assert set(self.scheduler.unfinished) == {*self.open.values()}
        assert self.scheduler.kv.num_free == self.model.num_free()
        model = {s.key: (s.running, s.computed, s.num_tokens) for s in self.model.sequences}
        running = {seq.key for seq in self.scheduler.running}
        assert model == {s.key: (s.key in running, s.num_computed_tokens, s.num_tokens) for s in self.open.values()}
        order = [seq.key for seq in self.scheduler.waiting]
        assert order == [seq.key for seq, _ in sorted(self.model.queued, key=lambda queued: queued[0].urgency)]


@pytest.mark.parametrize("seed", range(150))
def test_random_histories(seed):
    History(seed).run(num_acts=80)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", [*range(150, 300, 50), *range(1_000, 3_000, 50)])
def test_many_random_histories(first_seed):
    for seed in range(first_seed, first_seed + 50):
        History(seed).run(num_acts=120)


def test_the_histories_reach_every_rule():
    """Guards the generator: what the rules are about does occur."""
    seen = dict.fromkeys(("preempted", "preempted decode", "cut", "full", "recomputed", "mixed", "shared", "copied"), 0)
    seen |= {"overtook": 0, "moved up": 0, "made way": 0}
    for seed in range(60):
        history = History(seed)
        plan = history.plan

        def counted(history=history, plan=plan):
            if (schedule := plan()) is not None:
                entries = schedule.entries
                seen["preempted"] += len(schedule.preempted)
                seen["preempted decode"] += sum(seq.num_tokens > seq.num_prompt_tokens for seq in schedule.preempted)
                seen["cut"] += not entries[-1].samples and schedule.num_tokens < schedule.size
                seen["full"] += schedule.num_tokens == schedule.size > 1
                seen["recomputed"] += any(e.start == 0 and e.seq.num_preemptions for e in entries)
                seen["mixed"] += entries[0].num_tokens == 1 < entries[-1].num_tokens
                seen["shared"] += any(chunk.start and chunk.seq.index for chunk in schedule.chunks)
                seen["copied"] += bool(schedule.block_copies)
                running = list(history.scheduler.running)
                seen["overtook"] += any(
                    seq.urgency < running[0].urgency and seq.key > running[0].key for seq in running
                )
                seen["moved up"] += any(seq.urgency[0] < seq.request.sampling.priority for seq in running)
                seen["made way"] += bool(schedule.preempted) and schedule.preempted[0].urgency > entries[0].seq.urgency
            return schedule

        history.plan = counted
        history.run(num_acts=80)
    assert all(count > 20 for count in seen.values()), seen
