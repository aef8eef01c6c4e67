"""The page's view of an engine equals the engine's own state, recounted."""

from __future__ import annotations

import math
import random
from itertools import count

import msgspec
import pytest

from fastgen.runtime.kv_cache.block_pool import BlockPool
from fastgen.runtime.kv_cache.block_tables import held_entries
from fastgen.runtime.metrics import RecentValues
from fastgen.serving.monitoring.live import MAX_CELLS, MAX_SEQUENCES, MAX_STEPS, LiveGaps, LiveView, live_view
from tests.runtime.histories import History, random_history


@pytest.mark.parametrize("seed", range(6))
def test_a_look_is_the_state_of_the_engine(seed: int) -> None:
    history = random_history(
        random.Random(seed), failures=0.03, prefix_caching=seed % 2 == 0, beams=True, drafts=seed % 3 == 0
    )
    looks = count(1)
    history.after_step = lambda history: check(history) if next(looks) % 5 == 0 else None
    history.live(150)
    assert next(looks) > 30
    check(history)


def check(history: History) -> None:
    engine = history.engine
    scheduler, pool = engine.scheduler, engine.scheduler.kv.pool
    view = msgspec.msgpack.decode(msgspec.msgpack.encode(live_view(engine)), type=LiveView)  # as it is told

    assert (view.num_running, view.num_waiting) == (len(scheduler.running), scheduler.num_waiting)
    assert (view.max_num_seqs, view.token_budget) == (history.max_num_seqs, history.token_budget)
    assert view.num_requests == len(history.generations)

    blocks = view.blocks
    assert (blocks.num_blocks, blocks.block_size, blocks.blocks_per_cell) == (pool.capacity, history.block_size, 1)
    held = {entry.block_id for seq in scheduler.running for entry in held_entries(seq)}
    held |= {copy.source for copy in scheduler.kv._pending_copies}
    assert [bool(number) for number in blocks.held] == [block in held for block in range(1, pool.num_blocks)]
    assert [bool(number) for number in blocks.cached] == [block in pool.cached for block in range(1, pool.num_blocks)]

    steps = engine.recorder.recording("m").steps[-MAX_STEPS:]
    expected = [
        (step.step, sum(entry.num_tokens for entry in step.prompts), step.num_padding, step.end_s - step.began_s)
        for step in steps
        if step.ended_s is not None
    ]
    assert [(s.number, s.num_prompt_tokens, s.num_padding, s.seconds) for s in view.steps] == expected
    totals = [step.num_tokens for step in steps if step.ended_s is not None]
    assert [step.num_prompt_tokens + step.num_answer_tokens for step in view.steps] == totals

    running = sorted(scheduler.running, key=lambda seq: seq.key)
    shown = [*running, *scheduler.waiting][:MAX_SEQUENCES]
    assert [(seq.request, seq.index) for seq in view.sequences] == [seq.key for seq in shown]
    assert [seq.is_running for seq in view.sequences] == [seq in running for seq in shown]
    for live, seq in zip(view.sequences, shown, strict=True):
        assert live.num_prompt_tokens + live.num_new_tokens == len(seq.token_ids)
        assert live.num_computed_tokens == seq.num_computed_tokens


def test_gaps_are_those_of_the_answers() -> None:
    history = History(random.Random(3), num_blocks=60, token_budget=16, max_num_seqs=4)
    assert live_view(history.engine).gaps is None
    for _ in range(12):
        history.submit(6, max_new_tokens=9, ignore_eos=True)
    while history.engine.has_work:
        history.engine.step()
    gaps = sorted(gap for each in history.generations for gap in each.output().metrics.gaps_s)
    assert len(gaps) == 12 * 8
    ranks = [math.ceil(share * len(gaps)) - 1 for share in (0.5, 0.95, 0.99)]
    assert live_view(history.engine).gaps == LiveGaps(len(gaps), *(gaps[rank] for rank in ranks))


def test_only_the_last_values_count() -> None:
    recent = RecentValues(4)
    assert recent.quantiles(0.5) == []
    for value in (9.0, 8.0, 4.0, 3.0, 1.0, 2.0):
        recent.add(value)
    assert len(recent) == 4
    assert recent.quantiles(0.0, 0.5, 0.51, 1.0) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("blocks_per_cell", [1, 3, 64])
def test_a_map_of_blocks_counts_each_block_in_its_cell(blocks_per_cell: int) -> None:
    rng, pool = random.Random(blocks_per_cell), BlockPool(50)
    held: list[int] = []
    for _ in range(200):
        taken = pool.allocate(rng.randint(0, 4))
        for block in taken or []:
            held.append(block)
            if rng.random() < 0.5:
                pool.publish([block])
        for _ in range(min(len(held), rng.randint(0, 4))):
            pool.free([held.pop(rng.randrange(len(held)))])
        cells = [range(start, min(start + blocks_per_cell, 50)) for start in range(1, 50, blocks_per_cell)]
        assert pool.map(blocks_per_cell) == (
            [len(set(held).intersection(cell)) for cell in cells],
            [len(set(pool.cached).intersection(cell)) for cell in cells],
        )


def test_a_large_cache_is_told_in_few_cells() -> None:
    history = History(random.Random(0), num_blocks=100_001, token_budget=64, max_num_seqs=8)
    generation = history.submit(40, max_new_tokens=2, ignore_eos=True)
    history.engine.step()
    blocks = live_view(history.engine).blocks
    assert MAX_CELLS / 2 < len(blocks.held) <= MAX_CELLS
    assert (len(blocks.held) - 1) * blocks.blocks_per_cell < blocks.num_blocks <= MAX_CELLS * blocks.blocks_per_cell
    assert sum(blocks.held) == len(generation.request.sequences[0].block_tables[0]) == 10
    history.engine.cancel_all()
    assert sum(live_view(history.engine).blocks.held) == 0


def test_the_page_gets_as_much_as_it_says() -> None:
    """The last 120 steps, the first twelve sequences, and at most 1024 cells of blocks."""
    history = History(random.Random(1), num_blocks=200, token_budget=64, max_num_seqs=4)
    for _ in range(50):
        history.submit(6, max_new_tokens=40, ignore_eos=True)
    for _ in range(130):
        history.engine.step()
    view = live_view(history.engine)
    assert (len(view.steps), len(view.sequences)) == (120, 12)
    assert [seq.is_running for seq in view.sequences] == [True] * 4 + [False] * 8
    for num_blocks, blocks_per_cell in ((1024, 1), (1025, 2), (2048, 2), (2049, 3)):
        engine = History(random.Random(1), num_blocks=num_blocks + 1, token_budget=64, max_num_seqs=4).engine
        blocks = live_view(engine).blocks
        assert (blocks.num_blocks, blocks.blocks_per_cell) == (num_blocks, blocks_per_cell)
