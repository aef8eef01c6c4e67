"""A recording as time series and a map of block holders, which :mod:`.timeline_picture` draws."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastgen.runtime.flight.recording import Recording, Step
from fastgen.runtime.flight.replay import num_replayed, replay
from fastgen.runtime.scheduling.scheduler import Scheduler

# Cells of the block map. A cell of ``3 + i`` is held by the ``i``-th of :attr:`BlockMap.requests`, counted from 1.
FREE, CACHED, SHARED, OTHERS = 0, 1, 2, 3


@dataclass(frozen=True)
class StepSeries:
    """One value per step. Times are seconds since the first step began; sizes are numbers of tokens or of sequences."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    decodes: NDArray[np.int64]
    # Prompt tokens, and tokens computed again after a preemption.
    prompts: NDArray[np.int64]
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]
    preemptions: NDArray[np.int64]


@dataclass(frozen=True)
class Series(StepSeries):
    """The series of a recording, with its free blocks."""

    blocks_free: NDArray[np.int64]


@dataclass(frozen=True)
class BlockMap:
    """The holder of each block over time.

    ``cells[block - 1, column]`` is the holder of a block in one of equal time intervals, from ``start_s`` (counted as
    in :class:`Series`) to the end of the last step. ``start_s`` is the first step, or the first snapshot if the
    recorder no longer had the first step.

    ``requests`` are those that held the most blocks for the longest time, the largest first.
    """

    start_s: float
    cells: NDArray[np.uint8]
    requests: tuple[int, ...]


def series(recording: Recording) -> Series:
    """Returns one value for each step of the recording."""
    steps = recording.steps
    origin_s = steps[0].began_s if steps else 0.0

    def of(values: list[int]) -> NDArray[np.int64]:
        return np.array(values, dtype=np.int64)

    return Series(
        start_s=np.array([step.began_s - origin_s for step in steps], dtype=np.float64),
        end_s=np.array([step.end_s - origin_s for step in steps], dtype=np.float64),
        decodes=of([step.num_tokens - _num_prompt_tokens(step) for step in steps]),
        prompts=of([_num_prompt_tokens(step) for step in steps]),
        running=of([step.running for step in steps]),
        waiting=of([step.waiting for step in steps]),
        preemptions=of([len(step.preempted) for step in steps]),
        blocks_free=of([step.blocks_free for step in steps]),
    )


def block_map(recording: Recording, *, num_columns: int = 1000, num_requests: int = 7) -> BlockMap:
    """Returns the holders of the blocks over time. It runs the scheduler again, up to the first step that would now
    differ.

    :raises InvalidArgumentError: if the recording neither begins with the engine's first step nor has a snapshot.
    """
    steps = recording.steps[len(recording.steps) - num_replayed(recording) :]
    num_columns = max(1, min(num_columns, len(steps)))
    wanted = _columns(steps, num_columns)
    holders = np.zeros((recording.header.engine.num_blocks, num_columns), dtype=np.int64)
    for recorded, _, scheduler in replay(recording):
        for column in wanted.get(recorded.step, ()):
            _note_holders(holders[:, column], scheduler)
    held = Counter(holders[holders > _FIRST].tolist())
    longest = [code for code, _ in held.most_common(num_requests)]
    cells = np.where(holders > _FIRST, OTHERS, holders).astype(np.uint8)
    for place, code in enumerate(longest, start=1):
        cells[holders == code] = OTHERS + place
    start_s = steps[0].began_s - recording.steps[0].began_s if steps else 0.0
    return BlockMap(start_s, cells[1:], tuple(code - _FIRST - 1 for code in longest))


# ``holders`` has ``_FIRST + 1 + r`` for request ``r``.
_FIRST = OTHERS


def _num_prompt_tokens(step: Step) -> int:
    return sum(entry.num_tokens for entry in step.prompts)


def _columns(steps: tuple[Step, ...], num_columns: int) -> dict[int, list[int]]:
    """Returns for each step the columns that show the holders after it: those whose middle lies in the step, or between
    it and the next one.
    """
    if not steps:
        return {}
    ends_s = np.array([step.end_s for step in steps])
    middles_s = steps[0].began_s + (np.arange(num_columns) + 0.5) / num_columns * (ends_s[-1] - steps[0].began_s)
    shown = np.minimum(np.searchsorted(ends_s, middles_s), len(steps) - 1)
    columns: dict[int, list[int]] = {}
    for column, index in enumerate(shown.tolist()):
        columns.setdefault(steps[index].step, []).append(column)
    return columns


def _note_holders(column: NDArray[np.int64], scheduler: Scheduler) -> None:
    column[scheduler.kv.pool.cached] = CACHED
    for seq in scheduler.running:
        code = _FIRST + 1 + seq.request.request_id
        for table in seq.block_tables:
            blocks = np.array(table, dtype=np.int64)
            before = column[blocks]
            column[blocks] = np.where((before == FREE) | (before == code), code, SHARED)
    column[0] = FREE
