"""Steps captured on no batch at all, replayed on every kind of batch that an engine makes: prompts cut and whole, rows
of beams, of drafts and under a grammar's mask, padded and empty ones. Each replay gives what the modules and the
sampler in torch give, and the host code would record the same tape again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fastgen
from fastgen import SamplingParams
from fastgen.runtime.engine import Engine
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.requests.sampled import SampledToken
from fastgen.runtime.sampling.sampler import Sampler
from fastgen.runtime.scheduling.drafts import SampledSequence, owner
from fastgen.runtime.scheduling.schedule import Schedule
from tests.reference import randomise, save
from tests.runtime.checkpoints import VOCAB_SIZE, save_tokenizer
from tests.runtime.soak import KINDS
from tests.runtime.test_same_answer_triton import SIZES, Watched, watch

OPTIONS: dict[str, Any] = {
    "target": "triton",
    "dtype": "float32",
    "block_size": 4,
    "max_num_seqs": 4,
    "token_budget": 12,
    "max_model_len": 44,
    "speculative": "ngram",
    "num_draft_tokens": 3,
}
FEW: list[dict[str, Any]] = [
    {"beam_width": 2, "max_new_tokens": 2},
    {"ignore_eos": True, "max_new_tokens": 6},
    {"response_format": {"type": "regex", "pattern": "[a-m]{2,9}"}, "max_new_tokens": 3, "temperature": 1.0, "seed": 2},
]


class WatchedSampler:
    """Beside what the kernels of ``sampler`` choose, chooses by torch, and compares when the tokens are asked for."""

    def __init__(self, sampler: Sampler):
        self.counts: Counter[str] = Counter()
        self._reference, self._launch = Sampler(sampler.eos_token_ids), sampler.launch

    def launch(self, logits: Tensor, rows: SequenceOf[SampledSequence]) -> Callable[[], list[SampledToken]]:
        live = [row for row, each in enumerate(rows) if owner(each).slot is not None]
        expected = self._reference.sample(logits[live].clone(), [rows[row] for row in live])
        self.counts["unused"] += len(rows) - len(live)
        for each in (rows[row] for row in live):
            self.counts["beams"] += each.request.has_beams
            self.counts["drafts"] += not isinstance(each, Sequence)
            self.counts["masks"] += each.matcher is not None
        given = self._launch(logits, rows)

        def compared() -> list[SampledToken]:
            tokens = given()
            for row, theirs in zip(live, expected, strict=True):
                assert tokens[row].token_id == theirs.token_id or rows[row].request.has_beams
                assert tokens[row].candidates == theirs.candidates
                assert tokens[row].logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
            return tokens

        return compared


def replay_nothing(engine: Engine, watched: Watched) -> None:
    """Runs an empty step at each size."""
    for size in watched._sizes:
        schedule = Schedule((), (), (), (), (), (), num_tokens=0, size=size)
        batch, rows = engine.runner.input_batch.build(schedule)
        assert (len(batch.input_ids), rows) == (size, [])
        with torch.inference_mode():
            watched.hidden(batch)


def requests(kinds: list[dict[str, Any]], rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts, samplings = [], []
    for index, kind in enumerate(kinds):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(3, 14))]
        prompts.append((own[:3] * 5)[: rng.randint(7, 14)] if index % 2 else own)  # every other one repeats itself
        seed = {"seed": index} if kind.get("temperature") else {}
        samplings.append(SamplingParams(**{"max_new_tokens": rng.randint(2, 9), **seed, **kind}))
    return prompts, samplings


@pytest.mark.parametrize("kinds", [FEW, pytest.param(4 * KINDS, marks=pytest.mark.slow)], ids=["few", "all"])
def test_whatever_is_replayed(kinds: list[dict[str, Any]], tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | {"vocab_size": VOCAB_SIZE})))
    save_tokenizer(save(randomise(model, seed=3), tmp_path))
    with fastgen.load(tmp_path, **OPTIONS) as llm:
        engine, watched = llm._engine, watch(llm)
        assert engine is not None
        sampler = WatchedSampler(engine.runner.sampler)
        engine.runner.sampler.launch = sampler.launch  # type: ignore[method-assign]
        replay_nothing(engine, watched)
        llm.generate(*requests(kinds, random.Random(10)))
        num_mixed = sum(0 < step.num_decodes < len(step.entries) for step in llm.recording().steps)
    assert min(sampler.counts[each] for each in ("beams", "drafts", "masks")) >= 2
    assert watched.num_empty_slots
    assert watched.num_padded_rows
    assert num_mixed
    if kinds is not FEW:
        assert len(watched.num_tokens) > 200
        assert min(*sampler.counts.values(), num_mixed) >= 5
