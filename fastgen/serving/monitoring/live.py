"""What an engine does at this moment, small enough to be asked for every second: what the page shows.

The engine's process computes it between two steps, in less than a millisecond however large the engine is. There is no
text in it, and no token id.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fastgen.runtime.engine import Engine
    from fastgen.runtime.flight.recorder import StepRecord
    from fastgen.runtime.requests.request import Sequence

MAX_STEPS = 120
MAX_SEQUENCES = 12
MAX_CELLS = 1024


class LiveStep(msgspec.Struct, array_like=True):
    """The tokens that a step forwarded: of prompts, of answers (drafts among them), and to fill it up."""

    number: int
    num_prompt_tokens: int
    num_answer_tokens: int
    num_padding: int
    seconds: float


class LiveSequence(msgspec.Struct, array_like=True):
    """How far a sequence has come."""

    request: int
    index: int
    is_running: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_new_tokens: int
    max_new_tokens: int


class LiveGaps(msgspec.Struct):
    """Quantiles of the last ``count`` gaps between one token of a sequence and the next."""

    count: int
    p50_s: float
    p95_s: float
    p99_s: float


class LiveBlocks(msgspec.Struct):
    """The KV cache in cells of ``blocks_per_cell`` blocks, the last perhaps of fewer: of each cell, how many blocks are
    ``held`` by sequences, and how many by none but kept for what they contain. The others are free.
    """

    num_blocks: int
    block_size: int
    blocks_per_cell: int
    held: list[int]
    cached: list[int]


class LiveView(msgspec.Struct, kw_only=True):
    """One look at an engine. Totals count since its model was loaded; ``clock_s`` is a
    monotonic clock's."""

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
    # The last ones, oldest first.
    steps: list[LiveStep]
    # The first of those that run, then of those that wait.
    sequences: list[LiveSequence]
    blocks: LiveBlocks


def live_view(engine: Engine) -> LiveView:
    """What ``engine`` does now."""
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
