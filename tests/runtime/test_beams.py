"""Beam search on models: transformers' hypotheses and scores, and on ``cpp`` the same bits in any company."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel, SequenceBiasLogitsProcessor

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.runtime.beam_search import BeamSearch, Candidate, num_candidates
from fastgen.runtime.engine import Engine
from fastgen.runtime.generation import Generation
from fastgen.runtime.llm import LLM
from tests.reference import TOLERANCE
from tests.runtime.checkpoints import VOCAB_SIZE, save_checkpoint, save_tokenizer

EOS = 2
LONGEST = 14  # new tokens
MARGIN = 1e-3
"""Where two continuations of the reference are closer, either may be the better one."""


@pytest.fixture(scope="module", params=["llama", "mistral", "opt"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    save_tokenizer(directory)
    return directory


@cache
def reference(directory: Path) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    model.generation_config.pad_token_id = 1
    return model


@torch.no_grad()
def likeliest(directory: Path, prompt: list[int], count: int) -> list[int]:
    ids: list[int] = reference(directory)(torch.tensor([prompt])).logits[0, -1].topk(count).indices.tolist()
    return ids


def drawn_request(directory: Path, rng: random.Random) -> tuple[list[int], SamplingParams]:
    """What ends a beam is likely to be met, and each other field is given in some of the requests."""
    prompt = rng.choices(range(3, VOCAB_SIZE), k=rng.randint(1, 30))
    width = rng.randint(2, 6)
    fields: dict[str, Any] = {
        "beam_width": width,
        "n": rng.randint(1, width),
        "max_new_tokens": rng.randint(1, LONGEST),
        "length_penalty": rng.choice([1.0, 1.0, 0.0, -1.0, 0.6, 2.0]),
        "early_stopping": rng.choice([False, True, "never"]),
        "stop_token_ids": rng.sample(likeliest(directory, prompt, 12), rng.choice([0, 1, 3, 6])),
    }
    sometimes = {
        "ignore_eos": True,
        "min_new_tokens": rng.randint(1, fields["max_new_tokens"]),
        "repetition_penalty": rng.choice([0.8, 1.3]),
        "logit_bias": {rng.randrange(VOCAB_SIZE): rng.uniform(-4, 4) for _ in range(4)},
    }
    return prompt, SamplingParams(**fields, **{name: it for name, it in sometimes.items() if rng.random() < 0.3})


@torch.no_grad()
def theirs(directory: Path, prompt: list[int], sampling: SamplingParams) -> list[tuple[list[int], float]]:
    processors = LogitsProcessorList()  # behind those of the arguments, as the bias comes behind the penalty here
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[key], bias] for key, bias in sampling.logit_bias.items()]))
    model = reference(directory)
    stop_ids = sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))})
    model.generation_config.eos_token_id = None
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        num_beams=sampling.beam_width,
        num_return_sequences=sampling.n,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        repetition_penalty=sampling.repetition_penalty,
        logits_processor=processors,
        eos_token_id=stop_ids or None,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    rows = [row[len(prompt) :] for row in found.sequences.tolist()]
    ends = [next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row)) for row in rows]
    return [(row[:end], score) for row, end, score in zip(rows, ends, found.sequences_scores.tolist(), strict=True)]


def told(output: GenerationOutput) -> list[object]:
    return [
        (each.text, each.token_ids, each.finish_reason, each.score, each.logprobs, each.prompt_logprobs)
        for each in output.completions
    ]


def engine_of(llm: LLM) -> Engine:
    assert llm._engine is not None
    return llm._engine


def run(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[Generation]:
    engine = engine_of(llm)
    generations = [engine.submit(*request) for request in requests]
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.capacity
    return generations


@pytest.mark.parametrize("target", ["torch", "cpp"])
def test_hypotheses_and_scores_are_those_of_transformers(directory: Path, target: str) -> None:
    """All requests at once, so that beams of one stand among those of others."""
    rng = random.Random(3)
    requests = [drawn_request(directory, rng) for _ in range(10)]
    with fastgen.load(directory, target=target, block_size=4, max_num_seqs=32) as llm:
        outputs = [generation.output() for generation in run(llm, requests)]
    num_told = 0
    for (prompt, sampling), output in zip(requests, outputs, strict=True):
        expected = theirs(directory, prompt, sampling)
        given = [(each.token_ids, each.score) for each in output.completions]
        if closest(directory, prompt, sampling) < MARGIN and [ids for ids, _ in given] != [ids for ids, _ in expected]:
            continue
        num_told += 1
        for completion, (token_ids, score) in zip(output.completions, expected, strict=True):
            assert completion.token_ids == token_ids, sampling
            weight = len(token_ids) ** sampling.length_penalty
            assert completion.score == pytest.approx(score, abs=TOLERANCE * len(token_ids) / weight), sampling
            ends = token_ids[-1] in {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
            assert completion.finish_reason == ("stop" if ends else "length")
    assert num_told >= 8


@torch.no_grad()
def closest(directory: Path, prompt: list[int], sampling: SamplingParams) -> float:
    """The least difference between two scores that the search compares, by the reference's own log-probabilities; it is
    enough to look at the plain ones, penalties and bias move but few tokens.
    """
    stop_ids = frozenset({*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))})
    count = num_candidates(sampling.beam_width, stop_ids)
    search = BeamSearch(
        sampling.beam_width,
        max_new_tokens=sampling.max_new_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        stop_ids=stop_ids,
    )
    least = float("inf")
    while not search.done:
        paths = [prompt + [token.token_id for token in beam.tokens()] for beam in search.live]
        values, ids = reference(directory)(torch.tensor(paths)).logits[:, -1].log_softmax(-1).topk(count + 1)
        bases = torch.tensor([beam.score for beam in search.live])
        scores = (values + bases[:, None]).flatten().sort(descending=True).values[: count + 1]
        least = min(least, float((scores[:-1] - scores[1:]).min()))
        search.advance(
            [list(map(Candidate, *row)) for row in zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)]
        )
    return least
