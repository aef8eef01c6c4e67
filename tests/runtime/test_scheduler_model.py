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
from dataclasses import dataclass, field

import pytest

from fastgen.runtime.kv_cache_manager import KVCacheManager
from fastgen.runtime.request import Request, Sequence
from fastgen.runtime.sampling_params import SamplingParams
from fastgen.runtime.scheduler import Schedule, Scheduler

Key = tuple[int, int]


@dataclass
class ModelSequence:
    key: Key
    num_prompt: int
    num_tokens: int
    computed: int = 0
    places: int = 0
    """Tokens it was ever given blocks for since it was admitted."""
    running: bool = False
    was_preempted: bool = False


@dataclass
class Model:
    """The rules of the scheduler, written out longhand over one list of sequences in order of arrival."""

    block_size: int
    num_groups: int
    capacity: int
    budget: int
    max_num_seqs: int
    sequences: list[ModelSequence] = field(default_factory=list)

    def blocks(self, num_tokens: int) -> int:
        return self.num_groups * len(range(0, num_tokens, self.block_size))

    def free(self) -> int:
        return self.capacity - sum(self.blocks(s.places) for s in self.sequences)

    def can_have(self, seq: ModelSequence, num_tokens: int) -> bool:
        return self.blocks(max(seq.places, seq.computed + num_tokens)) - self.blocks(seq.places) <= self.free()

    def sizes(self) -> list[int]:
        multiples = {64: range(64, 513, 64), 128: range(512, self.budget + 1, 128)}
        named = {1, 2, 4, 8, 16, 32, *multiples[64], *multiples[128]}
        return [n for n in range(1, self.budget + 1) if n in named or n == self.budget]

    def step(self) -> tuple[list[tuple[Key, int, int]], list[Key], int] | None:
        """``(entries, preempted, size)``, each entry ``(key, start, num_tokens)``."""
        if not self.sequences:
            return None
        entries: list[tuple[Key, int, int]] = []
        preempted: list[Key] = []

        for seq in self.sequences:
            if not seq.running or seq.computed < seq.num_prompt or seq.num_tokens != seq.computed + 1:
                continue
            while seq.running and not self.can_have(seq, 1):
                victim = [s for s in self.sequences if s.running][-1]
                victim.running, victim.computed, victim.places, victim.was_preempted = False, 0, 0, True
                preempted.append(victim.key)
            if seq.running:
                entries.append((seq.key, seq.computed, 1))
                seq.places = max(seq.places, seq.computed + 1)

        decoding, num_decodes = {key for key, _, _ in entries}, len(entries)
        prompts = [s for s in self.sequences if s.running and s.key not in decoding]
        if not preempted:
            seats = self.max_num_seqs - sum(s.running for s in self.sequences)
            prompts += [s for s in self.sequences if not s.running][:seats]
        pending = sum(s.num_tokens - s.computed for s in prompts)
        room = 0
        if pending:
            # the fewest passes, and the smallest size that can do it in so many
            passes = next(f for f in itertools.count(1) if f * (self.budget - num_decodes) >= pending)
            room = next(size for size in self.sizes() if passes * (size - num_decodes) >= pending) - num_decodes
        for seq in prompts:
            num_running = sum(s.running for s in self.sequences)
            room_wanted = self.blocks(seq.num_tokens) + self.num_groups * num_running
            if not seq.running and seq.was_preempted and num_running and room_wanted > self.free():
                break
            wanted = seq.num_tokens - seq.computed
            given = 0
            while given < wanted and room and self.can_have(seq, given + 1):
                given, room = given + 1, room - 1
            if given:
                entries.append((seq.key, seq.computed, given))
                seq.running, seq.places = True, max(seq.places, seq.computed + given)
            if given < wanted:
                break
        total = sum(num_tokens for _, _, num_tokens in entries)
        return entries, preempted, next(size for size in self.sizes() if size >= total)


