"""Schedules of the beams of a search, one worked example each; test_beam_histories.py has random histories."""

from __future__ import annotations

from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.test_scheduler import taken


def make(*, num_blocks: int = 101, max_num_seqs: int = 4, prefix_caching: bool = False) -> Scheduler:
    kv = KVCacheManager(num_blocks, 4, prefix_caching=prefix_caching)
    return Scheduler(kv, token_budget=16, max_num_seqs=max_num_seqs)


def add(
    scheduler: Scheduler, request_id: int, num_prompt: int, max_new: int = 8, beam_width: int = 1
) -> list[Sequence]:
    sampling = SamplingParams(max_new_tokens=max_new, beam_width=beam_width)
    request = Request(request_id, range(100, 100 + num_prompt), sampling, arrival_s=0.0)
    scheduler.add(request)
    return request.sequences


def step(scheduler: Scheduler, *given: Sequence) -> Schedule:
    """One step, in which ``given``, or all that are sampled for, get a token."""
    schedule = scheduler.schedule()
    assert schedule is not None
    scheduler.check_integrity()
    scheduler.commit(schedule)
    for seq in given or [entry.seq for entry in schedule.entries if entry.samples]:
        seq.token_ids.append(7)
    scheduler.check_integrity()
    return schedule


def test_beams_have_slots_for_all_or_none() -> None:
    scheduler = make()
    add(scheduler, 0, 3)
    add(scheduler, 1, 3)
    assert taken(step(scheduler)) == [(0, 0, 3), (1, 0, 3)]
    first, second, third = add(scheduler, 2, 5, beam_width=3)
    add(scheduler, 3, 2)
    assert taken(step(scheduler)) == [(0, 3, 1), (1, 3, 1)]  # two slots are free, and no request overtakes
    assert not scheduler.are_slots_wanted
    scheduler.finish(scheduler.running.decodes[0])
    assert taken(step(scheduler)) == [(1, 4, 1), (2, 0, 5)]
    assert scheduler.running.num_free_slots == 0
    assert scheduler.are_slots_wanted, "the last request waits for one"
    scheduler.forks.fork(first, second)
    scheduler.forks.fork(first, third)
    scheduler.check_integrity()
    assert {seq.slot for seq in scheduler.running} == set(range(4))


def test_a_fork_has_its_parents_tokens_and_blocks_and_copies_what_it_writes_into() -> None:
    scheduler = make()
    first, second, third = add(scheduler, 0, 6, beam_width=3)
    step(scheduler)
    for beam in (second, third):
        scheduler.forks.fork(first, beam)
        beam.token_ids[-1] += beam.index
    assert second.block_tables == third.block_tables == first.block_tables
    schedule = step(scheduler)
    assert taken(schedule) == [(0, 6, 1)] * 3
    full, partial = first.block_tables[0]
    assert [copy.source for copy in schedule.block_copies] == [partial] * 2  # the parent keeps its own
    assert {second.block_tables[0][0], third.block_tables[0][0]} == {full}
    # The third's beam ends and the second is continued twice: only what changes in the third's table is told.
    scheduler.forks.fork(second, third)
    schedule = step(scheduler)
    copied = third.block_tables[0][1]
    assert [(update.slot, update.table_index, update.block_id) for update in schedule.block_updates] == [
        (third.slot, 1, copied)
    ]
    assert third.token_ids[:-1] == second.token_ids[:-1]


def test_a_beam_that_is_forked_leaves_its_blocks_in_the_cache_under_its_own_tokens() -> None:
    scheduler = make(prefix_caching=True)
    first, second = add(scheduler, 0, 2, beam_width=2)
    step(scheduler)
    scheduler.forks.fork(first, second)
    second.token_ids[-1] = 8
    for _ in range(3):
        step(scheduler)
    before = {tuple(beam.token_ids[:4]): beam.block_tables[0][0] for beam in (first, second)}
    assert len(before) == len(set(before.values())) == 2
    scheduler.forks.fork(second, first)
    cache = scheduler.kv.prefix_cache
    assert cache is not None
    assert {token_ids: cache.find(token_ids, 1).block_ids for token_ids in before} == {
        token_ids: (block_id,) for token_ids, block_id in before.items()
    }
    scheduler.check_integrity()


def test_a_beam_that_waits_for_its_search_takes_no_part_in_a_step() -> None:
    scheduler = make()
    first, second = add(scheduler, 0, 3, beam_width=2)
    step(scheduler)
    scheduler.forks.fork(first, second)
    step(scheduler, first)
    assert [entry.seq for entry in step(scheduler).entries] == [first]
    assert second.num_pending_tokens == 0
    scheduler.check_integrity()


def test_beams_are_preempted_together_and_share_the_prompt_again() -> None:
    scheduler = make(num_blocks=12)  # 11 blocks of 4
    (long,) = add(scheduler, 0, 4, max_new=30)
    first, second = add(scheduler, 1, 8, beam_width=2)
    step(scheduler)
    scheduler.forks.fork(first, second)
    schedule = step(scheduler, long, first, second)
    while not schedule.preempted:  # it needs its eighth block; the beams wait, on two they share and one of each alone
        schedule = step(scheduler, long)
    assert schedule.preempted == (first, second)
    assert long.num_computed_tokens == 4 * 7 + 1
    assert scheduler.kv.pool.num_free == 3
    scheduler.finish(long)
    assert [entry.seq for entry in step(scheduler, first).entries] == [first]
    assert second.block_tables == [first.block_tables[0][:2]]
    assert [(entry.seq, entry.start, entry.end) for entry in step(scheduler, first, second).entries] == [
        (first, 10, 11),
        (second, 8, 10),
    ]
    assert first.num_preemptions == second.num_preemptions == 1


def test_a_prompt_of_beams_that_were_preempted_is_computed_once_there_is_room_for_all_of_them() -> None:
    scheduler = make(num_blocks=12)
    (long,) = add(scheduler, 0, 4, max_new=30)
    beams = add(scheduler, 1, 8, beam_width=2)
    step(scheduler)
    scheduler.forks.fork(*beams)
    step(scheduler, long, *beams)
    while not step(scheduler, long).preempted:
        pass
    # Of 10 tokens each 3 blocks: 2 are shared, 1 is of each alone and 1 for its copies, and 1 is for who runs: 7 of 3.
    for _ in range(3):
        assert [entry.seq for entry in step(scheduler, long).entries] == [long]


def test_a_suspended_beam_has_nothing_and_may_be_forked_again() -> None:
    scheduler = make()
    first, second = add(scheduler, 0, 3, beam_width=2)
    step(scheduler)
    scheduler.forks.fork(first, second)
    scheduler.forks.suspend(second)
    scheduler.check_integrity()
    assert (second.num_tokens, second.block_tables, second.slot) == (3, [], None)
    assert scheduler.running.num_free_slots == 2
    scheduler.forks.fork(first, second)
    scheduler.check_integrity()
    assert taken(step(scheduler)) == [(0, 3, 1)] * 2
