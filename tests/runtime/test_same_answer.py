"""A request gets the same tokens beside any others, at any chunking, budget, order of arrival and preemptions.

Compared by the margin rule: up to the first token that was won by less than 1e-3 (in logits; for drawn tokens in logits
over temperature plus noise), since another order of summation may decide such a one otherwise.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.compile.ops.sampling.reference import gumbel_noise
from fastgen.runtime.kv_cache.block_pool import PADDING_BLOCK
from fastgen.runtime.llm import LLM
from fastgen.runtime.scheduling.policies import DynamicBatching, Policy
from fastgen.runtime.step.step import Step
from tests.fast import cases
from tests.runtime.checkpoints import VOCAB_SIZE, families, save_checkpoint, small_cache
from tests.runtime.held import assert_nothing_held

MARGIN = 1e-3
NUM_REQUESTS = 41
PROMPTS = [
    [random.Random(index).randrange(VOCAB_SIZE) for _ in range(random.Random(-index).randint(1, 60))]
    for index in range(NUM_REQUESTS)
]
SAMPLINGS = [
    SamplingParams(
        max_new_tokens=random.Random(index + 100).randint(1, 40),
        temperature=[0.0, 0.7, 1.3][index % 3],
        seed=index,
        ignore_eos=True,
    )
    for index in range(NUM_REQUESTS)
]
SMALL_CACHE = 7 * 16  # tokens: the largest request takes 100, so that they keep preempting each other


@pytest.fixture(scope="module", params=families("mistral", "opt"))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[GenerationOutput]:
    """Each request by itself, with whole distributions to judge margins by."""
    with fastgen.load(directory) as llm:
        return [
            llm.generate(prompt, replace(sampling, logprobs=VOCAB_SIZE))
            for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
        ]


def num_certain_tokens(output: GenerationOutput, sampling: SamplingParams) -> int:
    """Returns how many tokens of ``output`` come before the first one that another order of summation may change."""
    assert output.logprobs is not None
    scores = torch.tensor([[row[token_id] for token_id in range(len(row))] for row in output.logprobs])
    if sampling.temperature:
        assert sampling.seed is not None
        num_steps, vocab_size = scores.shape
        positions = len(output.prompt_token_ids) + torch.arange(num_steps)
        draws = torch.full((num_steps,), sampling.seed), positions, torch.zeros(num_steps, dtype=torch.int64)
        scores = scores / sampling.temperature + gumbel_noise(*draws, vocab_size)
    best, second = scores.topk(2).values.unbind(-1)
    close = (best - second < MARGIN).nonzero()
    return int(close[0]) if len(close) else len(output.token_ids)


def assert_same(alone: list[GenerationOutput], outputs: list[GenerationOutput]) -> None:
    certain = [num_certain_tokens(one, sampling) for one, sampling in zip(alone, SAMPLINGS, strict=True)]
    assert sum(certain) > 0.9 * sum(len(one.token_ids) for one in alone), "margins are too small to prove anything"
    for index, (one, other, count) in enumerate(zip(alone, outputs, certain, strict=True)):
        assert other.token_ids[:count] == one.token_ids[:count], f"request {index}"
        assert len(other.token_ids) == len(one.token_ids)
        assert other.finish_reason == one.finish_reason


@pytest.mark.parametrize(
    ("token_budget", "block_size"),
    cases(itertools.product([8, 9, 64, 512], [1, 16]), fast=[(8, 1), (9, 16)]),
)
def test_at_every_budget_and_block_size(
    directory: Path, alone: list[GenerationOutput], token_budget: int, block_size: int
) -> None:
    with fastgen.load(directory, token_budget=token_budget, block_size=block_size) as llm:
        outputs = llm.generate(PROMPTS, SAMPLINGS)
        assert_nothing_held(llm._engine)
    assert_same(alone, outputs)


def test_in_every_order_of_arrival(directory: Path, alone: list[GenerationOutput]) -> None:
    order = list(range(NUM_REQUESTS))
    with fastgen.load(directory, token_budget=32, max_num_seqs=7) as llm:
        for seed in range(3):
            random.Random(seed).shuffle(order)
            outputs = llm.generate([PROMPTS[index] for index in order], [SAMPLINGS[index] for index in order])
            by_index = dict(zip(order, outputs, strict=True))
            assert_same(alone, [by_index[index] for index in range(NUM_REQUESTS)])
        assert_nothing_held(llm._engine)


@pytest.mark.parametrize("token_budget", [8, 48])
def test_with_preemptions(directory: Path, alone: list[GenerationOutput], token_budget: int) -> None:
    options = {"token_budget": token_budget, "max_num_seqs": 8}
    with fastgen.load(directory, kv_cache_memory=small_cache(directory, SMALL_CACHE, **options), **options) as llm:
        outputs = llm.generate(PROMPTS, SAMPLINGS)
        assert_nothing_held(llm._engine)
    assert sum(output.metrics.preemptions for output in outputs) >= 5  # with a window a few blocks go a long way
    assert_same(alone, outputs)


@pytest.mark.parametrize("policy", ["prefill_first", "orca", DynamicBatching(5, 0.001), "static", "bounded"])
def test_under_every_policy(directory: Path, alone: list[GenerationOutput], policy: str | Policy) -> None:
    """In several classes, and on a cache so small that they preempt each other."""
    options: dict[str, Any] = {"itl_target_ms": 2} if policy == "bounded" else {"policy": policy}
    samplings = [replace(sampling, priority=index % 3) for index, sampling in enumerate(SAMPLINGS)]
    with fastgen.load(
        directory, token_budget=48, max_num_seqs=8, kv_cache_memory="200KiB", aging_s=0.05, **options
    ) as llm:
        outputs = llm.generate(PROMPTS, samplings)
        assert_nothing_held(llm._engine)
    assert_same(alone, outputs)


def test_while_others_come_and_go(directory: Path, alone: list[GenerationOutput]) -> None:
    """Requests are submitted a few at a time between steps, and half of as many others are cancelled under way."""
    rng = random.Random(5)
    with fastgen.load(directory, token_budget=24, max_num_seqs=6) as llm:
        engine = llm._engine
        assert engine is not None
        mine, others = [], []
        while engine.has_work or len(mine) < NUM_REQUESTS:
            for _ in range(rng.randint(0, 3)):
                if len(mine) < NUM_REQUESTS:
                    mine.append(engine.submit(PROMPTS[len(mine)], SAMPLINGS[len(mine)]))
            if rng.random() < 0.3 and len(mine) < NUM_REQUESTS:
                others.append(engine.submit(rng.choice(PROMPTS), SamplingParams(max_new_tokens=30, n=2)))
            if others and rng.random() < 0.2:
                engine.cancel(others.pop(rng.randrange(len(others))))
            engine.step()
            engine.check_integrity()
        assert_nothing_held(llm._engine)
        assert_same(alone, [generation.output() for generation in mine])


def test_nothing_stale_is_read(directory: Path, alone: list[GenerationOutput]) -> None:
    """Before each step everything that no running sequence owns, and that is not cached, is filled with what would be
    noticed.
    """
    with fastgen.load(directory, token_budget=24, max_num_seqs=6, kv_cache_memory="200KiB") as llm:
        engine = llm._engine
        assert engine is not None
        launch = engine.runner.launch

        def poisoned_launch(step: Step) -> None:
            poison(llm)
            launch(step)

        engine.runner.launch = poisoned_launch  # type: ignore[method-assign]
        outputs = llm.generate(PROMPTS, SAMPLINGS)
    assert_same(alone, outputs)


def poison(llm: LLM) -> None:
    engine = llm._engine
    assert engine is not None
    inputs, scheduler = engine.runner.input_batch, engine.scheduler
    if inputs.sampled_ids.is_cuda:
        torch.cuda.synchronize()  # what is launched reads all of this
    steady = engine.runner.steady
    is_next = (
        steady is not None and scheduler._scheduled.decodes == steady._decodes
    )  # the last batch becomes the next one
    num_started = 0
    if steady is not None and steady.early is not None and steady.early.started is not None:
        steady.wait()
        num_started = int(is_next)  # any other step that was started is dropped
    if not is_next:
        inputs.buffers.packed.fill_(0x7F)
    for buffer in inputs.buffers.staging:
        buffer.fill_(0x7F)
    assert scheduler._scheduled is not None
    kept = {*scheduler.kv.pool.published, *(copy.source for copy in scheduler._scheduled.block_copies)}
    computed = dict.fromkeys(kept, llm.config.block_size)
    for sequence in scheduler.running:
        for table, position in product(sequence.block_tables, range(sequence.num_computed_tokens + num_started)):
            if (block := table[position // llm.config.block_size]) != PADDING_BLOCK:
                computed[block] = max(computed.get(block, 0), position % llm.config.block_size + 1)
    for k, v in engine.runner.kv_cache.storage:
        for block in range(llm.config.num_blocks):
            k[block, computed.get(block, 0) :] = torch.nan
            v[block, computed.get(block, 0) :] = torch.nan
    due = {(update.group, update.slot, update.table_index) for update in scheduler._scheduled.block_updates}
    for sequence in scheduler.running:
        for group, table in enumerate(sequence.block_tables):
            inputs.block_tables[group, sequence.slot, len(table) :] = 2**30
            for index in range(len(table)):
                if (group, sequence.slot, index) in due:
                    inputs.block_tables[group, sequence.slot, index] = 2**30
                elif table[index] == PADDING_BLOCK:  # left behind by a window: whatever stands there is not followed
                    inputs.block_tables[group, sequence.slot, index] = PADDING_BLOCK
    for slot in range(llm.config.max_num_seqs):
        if all(sequence.slot != slot for sequence in scheduler.running):
            inputs.block_tables[:, slot] = 2**30
            inputs.sampled_ids[slot] = 2**30
    assert inputs.buffers.flat_tables.numel() == inputs.block_tables.numel() + 1
