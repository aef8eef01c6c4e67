"""Staggering over steps changes no decision of the scheduler."""

from __future__ import annotations

import random

import pytest

from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.scheduling.scheduler import Scheduler

BLOCK_SIZE = 4


class Counterparts:
    """Two schedulers that live through the same history, one of which staggers from the first decode on."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.windows = rng.choice([(None,), (None, None), (6,), (6, None)])
        self.num_blocks = rng.choice([40, 90, 400])
        self.staggering, self.plain = (self.scheduler() for _ in range(2))
        self.staggering.staggering.starts_from = 1
        self.open: list[tuple[Sequence, Sequence]] = []
        self.num_requests = self.num_lookahead = self.num_deferred = 0

    def scheduler(self) -> Scheduler:
        kv = KVCacheManager(self.num_blocks, BLOCK_SIZE, self.windows, max_chunk=32)
        return Scheduler(kv, token_budget=32, max_num_seqs=16)

    def add(self) -> None:
        prompt = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 20))]
        sampling = SamplingParams(max_new_tokens=self.rng.randint(1, 40), n=self.rng.choice([1, 1, 1, 3]))
        pair = [Request(self.num_requests, prompt, sampling, 0.0) for _ in range(2)]
        self.num_requests += 1
        for scheduler, request in zip((self.staggering, self.plain), pair, strict=True):
            scheduler.add(request)
        self.open += zip(*(request.sequences for request in pair), strict=True)

    def finish(self, pair: tuple[Sequence, Sequence]) -> None:
        self.open.remove(pair)
        for scheduler, seq in zip((self.staggering, self.plain), pair, strict=True):
            scheduler.finish(seq)

    def step(self) -> None:
        is_lost = self.rng.random() < 0.1
        schedules = [scheduler.schedule() for scheduler in (self.staggering, self.plain)]
        decided, expected = map(decisions, schedules)
        assert decided == expected
        self.num_lookahead += len(self.staggering.kv.lookahead.holders)
        for scheduler, schedule in zip((self.staggering, self.plain), schedules, strict=True):
            if schedule is None:
                continue
            scheduler.check_integrity()
            if not is_lost:
                scheduler.commit(schedule)
        self.num_deferred += len(self.staggering.kv._deferred)
        if not is_lost and schedules[1] is not None:
            for entry in schedules[1].entries:
                (pair,) = (each for each in self.open if each[1] is entry.seq)
                if entry.samples:
                    for seq in pair:
                        seq.token_ids.append(seq.num_tokens % 2)
                    seq = pair[1]
                    if seq.num_tokens - seq.num_prompt_tokens == seq.request.sampling.max_new_tokens:
                        self.finish(pair)
        self.check()

    def check(self) -> None:
        self.staggering.check_integrity()
        assert self.staggering.kv.num_free >= self.plain.kv.num_free - len(self.windows) * len(
            self.staggering.kv._deferred
        )
        if not self.staggering.kv._deferred:
            assert self.staggering.kv.num_free == self.plain.kv.num_free


def decisions(schedule: Schedule | None) -> object:
    if schedule is None:
        return None
    entries = [(entry.seq.key, entry.start, entry.num_tokens, entry.samples) for entry in schedule.entries]
    return entries, [seq.key for seq in schedule.preempted], schedule.size


def test_every_decision_is_what_it_would_be_without() -> None:
    num_lookahead = num_deferred = num_preemptions = 0
    for seed in range(12):
        both = Counterparts(seed)
        for _ in range(80):
            if both.rng.random() < 0.15:
                both.add()
            if both.open and both.rng.random() < 0.03:
                both.finish(both.rng.choice(both.open))
            num_preemptions += sum(first.num_preemptions for first, _ in both.open)
            both.step()
        while both.open:
            both.step()
        for scheduler in (both.staggering, both.plain):
            assert scheduler.kv.pool.num_free == scheduler.kv.pool.capacity
        num_lookahead += both.num_lookahead
        num_deferred += both.num_deferred
    assert min(num_lookahead, num_deferred, num_preemptions) >= 5


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_an_answer_is_found_when_it_has_ended(windows: tuple[int | None, ...]) -> None:
    kv = KVCacheManager(100, BLOCK_SIZE, windows, max_chunk=32, prefix_caching=True)
    scheduler = Scheduler(kv, token_budget=32, max_num_seqs=16)
    scheduler.staggering.starts_from = 1
    prompt = [1, 2, 3, 4, 5]

    def answer(request_id: int, prompt: list[int]) -> Sequence:
        """Returns an answer of 14 tokens, the last of which is never computed."""
        request = Request(request_id, prompt, SamplingParams(max_new_tokens=14), 0.0)
        scheduler.add(request)
        (seq,) = request.sequences
        for number in range(14):
            while seq.num_pending_tokens:
                schedule = scheduler.schedule()
                assert schedule is not None
                scheduler.commit(schedule)
                scheduler.check_integrity()
            seq.token_ids.append(10 + number)
        scheduler.finish(seq)
        scheduler.check_integrity()
        return seq

    first = answer(0, prompt)
    assert first.num_cached_tokens == 0
    again = answer(1, [*first.token_ids, 7])
    assert again.num_cached_tokens == 16  # of 18 computed


def test_many_decodes_that_fill_blocks_together_are_served_in_turn() -> None:
    """With as many decodes as there are, in no step more than a few are given blocks, and all have theirs in time."""
    num_decodes = 128
    kv = KVCacheManager(100 * num_decodes, 16, max_chunk=8192, prefix_caching=True)
    scheduler = Scheduler(kv, token_budget=8192, max_num_seqs=num_decodes)
    for number in range(num_decodes):
        scheduler.add(Request(number, [number] * 20, SamplingParams(max_new_tokens=200), 0.0))
    num_updates = []
    for _ in range(150):
        schedule = scheduler.schedule()
        assert schedule is not None
        num_updates.append(len(schedule.block_updates))
        scheduler.commit(schedule)
        for entry in schedule.entries:
            entry.seq.token_ids.append(entry.seq.num_tokens % 7)
        scheduler.check_integrity()
    assert max(num_updates[20:]) <= 1 + num_decodes // 15
    assert sum(num_updates[20:]) >= 7 * num_decodes  # of 130 tokens each
