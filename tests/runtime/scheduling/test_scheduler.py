"""The scheduler's rules, one worked example each. Random histories are in test_scheduler_model.py."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.scheduling.scheduler import Scheduler


def make(
    num_blocks: int = 101, block_size: int = 4, *, token_budget: int = 16, max_num_seqs: int = 4, num_groups: int = 1
) -> Scheduler:
    kv = KVCacheManager(num_blocks, block_size, (None,) * num_groups)
    return Scheduler(kv, token_budget=token_budget, max_num_seqs=max_num_seqs)


def add(scheduler: Scheduler, request_id: int, num_prompt: int, max_new: int = 8, n: int = 1) -> Sequence:
    """Queue a request; returns its first sequence."""
    sampling = SamplingParams(n=n, max_new_tokens=max_new)
    request = Request(request_id, range(100, 100 + num_prompt), sampling, arrival_s=0.0)
    scheduler.add(request)
    scheduler.check_integrity()
    return request.sequences[0]


def planned(scheduler: Scheduler) -> Schedule:
    schedule = scheduler.schedule()
    assert schedule is not None
    scheduler.check_integrity()
    return schedule


def ran(scheduler: Scheduler, schedule: Schedule) -> None:
    scheduler.commit(schedule)
    for entry in schedule.entries:
        if entry.samples:
            entry.seq.token_ids.append(7)
    scheduler.check_integrity()


def step(scheduler: Scheduler) -> Schedule:
    schedule = planned(scheduler)
    ran(scheduler, schedule)
    return schedule


def taken(schedule: Schedule) -> list[tuple[int, int, int]]:
    """``(request_id, start, num_tokens)`` of each entry."""
    return [(entry.seq.request.request_id, entry.start, entry.num_tokens) for entry in schedule.entries]


def state(scheduler: Scheduler) -> object:
    """All that a call which changes nothing leaves as it is."""
    return (
        [(s.key, s.slot, s.num_computed_tokens, [list(t) for t in s.block_tables]) for s in scheduler.running],
        [s.key for s in scheduler.waiting],
        scheduler.kv.pool.num_free,
    )


# What a step takes


def test_nothing_to_do():
    scheduler = make()
    assert scheduler.schedule() is None
    seq = add(scheduler, 0, 5)
    scheduler.finish(seq)
    assert scheduler.schedule() is None


def test_a_long_prompt_is_split_evenly():
    """60 tokens within 48 take 2 passes; 30 and 30 would do, and 32 is the size for that, not 48 and 12."""
    scheduler = make(token_budget=48)
    add(scheduler, 0, 60)
    first, second, third = step(scheduler), step(scheduler), step(scheduler)
    assert [(taken(s), s.size) for s in (first, second, third)] == [
        ([(0, 0, 32)], 32),
        ([(0, 32, 28)], 32),
        ([(0, 60, 1)], 1),
    ]
    assert [s.entries[0].samples for s in (first, second, third)] == [False, True, True]


def test_short_prompts_are_fused_and_the_last_is_cut_to_fit():
    """d = 2, R = 5 + 4 + 20 = 29 within 14 places takes 3 passes of 10, and 12 runs at 16: 14 go in."""
    scheduler = make(max_num_seqs=8)
    add(scheduler, 0, 1)
    add(scheduler, 1, 1)
    assert taken(step(scheduler)) == [(0, 0, 1), (1, 0, 1)]
    add(scheduler, 2, 5)
    add(scheduler, 3, 4)
    add(scheduler, 4, 20)
    schedule = step(scheduler)
    assert taken(schedule) == [(0, 1, 1), (1, 1, 1), (2, 0, 5), (3, 0, 4), (4, 0, 5)]
    assert [entry.samples for entry in schedule.entries] == [True, True, True, True, False]
    assert schedule.size == 16
    schedule = step(scheduler)  # d = 4, R = 15, 12 places: 2 passes of 8; 12 runs at 16
    assert taken(schedule) == [(0, 2, 1), (1, 2, 1), (2, 5, 1), (3, 4, 1), (4, 5, 12)]
    schedule = step(scheduler)
    assert taken(schedule) == [(0, 3, 1), (1, 3, 1), (2, 6, 1), (3, 5, 1), (4, 17, 3)]
    assert schedule.size == 8


def test_only_prompts_that_could_have_a_slot_count_as_pending():
    """One slot is free: the second prompt's 12 tokens take 2 passes; with the third's they would take 3, of 8 each."""
    scheduler = make(max_num_seqs=2, token_budget=10)  # sizes 1 2 4 8 10
    add(scheduler, 0, 1)
    step(scheduler)
    add(scheduler, 1, 12)
    add(scheduler, 2, 12)
    schedule = step(scheduler)  # d = 1, 9 places: R = 12 is 6 a pass, and 7 runs at 8; R = 24 would run at 10
    assert taken(schedule) == [(0, 1, 1), (1, 0, 7)]


def test_no_waiting_request_is_overtaken():
    scheduler = make(token_budget=8, max_num_seqs=3)
    add(scheduler, 0, 30)
    add(scheduler, 1, 1)
    order = [request_id for _ in range(5) for request_id, _, _ in taken(step(scheduler))]
    assert order == [0, 0, 0, 0, 1, 0, 1]


def test_a_prompt_of_one_token_is_no_decode_before_it_has_a_slot():
    scheduler = make(token_budget=2, max_num_seqs=2)
    for request_id in range(3):
        add(scheduler, request_id, 1)
    assert taken(step(scheduler)) == [(0, 0, 1), (1, 0, 1)]
    assert taken(step(scheduler)) == [(0, 1, 1), (1, 1, 1)]


def test_the_last_token_of_a_prompt_preempts_no_sequence_not_even_itself():
    """Its 9th token finds no block while the decode still has room: it waits with its 8 computed."""
    scheduler = make(num_blocks=4, token_budget=8, max_num_seqs=2)  # 3 blocks of 4
    add(scheduler, 0, 1, max_new=4)
    step(scheduler)
    partial = add(scheduler, 1, 9, max_new=1)
    assert taken(step(scheduler)) == [(0, 1, 1), (1, 0, 7)]
    assert taken(step(scheduler)) == [(0, 2, 1), (1, 7, 1)]
    schedule = step(scheduler)
    assert taken(schedule) == [(0, 3, 1)]
    assert schedule.preempted == ()
    assert (partial.num_computed_tokens, partial.status) == (8, SequenceStatus.RUNNING)
    scheduler.finish(scheduler.running.decodes[0])
    assert taken(step(scheduler)) == [(1, 8, 1)]


def test_a_prompt_is_computed_for_the_first_sequence_and_shared_by_the_others():
    scheduler = make(max_num_seqs=3, token_budget=16)
    first, second, third, fourth = add(scheduler, 0, 6, n=4).request.sequences
    add(scheduler, 1, 2)
    schedule = step(scheduler)  # the second request need not wait for them
    assert taken(schedule) == [(0, 0, 6), (1, 0, 2)]
    schedule = step(scheduler)  # but then they are next: the last token of the prompt gives them their own first one
    assert [entry.seq for entry in schedule.entries][2:] == [second]
    assert taken(schedule) == [(0, 6, 1), (1, 2, 1), (0, 5, 1)]
    assert [(copy.table_index, copy.destination) for copy in schedule.block_copies] == [(1, second.block_tables[0][1])]
    assert second.block_tables[0][0] == first.block_tables[0][0]
    scheduler.finish(second)
    schedule = step(scheduler)
    assert schedule.chunks[0].seq is third
    assert scheduler.kv.pool.capacity - scheduler.kv.pool.num_free == 2 + 1 + 1
    scheduler.finish(first)
    schedule = step(scheduler)  # any other will do
    assert [(chunk.seq, chunk.start, chunk.num_tokens) for chunk in schedule.chunks] == [(fourth, 5, 1)]
    assert fourth.block_tables[0][0] == third.block_tables[0][0]


def test_without_a_sequence_to_share_with_the_prompt_is_computed_again():
    scheduler = make(max_num_seqs=1, token_budget=16)
    first, second = add(scheduler, 0, 6, n=2).request.sequences
    step(scheduler)
    scheduler.finish(first)
    assert [(chunk.seq, chunk.start, chunk.num_tokens) for chunk in step(scheduler).chunks] == [(second, 0, 6)]


def test_the_others_need_not_wait_for_a_sequence_that_is_gone():
    scheduler = make()
    first, second, third = add(scheduler, 0, 30, n=3).request.sequences
    step(scheduler)
    scheduler.finish(third)
    scheduler.finish(first)
    scheduler.check_integrity()
    assert [chunk.seq for chunk in step(scheduler).chunks] == [second]
    assert scheduler.unfinished == [second]


# Blocks


def test_a_chunk_is_cut_to_the_free_blocks_and_preempts_nothing():
    scheduler = make(num_blocks=5, token_budget=16, max_num_seqs=3)  # 4 blocks of 4
    add(scheduler, 0, 5, max_new=4)
    add(scheduler, 1, 9, max_new=4)
    add(scheduler, 2, 1, max_new=1)
    schedule = step(scheduler)
    assert taken(schedule) == [(0, 0, 5), (1, 0, 8)]  # and the third does not slip past it
    assert schedule.preempted == ()
    assert schedule.size == 16


def test_a_decode_preempts_the_youngest():
    scheduler = make(num_blocks=5, token_budget=16, max_num_seqs=3)  # 4 blocks of 4
    old = add(scheduler, 0, 4, max_new=5)
    middle = add(scheduler, 1, 3, max_new=5)
    young = add(scheduler, 2, 5, max_new=5)
    late = add(scheduler, 3, 1, max_new=1)
    assert taken(step(scheduler)) == [(0, 0, 4), (1, 0, 3), (2, 0, 5)]
    schedule = step(scheduler)
    assert schedule.preempted == (young,)
    assert taken(schedule) == [(0, 4, 1), (1, 3, 1)]  # 2 blocks are free and so are slots, but no request is admitted
    assert list(scheduler.waiting) == [young, late]
    assert (young.num_computed_tokens, young.num_tokens, young.slot, young.block_tables) == (0, 6, None, [])
    assert [s.num_preemptions for s in (old, middle, young, late)] == [0, 0, 1, 0]
    schedule = step(scheduler)  # middle needs its second block before anybody is admitted
    assert taken(schedule) == [(0, 5, 1), (1, 4, 1)]
    scheduler.finish(old)  # which leaves the 2 blocks young needs, but not the one more that middle may want
    assert taken(step(scheduler)) == [(1, 5, 1)]
    scheduler.finish(middle)
    schedule = step(scheduler)  # the token generated before is computed again with the prompt
    assert taken(schedule) == [(2, 0, 6), (3, 0, 1)]
    assert [entry.samples for entry in schedule.entries] == [True, True]


def test_the_youngest_decode_preempts_itself():
    scheduler = make(num_blocks=4, token_budget=8, max_num_seqs=2)  # 3 blocks of 4
    add(scheduler, 0, 5, max_new=6)
    young = add(scheduler, 1, 3, max_new=8)
    assert taken(step(scheduler)) == [(0, 0, 5), (1, 0, 3)]
    assert taken(step(scheduler)) == [(0, 5, 1), (1, 3, 1)]
    schedule = step(scheduler)
    assert (taken(schedule), schedule.preempted) == ([(0, 6, 1)], (young,))


def test_no_block_is_given_to_a_decode_that_is_preempted_in_the_same_step(monkeypatch):
    """Blocks go to the most urgent first, whatever the order in which sequences became decodes."""
    scheduler = make(num_blocks=8)  # 7 blocks of 4
    seqs = [add(scheduler, request_id, 6) for request_id in range(3)]
    assert step(scheduler).preempted == ()  # two blocks each
    scheduler.running.decodes.reverse()
    while seqs[0].num_computed_tokens < 8:
        assert step(scheduler).preempted == ()
    given, allocate = [], scheduler.kv.allocate

    def watched(seq, num_tokens):
        given.append(seq)
        return allocate(seq, num_tokens)

    monkeypatch.setattr(scheduler.kv, "allocate", watched)
    schedule = planned(scheduler)
    assert schedule.preempted == (seqs[2],)
    assert given == [seqs[0], seqs[1], seqs[1]], "the second finds a block once the third has lost its own"
    assert {entry.seq for entry in schedule.entries} == {seqs[0], seqs[1]}


def test_a_decode_preempts_a_partly_computed_prompt():
    scheduler = make(num_blocks=6, token_budget=8, max_num_seqs=3)  # 5 blocks of 4
    add(scheduler, 0, 4, max_new=5)
    step(scheduler)
    prompt = add(scheduler, 1, 17, max_new=1)
    assert taken(step(scheduler)) == [(0, 4, 1), (1, 0, 7)]  # blocks: 2 and 2
    assert taken(step(scheduler)) == [(0, 5, 1), (1, 7, 5)]  # cut by the last one
    assert taken(step(scheduler)) == [(0, 6, 1)]
    assert taken(step(scheduler)) == [(0, 7, 1)]
    schedule = step(scheduler)
    assert (taken(schedule), schedule.preempted) == ([(0, 8, 1)], (prompt,))


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize(
    ("block_size", "num_prompt", "max_new"), [(4, 7, 6), (4, 8, 1), (1, 3, 4), (16, 1, 48), (3, 9, 1)]
)
def test_the_largest_request_completes_and_one_token_more_is_refused(block_size, num_prompt, max_new, num_groups):
    blocks = num_groups * -(-(num_prompt + max_new - 1) // block_size)
    slack = blocks // num_groups * block_size - (num_prompt + max_new - 1)
    scheduler = make(blocks + 1, block_size, token_budget=8, num_groups=num_groups)
    for more_prompt, more_new in [(slack + 1, 0), (0, slack + 1)]:
        with pytest.raises(RequestTooLargeError):
            add(scheduler, 0, num_prompt + more_prompt, max_new + more_new)
        assert scheduler.schedule() is None
    seq = add(scheduler, 0, num_prompt, max_new + slack)
    while seq.num_tokens < num_prompt + max_new + slack:
        assert step(scheduler).preempted == ()
    assert scheduler.kv.pool.num_free == 0
    scheduler.finish(seq)
    assert scheduler.kv.pool.num_free == blocks


# The end of a sequence


def test_finishing_frees_at_once_in_every_state():
    scheduler = make(num_blocks=9, token_budget=8, max_num_seqs=3)
    decode = add(scheduler, 0, 4)
    step(scheduler)
    prompt = add(scheduler, 1, 20)
    waiting = add(scheduler, 2, 2)
    step(scheduler)
    assert [s.status.name for s in (decode, prompt, waiting)] == ["RUNNING", "RUNNING", "WAITING"]
    for seq, num_free in [(waiting, 4), (prompt, 6), (decode, 8)]:
        scheduler.finish(seq)
        scheduler.check_integrity()
        assert (seq.status, seq.slot, seq.block_tables) == (SequenceStatus.FINISHED, None, [])
        assert scheduler.kv.pool.num_free == num_free
        before = state(scheduler)
        scheduler.finish(seq)  # once more is no mistake: a stop and a cancellation may meet
        assert state(scheduler) == before
    assert scheduler.schedule() is None


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_an_answer_is_found_when_it_has_ended(windows: tuple[int | None, ...]) -> None:
    kv = KVCacheManager(100, 4, windows, max_chunk=32, prefix_caching=True)
    scheduler = Scheduler(kv, token_budget=32, max_num_seqs=16)
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


def test_a_sequence_cancelled_during_its_step_is_ignored():
    scheduler = make()
    kept, cancelled = add(scheduler, 0, 4), add(scheduler, 1, 4)
    schedule = planned(scheduler)
    scheduler.finish(cancelled)
    scheduler.check_integrity()
    scheduler.commit(schedule)
    assert (kept.num_computed_tokens, cancelled.num_computed_tokens) == (4, 0)
    kept.token_ids.append(7)
    assert taken(step(scheduler)) == [(0, 4, 1)]


# Classes


def add_urgent(scheduler: Scheduler, request_id: int, num_prompt: int, priority: int, **fields: Any) -> Sequence:
    sampling = SamplingParams(priority=priority, **{"max_new_tokens": 8} | fields)
    request = Request(request_id, range(100, 100 + num_prompt), sampling, arrival_s=float(request_id))
    scheduler.add(request)
    return request.sequences[0]


def test_an_urgent_prompt_goes_before_those_that_run_and_wait() -> None:
    scheduler = make(token_budget=8, max_num_seqs=3)
    add(scheduler, 0, 30)
    add(scheduler, 1, 30)
    assert taken(step(scheduler)) == [(0, 0, 8)]
    add_urgent(scheduler, 2, 10, priority=-1)
    assert taken(step(scheduler)) == [(2, 0, 8)]
    assert taken(step(scheduler)) == [(2, 8, 2), (0, 8, 6)]
    assert taken(step(scheduler)) == [(2, 10, 1), (0, 14, 7)]


def test_the_lowest_class_is_preempted_first_and_in_it_the_youngest() -> None:
    scheduler = make(num_blocks=9, token_budget=16, max_num_seqs=4)  # 8 blocks of 4
    low, younger_low = (add_urgent(scheduler, number, 4, priority=5) for number in (0, 1))
    urgent, younger_urgent = (add_urgent(scheduler, number, 4, priority=1) for number in (2, 3))
    assert len(step(scheduler).entries) == 4
    assert step(scheduler).preempted == ()  # their second blocks, which are the last
    for _ in range(3):
        assert step(scheduler).preempted == ()
    assert step(scheduler).preempted == (younger_low, low)
    assert [seq.status.name for seq in (urgent, younger_urgent)] == ["RUNNING"] * 2


def test_an_urgent_prompt_takes_the_blocks_of_a_less_urgent_one_that_it_overtook() -> None:
    scheduler = make(num_blocks=5, token_budget=16, max_num_seqs=2)  # 4 blocks of 4
    low = add_urgent(scheduler, 0, 12, priority=1, max_new_tokens=1)
    planned(scheduler)  # a step that fails, so that it holds 3 blocks and has computed nothing
    urgent = add_urgent(scheduler, 1, 9, priority=0, max_new_tokens=1)
    assert taken(step(scheduler)) == [(1, 0, 4)]
    schedule = step(scheduler)
    assert (taken(schedule), schedule.preempted) == ([(1, 4, 5)], (low,))
    scheduler.finish(urgent)
    assert taken(step(scheduler)) == [(0, 0, 12)]


def test_a_long_wait_leads_to_admission_before_urgent_ones_that_came_later() -> None:
    kv = KVCacheManager(101, 4)
    scheduler = Scheduler(kv, token_budget=8, max_num_seqs=1, aging_s=5.0)
    low = add_urgent(scheduler, 0, 2, priority=9, max_new_tokens=1)
    order = []
    for number in range(1, 12):
        add_urgent(scheduler, number, 2, priority=0, max_new_tokens=1)
        schedule = scheduler.schedule(now_s=float(number))
        assert schedule is not None
        ran(scheduler, schedule)
        order.append(schedule.entries[0].seq)
        scheduler.finish(schedule.entries[0].seq)
    assert order.index(low) == 5


# Drafts


def draft_scheduler(propose: Callable[[Sequence, int], SequenceOf[int]], **options: Any) -> Scheduler:
    kv = KVCacheManager(options.pop("num_blocks", 101), 4)
    return Scheduler(kv, **{"token_budget": 16, "max_num_seqs": 4} | options, propose_drafts=propose)


def test_drafts_take_the_places_that_are_left_in_the_budget() -> None:
    asked = []

    def propose(seq: Sequence, most: int) -> list[int]:
        asked.append((seq.key[0], most))
        return [] if seq.key[0] == 1 else [1, 2, 3][:most]

    scheduler = draft_scheduler(propose, token_budget=8, max_num_seqs=3)
    seqs = [add(scheduler, number, 2) for number in range(3)]
    step(scheduler)
    schedule = planned(scheduler)
    assert asked == [(0, 5), (1, 2), (2, 2)]
    assert schedule.decodes == (seqs[1],)
    assert [(chunk.seq, chunk.num_tokens, chunk.drafts, chunk.num_rows) for chunk in schedule.chunks] == [
        (seqs[0], 4, (1, 2, 3), 4),
        (seqs[2], 3, (1, 2), 3),
    ]
    assert (schedule.num_tokens, schedule.size) == (8, 8)
    scheduler.commit(schedule)
    for seq, num_right in ((seqs[0], 3), (seqs[1], 0), (seqs[2], 1)):
        seq.token_ids += [*(1, 2, 3)[:num_right], 7]
        if seq is not seqs[1]:
            scheduler.accept(seq, num_right)
    scheduler.check_integrity()
    assert [seq.num_computed_tokens for seq in seqs] == [6, 3, 4]
    asked.clear()
    assert [seq.num_pending_tokens for seq in seqs] == [1, 1, 1]
    assert planned(scheduler).num_tokens == 8


@pytest.mark.parametrize("seed", range(30))
def test_drafts_of_any_length_are_computed_and_accepted_over_a_small_cache(seed: int) -> None:
    rng = random.Random(seed)

    def propose(seq: Sequence, most: int) -> list[int]:
        room = seq.num_prompt_tokens + seq.request.sampling.max_new_tokens - seq.num_tokens - 1
        return [9] * min(rng.randint(0, 4), most, room)

    scheduler = draft_scheduler(propose, num_blocks=rng.randint(7, 20))
    for number in range(8):
        scheduler.add(Request(number, range(rng.randint(1, 10)), SamplingParams(max_new_tokens=12), 0.0))
    num_steps = num_drafts = 0
    while (schedule := scheduler.schedule()) is not None:
        scheduler.check_integrity()
        num_steps += 1
        if rng.random() < 0.1:  # a step that fails
            continue
        scheduler.commit(schedule)
        for entry in schedule.entries:
            if entry.samples:
                num_right = rng.randint(0, len(entry.drafts))
                entry.seq.token_ids += [9] * num_right + [7]
                if entry.drafts:
                    scheduler.accept(entry.seq, num_right)
                num_drafts += num_right
                assert entry.seq.num_tokens <= entry.seq.num_prompt_tokens + 12
                if entry.seq.num_tokens == entry.seq.num_prompt_tokens + 12:
                    scheduler.finish(entry.seq)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.capacity
    assert num_drafts > 10


# Steps that fail


def test_a_step_that_was_not_committed_is_planned_again():
    scheduler = make(num_groups=2)
    add(scheduler, 0, 6)
    step(scheduler)
    add(scheduler, 1, 9)
    first = planned(scheduler)
    num_free = scheduler.kv.pool.num_free
    again = planned(scheduler)
    assert again == first
    assert scheduler.kv.pool.num_free == num_free
    assert len(again.block_updates) == 6  # the blocks of the first schedule are named again: the device may lack them
    ran(scheduler, again)
    assert step(scheduler).block_updates == ()


def test_a_slot_given_away_does_not_keep_the_updates_of_a_failed_step():
    scheduler = make(max_num_seqs=1)
    failed = add(scheduler, 0, 8)
    assert {update.table_index for update in planned(scheduler).block_updates} == {0, 1}
    scheduler.finish(failed)
    other = add(scheduler, 1, 3)
    assert planned(scheduler).block_updates == ((other.slot, 0, 0, other.block_tables[0][0]),)


def test_prompts_admitted_by_a_failed_step_do_not_block_each_other():
    """Both hold blocks and neither has computed anything: the older goes on with its own, and the younger waits."""
    scheduler = make(num_blocks=5, token_budget=16, max_num_seqs=2)  # 4 blocks of 4
    first = add(scheduler, 0, 7, max_new=4)
    add(scheduler, 1, 12, max_new=4)
    assert taken(planned(scheduler)) == [(0, 0, 7), (1, 0, 8)]
    scheduler.check_integrity()
    assert taken(step(scheduler)) == [(0, 0, 7), (1, 0, 8)]
    assert taken(planned(scheduler)) == [(0, 7, 1)]
    scheduler.finish(first)
    assert taken(step(scheduler)) == [(1, 8, 4)]


def test_decodes_get_their_next_blocks_once_though_the_step_is_made_again():
    scheduler = make(token_budget=16)
    seqs = [add(scheduler, request_id, 4) for request_id in range(3)]  # each fills a block of 4
    step(scheduler)
    failed = planned(scheduler)
    tables = [list(seq.block_tables[0]) for seq in seqs]
    assert [len(table) for table in tables] == [2, 2, 2]
    assert [update[2:] for update in failed.block_updates] == [(1, table[1]) for table in tables]
    assert planned(scheduler).block_updates == failed.block_updates
    assert [seq.block_tables[0] for seq in seqs] == tables
    scheduler.check_integrity()


@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_an_admission_that_fails_changes_nothing(monkeypatch, failing_call):
    scheduler = make(token_budget=16)
    for request_id in range(3):
        add(scheduler, request_id, 5)
    allocate, calls = scheduler.kv.allocate, []

    def failing(seq, num_new_tokens):
        calls.append(seq)
        if len(calls) == failing_call:
            raise MemoryError
        return allocate(seq, num_new_tokens)

    monkeypatch.setattr(scheduler.kv, "allocate", failing)
    with pytest.raises(MemoryError):
        scheduler.schedule()
    scheduler.check_integrity()
    assert len(scheduler.running) == failing_call - 1
    monkeypatch.undo()
    schedule = step(scheduler)
    assert taken(schedule) == [(0, 0, 5), (1, 0, 5), (2, 0, 5)]
    assert len(schedule.block_updates) == 6


def test_only_the_latest_schedule_is_committed_and_once():
    scheduler = make()
    add(scheduler, 0, 4)
    stale = planned(scheduler)
    latest = planned(scheduler)
    with pytest.raises(AssertionError, match="the schedule made last"):
        scheduler.commit(stale)
    scheduler.commit(latest)
    with pytest.raises(AssertionError, match="only once"):
        scheduler.commit(latest)


def test_a_sequence_that_got_no_token_is_noticed():
    scheduler = make()
    add(scheduler, 0, 4)
    scheduler.commit(planned(scheduler))
    with pytest.raises(AssertionError, match="neither given a token nor finished"):
        scheduler.schedule()


def test_a_sequence_that_outgrows_what_it_asked_for_is_noticed():
    scheduler = make(num_blocks=3, block_size=2)
    seq = add(scheduler, 0, 3, max_new=2)
    step(scheduler)
    step(scheduler)
    assert seq.num_tokens == 5  # 2 new ones, and the cache is full
    with pytest.raises(AssertionError, match="is alone in the cache"):
        scheduler.schedule()


# What is refused


@pytest.mark.parametrize(("token_budget", "max_num_seqs"), [(7, 8), (0, 1), (1, 2)])
def test_a_budget_below_the_slots_is_refused(token_budget, max_num_seqs):
    with pytest.raises(InvalidArgumentError, match=f"token_budget {token_budget} is below max_num_seqs {max_num_seqs}"):
        make(token_budget=token_budget, max_num_seqs=max_num_seqs)


def test_no_slots_are_refused():
    with pytest.raises(InvalidArgumentError, match="max_num_seqs is 0"):
        make(max_num_seqs=0)


def test_a_refused_request_changes_nothing():
    scheduler = make(num_blocks=4)
    add(scheduler, 5, 4)
    before = state(scheduler)
    with pytest.raises(RequestTooLargeError, match=r"ceil\(\(9 \+ 5 - 1\) / 4\) = 4 blocks, the KV cache has 3"):
        add(scheduler, 6, 9, max_new=5)
    for request_id in (5, 4):
        with pytest.raises(InvalidArgumentError, match="ids must ascend"):
            add(scheduler, request_id, 2)
    assert state(scheduler) == before
    add(scheduler, 6, 9, max_new=4)


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidArgumentError, match="request 3: the prompt has no tokens"):
        add(make(), 3, 0)


# What the assertions see


def test_check_sees_a_broken_schedule():
    scheduler = make(max_num_seqs=2)
    add(scheduler, 0, 5)
    add(scheduler, 1, 6)
    good = planned(scheduler)
    first, second = good.chunks

    def broken(*chunks, size=good.size):
        return good._replace(chunks=chunks, size=size, num_tokens=sum(chunk.num_tokens for chunk in chunks))

    for schedule, complaint in [
        (broken(first, second, size=8), "11 tokens at size 8"),
        (broken(first, second, size=10), "11 tokens at size 10"),
        (broken(first, second, size=32), "at size 32"),
        (broken(size=16), "0 tokens"),
        (broken(second, first), "stands behind"),
        (broken(first, first), "slots"),
        (good._replace(num_tokens=12), "11 tokens are said to be 12"),
        (broken(dataclasses.replace(first, num_tokens=0), second), "not what is pending"),
        (broken(dataclasses.replace(first, num_tokens=6)), "not what is pending"),
        (broken(dataclasses.replace(first, start=1, num_tokens=4)), "not what is pending"),
        (broken(dataclasses.replace(first, num_tokens=4)), "samples before"),
        (broken(dataclasses.replace(first, samples=False)), "samples before"),
    ]:
        with pytest.raises(AssertionError, match=complaint):
            schedule.check(scheduler.kv, scheduler.token_budget)
    good.check(scheduler.kv, scheduler.token_budget)
    table = second.seq.block_tables[0]
    block_id = table.pop()
    with pytest.raises(AssertionError, match="has only the blocks"):
        good.check(scheduler.kv, scheduler.token_budget)
    table.append(block_id)
    second.seq.slot, slot = None, second.seq.slot
    with pytest.raises(AssertionError, match="no slot"):
        good.check(scheduler.kv, scheduler.token_budget)
    second.seq.slot = slot
    second.seq.block_tables.clear()
    with pytest.raises(AssertionError, match="0 block tables"):
        good.check(scheduler.kv, scheduler.token_budget)


def test_integrity_sees_what_is_out_of_place():
    def fresh() -> tuple[Scheduler, Sequence, Sequence]:
        scheduler = make(max_num_seqs=2)
        older, younger = add(scheduler, 0, 4), add(scheduler, 1, 4)
        add(scheduler, 2, 4)
        planned(scheduler)
        return scheduler, older, younger

    scheduler, older, younger = fresh()
    older.slot = younger.slot
    with pytest.raises(AssertionError, match="slots"):
        scheduler.check_integrity()
    scheduler, *_ = fresh()
    scheduler.running.prompts.reverse()
    with pytest.raises(AssertionError, match="out of order"):
        scheduler.check_integrity()
    scheduler, older, _ = fresh()
    older.block_tables[0].pop()
    with pytest.raises(AssertionError, match="leaked"):
        scheduler.check_integrity()
    scheduler, older, _ = fresh()
    older.status = SequenceStatus.WAITING
    with pytest.raises(AssertionError, match="running"):
        scheduler.check_integrity()
    for field, value in [
        ("status", SequenceStatus.RUNNING),
        ("slot", 0),
        ("block_tables", [[1]]),
        ("num_computed_tokens", 1),
    ]:
        scheduler, *_ = fresh()
        setattr(next(iter(scheduler.waiting)), field, value)
        with pytest.raises(AssertionError, match="wait"):
            scheduler.check_integrity()


# What a step costs


def test_a_step_looks_at_no_more_waiting_requests_than_there_are_slots(monkeypatch):
    looks = []

    def counted(self):
        looks.append(self.key)
        return self.num_tokens - self.num_computed_tokens

    monkeypatch.setattr(Sequence, "num_pending_tokens", property(counted))
    costs = []
    for num_requests in (20, 2_000):
        scheduler = make(num_blocks=10, token_budget=16, max_num_seqs=4)
        for request_id in range(num_requests):
            scheduler.add(Request(request_id, [1] * 6, SamplingParams(n=1, max_new_tokens=8), 0.0))
        for _ in range(6):
            looks.clear()
            ran(scheduler, schedule := planned(scheduler))
            costs.append((taken(schedule), len(looks)))
            assert len(set(looks)) <= 4
    assert costs[:6] == costs[6:]


def test_integrity_sees_a_schedule_that_does_not_add_up() -> None:
    scheduler = make()
    add(scheduler, 0, 5)
    schedule = planned(scheduler)
    scheduler._scheduled = schedule._replace(num_tokens=4)
    with pytest.raises(AssertionError, match="5 tokens are said to be 4"):
        scheduler.check_integrity()
    scheduler._scheduled = schedule
    ran(scheduler, schedule)


# Room for others


@pytest.mark.parametrize(
    ("num_prompt", "token_budget", "num_needed"),
    [
        (8, 16, 1),  # a decode at position 8, which begins a block of 4
        (7, 16, 0),
        (20, 16, 3),  # 4 tokens of a prompt are left: a block, and two for others
        (20, 3, 3),
        (60, 16, 6),  # 44 are left
        (60, 17, 7),
    ],
)
@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_step_ahead_needs_blocks_for_each_decode_and_for_the_first_prompt(
    num_prompt: int, token_budget: int, num_needed: int, num_groups: int
) -> None:
    scheduler = make(num_groups=num_groups)
    assert not scheduler.forks.nobody_is_preempted(16), "nothing runs"
    add(scheduler, 0, num_prompt)
    step(scheduler)
    pool = scheduler.kv.pool
    pool.allocate(pool.num_free - num_groups * num_needed)
    assert scheduler.forks.nobody_is_preempted(token_budget)
    if num_needed:
        pool.allocate(1)
        assert not scheduler.forks.nobody_is_preempted(token_budget)


def test_a_preempted_sequence_returns_where_each_running_one_has_a_block_left() -> None:
    """Its 9 tokens take 3 blocks; two sequences run."""
    scheduler = make()
    add(scheduler, 0, 5)
    add(scheduler, 1, 5)
    step(scheduler)
    seq = Request(2, range(9), SamplingParams(), 0.0).sequences[0]
    pool = scheduler.kv.pool
    pool.allocate(pool.num_free - 5)
    seq.num_preemptions = 1
    assert scheduler.forks.has_room(seq)
    pool.allocate(1)
    assert not scheduler.forks.has_room(seq)
    seq.num_preemptions = 0
    assert scheduler.forks.has_room(seq), "a new one needs room for its first chunk only"
    seq.num_preemptions = 1
    for running in list(scheduler.running):
        scheduler.finish(running)
    pool.allocate(pool.num_free)
    assert scheduler.forks.has_room(seq), "nothing else runs"


@pytest.mark.parametrize(
    ("windows", "beam_width", "expected"),
    [
        ((None,), 1, 5),  # 18 tokens in blocks of 4
        ((None,), 3, 2 + 3 * (3 + 1)),  # two full blocks of the prompt are shared
        ((None, None), 3, 4 + 3 * (6 + 2)),
        ((None, 100), 3, 3 * (10 + 2)),  # a window may have left them behind
        ((100, None), 3, 3 * (10 + 2)),
    ],
)
def test_beams_share_the_prompt_where_no_window_leaves_it_behind(
    windows: tuple[int | None, ...], beam_width: int, expected: int
) -> None:
    kv = KVCacheManager(101, 4, windows)
    forks = Scheduler(kv, token_budget=16, max_num_seqs=4).forks
    assert forks.blocks_needed(10, 18, beam_width) == expected
