"""A view of an engine's present state for the page, small enough to be requested every second.

The engine's process computes it between two steps, in less than a millisecond for any size of engine. It contains no
text and no token ids.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fastgen.runtime.engine import Engine
    from fastgen.runtime.flight.ring_events import StepRecord
    from fastgen.runtime.requests.request import Sequence

MAX_STEPS = 120
MAX_SEQUENCES = 12
MAX_CELLS = 1024


class LiveStep(msgspec.Struct, array_like=True):
    """The tokens that a step forwarded: of prompts, of answers (including drafts), and padding."""

    number: int
    num_prompt_tokens: int
    num_answer_tokens: int
    num_padding: int
    seconds: float


class LiveSequence(msgspec.Struct, array_like=True):
    """The progress of a sequence."""

    request: int
    index: int
    is_running: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_new_tokens: int
    max_new_tokens: int


class LiveGaps(msgspec.Struct):
    """Quantiles of the last ``count`` gaps between two tokens of a sequence."""

    count: int
    p50_s: float
    p95_s: float
    p99_s: float


class LiveBlocks(msgspec.Struct):
    """The KV cache in cells of ``blocks_per_cell`` blocks; the last cell may have fewer. For each cell: how many blocks
    are ``held`` by sequences, and how many are only kept for their contents. The others are free.
    """

    num_blocks: int
    block_size: int
    blocks_per_cell: int
    held: list[int]
    cached: list[int]


class LiveView(msgspec.Struct, kw_only=True):
    """One view of an engine. Totals count since its model was loaded; ``clock_s`` is the time of a monotonic clock."""

    clock_s: float
    # Sequences with a slot.
    num_running: int
    num_waiting: int
    max_num_seqs: int
    token_budget: int
    num_requests: int
    num_generated_tokens: int
    num_preemptions: int
    prefix_lookup_tokens: int
    prefix_hit_tokens: int
    gaps: LiveGaps | None
    # The last steps, oldest first.
    steps: list[LiveStep]
    # The first running sequences, then the first waiting ones.
    sequences: list[LiveSequence]
    blocks: LiveBlocks


def live_view(engine: Engine) -> LiveView:
    """Returns the present state of ``engine``."""
    scheduler, metrics = engine.scheduler, engine.metrics.snapshot()
    running = sorted(scheduler.running, key=lambda seq: seq.key)
    shown = running[:MAX_SEQUENCES]
    shown += islice(scheduler.waiting, MAX_SEQUENCES - len(shown))
    steps = engine.recorder.last_steps(MAX_STEPS)
    quantiles = engine.metrics.recent_gaps.quantiles(0.5, 0.95, 0.99)
    pool = scheduler.kv.pool
    blocks_per_cell = -(-pool.capacity // MAX_CELLS)
    return LiveView(
        clock_s=time.monotonic(),
        num_running=len(running),
        num_waiting=scheduler.num_waiting,
        max_num_seqs=scheduler.max_num_seqs,
        token_budget=scheduler.token_budget,
        num_requests=metrics.requests_total,
        num_generated_tokens=metrics.generation_tokens_total,
        num_preemptions=metrics.preemptions_total,
        prefix_lookup_tokens=metrics.prefix_cache_lookup_tokens_total,
        prefix_hit_tokens=metrics.prefix_cache_hit_tokens_total,
        gaps=LiveGaps(len(engine.metrics.recent_gaps), *quantiles) if quantiles else None,
        steps=[_step(step) for step in steps if step.ended_s is not None],
        sequences=[_sequence(seq) for seq in shown],
        blocks=LiveBlocks(pool.capacity, scheduler.kv.block_size, blocks_per_cell, *pool.map(blocks_per_cell)),
    )


def _step(step: StepRecord) -> LiveStep:
    assert step.ended_s is not None
    num_prompt_tokens = sum(num_tokens for _, _, num_tokens, num_drafts in step.chunks if not num_drafts)
    num_drafted = sum(num_tokens for _, _, num_tokens, num_drafts in step.chunks if num_drafts)
    return LiveStep(
        step.number,
        num_prompt_tokens,
        len(step.decodes) + num_drafted,
        step.num_padding,
        step.ended_s - step.began_s,
    )


def _sequence(seq: Sequence) -> LiveSequence:
    return LiveSequence(
        seq.request.request_id,
        seq.index,
        seq.slot is not None,
        seq.num_prompt_tokens,
        seq.num_cached_tokens,
        seq.num_computed_tokens,
        seq.num_tokens - seq.num_prompt_tokens,
        seq.request.sampling.max_new_tokens,
    )