class Device:
    """A KV cache whose places remember which token of which sequence was written, and block tables as the schedules
    tell them.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.tables: dict[tuple[int, int, int], int] = {}
        self.places: dict[tuple[int, int], tuple[Key, int, int]] = {}

    def update_tables(self, schedule: Schedule) -> None:
        assert len({update[:3] for update in schedule.block_updates}) == len(schedule.block_updates)
        for seat, group, index, block_id in schedule.block_updates:
            self.tables[seat, group, index] = block_id

    def forward(self, schedule: Schedule, num_groups: int) -> None:
        """Write each scheduled token's place, then read all places each sequence attends to."""
        for entry in schedule.entries:
            for group, position in itertools.product(range(num_groups), range(entry.start, entry.end)):
                self.places[self.place(entry.seq, group, position)] = self.content(entry.seq, group, position)
        for entry in schedule.entries:
            for group, position in itertools.product(range(num_groups), range(entry.end)):
                read = self.places[self.place(entry.seq, group, position)]
                assert read == self.content(entry.seq, group, position), f"{entry} reads {read} at {position}"

    def place(self, seq: Sequence, group: int, position: int) -> tuple[int, int]:
        block_id = self.tables[seq.seat, group, position // self.block_size]
        assert block_id == seq.block_tables[group][position // self.block_size]
        assert block_id != 0
        return block_id, position % self.block_size

    def content(self, seq: Sequence, group: int, position: int) -> tuple[Key, int, int]:
        return seq.key, group, position


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
        self.scheduler = Scheduler(kv, token_budget=self.budget, max_num_seqs=self.max_num_seqs)
        self.model = Model(self.block_size, self.num_groups, capacity, self.budget, self.max_num_seqs)
        self.device = Device(self.block_size)
        self.lengths: dict[Key, int] = {}
        """Of each unfinished sequence: how many tokens it will have when it stops."""
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
        # The oldest gets on in every step, so this many steps are enough whatever the cache holds.
        for _ in range(sum(self.lengths.values())):
            self.step()
            self.check()
        assert not self.open
        assert self.scheduler.schedule() is None
        assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.capacity
        assert self.first_scheduled == sorted(self.first_scheduled)

    def add(self) -> None:
        total = self.rng.randint(2 if self.rng.random() < 0.5 else self.max_total, self.max_total)
        num_prompt = self.rng.choice([1, total - 1, total // 2, self.rng.randint(1, total - 1)])
        sampling = SamplingParams(n=self.rng.choice([1, 1, 1, 3]), max_new_tokens=total - num_prompt)
        request = Request(self.num_requests, range(num_prompt), sampling, arrival_s=0.0)
        self.num_requests += self.rng.randint(1, 2)
        self.scheduler.add(request)
        for seq in request.sequences:
            self.model.sequences.append(ModelSequence(seq.key, num_prompt, num_prompt))
            self.open[seq.key] = seq
            self.lengths[seq.key] = self.rng.choice([total, self.rng.randint(num_prompt + 1, total)])

    def cancel(self) -> None:
        if self.open:
            self.finish(self.rng.choice(list(self.open)))

    def finish(self, key: Key) -> None:
        num_free, held = self.scheduler.kv.pool.num_free, sum(map(len, self.open[key].block_tables))
        self.scheduler.finish(self.open.pop(key))
        assert self.scheduler.kv.pool.num_free == num_free + held
        self.model.sequences = [s for s in self.model.sequences if s.key != key]
        del self.lengths[key]

    def plan(self) -> Schedule | None:
        """The next schedule, compared with the model's and with what every schedule must satisfy."""
        oldest = next(iter(self.open.values()), None)
        decodes = [s for s in self.open.values() if s.num_computed_tokens == s.num_tokens - 1 >= s.num_prompt_tokens]
        expected, schedule = self.model.step(), self.scheduler.schedule()
        if schedule is None:
            assert expected is None
            return None
        entries = [(entry.seq.key, entry.start, entry.num_tokens) for entry in schedule.entries]
        assert (entries, [s.key for s in schedule.preempted], schedule.size) == expected
        schedule.check(self.scheduler.kv, self.budget)

        taken = {entry.seq: entry for entry in schedule.entries}
        assert oldest in taken, "the oldest gets on"
        assert oldest not in schedule.preempted
        for seq in decodes:
            assert seq in schedule.preempted or taken[seq].num_tokens == 1, "no decode is delayed but for blocks"
        self.check_size(schedule)
        in_flight = self.num_groups * (self.budget // self.block_size + 2 * self.max_num_seqs)
        assert len(schedule.block_updates) <= in_flight, "what a step uploads is bounded, after lost steps too"
        for entry in schedule.entries:
            if entry.seq.key not in self.first_scheduled:
                self.first_scheduled.append(entry.seq.key)
        return schedule

    def check_size(self, schedule: Schedule) -> None:
        """A captured size is met exactly unless prompts, seats or blocks run out."""
        if schedule.num_tokens == schedule.size:
            return
        kv, last = self.scheduler.kv, schedule.entries[-1]
        if not last.samples:
            assert kv.pool.num_free < self.num_groups
            assert last.end == len(last.seq.block_tables[0]) * self.block_size
        elif len(self.scheduler.running) > len(schedule.entries):
            assert kv.pool.num_free < self.num_groups  # a prompt without a place for its next token
        else:
            running, waiting = self.scheduler.running, next(iter(self.scheduler.waiting), None)
            if waiting is not None and len(running) < self.max_num_seqs and not schedule.preempted:
                whole = self.num_groups * (-(-waiting.num_tokens // self.block_size) + len(running))
                assert kv.pool.num_free < (whole if waiting.num_preemptions else self.num_groups)

    def step(self) -> None:
        if (schedule := self.plan()) is None:
            return
        if self.rng.random() < 0.1:  # the step is on its way when somebody hangs up
            self.cancel()
        entries = [entry for entry in schedule.entries if entry.seq.key in self.open]
        self.device.update_tables(schedule)
        self.device.forward(Schedule(tuple(entries), (), (), schedule.size), self.num_groups)
        self.scheduler.commit(schedule)
        by_key = {s.key: s for s in self.model.sequences}
        for entry in entries:
            key = entry.seq.key
            by_key[key].computed += entry.num_tokens
            assert entry.samples == (entry.seq.num_computed_tokens == entry.seq.num_tokens)
            if entry.samples:
                entry.seq.token_ids.append(self.rng.randrange(1000))
                by_key[key].num_tokens += 1
                if entry.seq.num_tokens == self.lengths[key]:
                    self.finish(key)

    def lose_step(self) -> None:
        """A step fails, before or after the device heard of its blocks, or when it had written its tokens."""
        if (schedule := self.plan()) is None:
            return
        how_far = self.rng.randrange(3)
        if how_far >= 1:
            self.device.update_tables(schedule)
        if how_far >= 2:
            self.device.forward(schedule, self.num_groups)

    def check(self) -> None:
        self.scheduler.check_integrity()
        assert {*self.scheduler.running, *self.scheduler.waiting} == {*self.open.values()}
        model = {s.key: (s.running, s.computed, s.num_tokens) for s in self.model.sequences}
        running = {seq.key for seq in self.scheduler.running}
        assert model == {s.key: (s.key in running, s.num_computed_tokens, s.num_tokens) for s in self.open.values()}


@pytest.mark.parametrize("seed", range(300))
def test_random_histories(seed):
    History(seed).run(num_acts=80)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1_000, 3_000))
def test_many_random_histories(seed):
    History(seed).run(num_acts=120)


def test_the_histories_reach_every_rule():
    """Guards the generator: what the rules are about does occur."""
    seen = {"preempted": 0, "preempted decode": 0, "cut": 0, "full": 0, "recomputed": 0, "mixed": 0}
    for seed in range(40):
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
            return schedule

        history.plan = counted
        history.run(num_acts=80)
    assert all(count > 20 for count in seen.values()), seen
