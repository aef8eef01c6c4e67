"""Graphs are tried before there is a request: replayed once on a batch of their own, and compared with the step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fastgen
from fastgen import SamplingParams
from fastgen.compile.capture.tape import Tape
from fastgen.errors import CaptureError
from fastgen.runtime.llm import LLM
from fastgen.runtime.step.forward import CapturedForward
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.trial_batch import TrialBatch
from tests.fast import cases
from tests.reference import randomise, save
from tests.runtime.test_same_answer_triton import SIZES

# Without shared prefixes, since a trial overwrites blocks, which no request has in an engine that starts.
OPTIONS: dict[str, Any] = {
    "target": "triton",
    "block_size": 4,
    "max_num_seqs": 3,
    "dtype": "float32",
    "prefix_caching": False,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = save(randomise(LlamaForCausalLM(LlamaConfig(**SIZES)), seed=3), tmp_path_factory.mktemp("model"))
    with fastgen.load(Path(directory), token_budget=6, max_model_len=44, **OPTIONS) as loaded:
        yield loaded


def parts_of(llm: LLM) -> tuple[CapturedForward, TrialBatch]:
    assert llm._engine is not None
    runner, scheduler = llm._engine.runner, llm._engine.scheduler
    assert isinstance(runner.forward, CapturedForward)
    num_blocks = scheduler.kv.pool.capacity + 1
    sizes = {"num_blocks": num_blocks, "max_model_len": 44, "vocab_size": SIZES["vocab_size"]}
    return runner.forward, TrialBatch(runner.input_batch, **sizes)


def capture_again(llm: LLM) -> None:
    forward, trial = parts_of(llm)
    with torch.inference_mode(), forward._pool.fence.open():
        forward.capture(lambda done, total: None, trial)


def test_graphs_that_were_tried_answer_as_before(llm: LLM) -> None:
    prompt, sampling = [5, 9, 7, 11, 6], SamplingParams(max_new_tokens=7, ignore_eos=True)
    expected = llm.generate(prompt, sampling).token_ids
    capture_again(llm)
    assert llm._engine is not None
    buffers = llm._engine.runner.input_batch.buffers
    assert not buffers.packed.any()
    assert not buffers.flat_tables.any()
    assert llm.generate(prompt, sampling).token_ids == expected


@pytest.mark.parametrize("what", cases(["_hidden", "_logits"], fast=["_logits"]))
def test_a_graph_that_replays_differently_is_an_error(llm: LLM, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = parts_of(llm)
    replay = Tape.replay

    def replay_wrongly(tape: Tape) -> None:
        replay(tape)
        getattr(forward, what)[0, 0] += 1

    monkeypatch.setattr(Tape, "replay", replay_wrongly)
    name = {"_hidden": "a step of 6 tokens", "_logits": "logits of 3 rows"}[what]
    with pytest.raises(CaptureError, match=f"^{name}: a replay gives other results than the step"):
        capture_again(llm)
    monkeypatch.undo()
    capture_again(llm)


def test_its_sequences_are_chunks_and_decodes_in_blocks_of_their_own() -> None:
    inputs = InputBatch(
        token_budget=40,
        max_num_seqs=6,
        max_rows=6,
        num_groups=2,
        max_blocks=4,
        block_size=16,
        device=torch.device("cpu"),
    )
    trial = TrialBatch(inputs, num_blocks=9, max_model_len=64, vocab_size=7)
    assert trial.fill(40) == 34  # there are blocks for four sequences
    batch = inputs.views(40, 0)
    assert batch.cu_seqlens_q.tolist() == [0, 16, 17, 33, 34, 34, 34]
    assert batch.seq_lens.tolist() == [16, 1, 16, 1, 0, 0]
    assert batch.positions.tolist() == [*range(16), 0, *range(16), 0, *[0] * 6]
    assert batch.input_ids.max() < 7
    assert batch.block_tables[:, :4, 0].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    used = batch.slot_mapping[:, :34]
    assert len(used.unique()) == used.numel()
    assert used.amin() >= 16
    assert used.amax() < 9 * 16
    assert not batch.slot_mapping[:, 34:].any()
    assert trial.fill(3) == 3
    assert inputs.views(3, 0).cu_seqlens_q.tolist() == [0, 3, 3, 3, 3, 3, 3]
    trial.clear()
    assert not inputs.buffers.packed.any()


def test_its_sequences_are_no_longer_than_the_model_allows_and_no_more_than_there_are_slots() -> None:
    inputs = InputBatch(
        token_budget=40,
        max_num_seqs=3,
        max_rows=3,
        num_groups=1,
        max_blocks=1,
        block_size=16,
        device=torch.device("cpu"),
    )
    trial = TrialBatch(inputs, num_blocks=50, max_model_len=10, vocab_size=7)
    assert trial.fill(40) == 21
    batch = inputs.views(40, 0)
    assert batch.cu_seqlens_q.tolist() == [0, 10, 11, 21]
    assert batch.seq_lens.tolist() == [10, 1, 10]
    assert batch.input_ids.tolist() == [index % 7 for index in range(40)]
    assert batch.token_source.tolist() == [-1] * 40
    assert batch.block_tables[0, :, 0].tolist() == [1, 2, 3]
    assert batch.slot_mapping[0].tolist() == [*range(16, 26), 32, *range(48, 58), *[0] * 19]
