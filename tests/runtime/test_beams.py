"""Beam search on models: transformers' hypotheses and scores, and on ``cpp`` the same bits whatever else runs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.runtime.engine import Engine
from fastgen.runtime.llm import LLM
from fastgen.runtime.requests.sampled import Candidate
from fastgen.runtime.sampling.beam_search import BeamSearch, num_candidates
from tests.reference import TOLERANCE
from tests.runtime.checkpoints import VOCAB_SIZE, families, save_checkpoint, save_tokenizer

EOS = 2
LONGEST = 14  # new tokens
# Where two continuations of the reference are closer, either may be the better one.
MARGIN = 1e-3


@pytest.fixture(scope="module", params=families("mistral"))
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
    """Draws requests in which beams are likely to end, and each other field is given in some of them."""
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


def stop_ids(sampling: SamplingParams) -> frozenset[int]:
    return frozenset({*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))})


def biased(sampling: SamplingParams) -> LogitsProcessorList:
    """Comes behind the penalty, as it does here; transformers' own argument comes before it."""
    biases: Any = [[[key], bias] for key, bias in sampling.logit_bias.items()]
    return LogitsProcessorList([SequenceBiasLogitsProcessor(biases)] if biases else [])


@torch.no_grad()
def theirs(directory: Path, prompt: list[int], sampling: SamplingParams) -> list[tuple[list[int], float]]:
    model = reference(directory)
    model.generation_config.eos_token_id = None
    ends = stop_ids(sampling)
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
        logits_processor=biased(sampling),
        eos_token_id=sorted(ends) or None,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    rows = [row[len(prompt) :] for row in found.sequences.tolist()]
    lengths = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in rows]
    cut = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return list(zip(cut, found.sequences_scores.tolist(), strict=True))


@torch.no_grad()
def closest(directory: Path, prompt: list[int], sampling: SamplingParams) -> float:
    """The least difference between two continuations that the search ranks, by the reference's log-probabilities."""
    count = num_candidates(sampling.beam_width, stop_ids(sampling))
    search = BeamSearch(
        sampling.beam_width,
        max_new_tokens=sampling.max_new_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        stop_ids=stop_ids(sampling),
    )
    processors = [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty), *biased(sampling)]
    if sampling.min_new_tokens and search.stop_ids:
        ends = sorted(search.stop_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_new_tokens, ends))
    least = math.inf
    while not search.done:
        paths = torch.tensor([prompt + [token.token_id for token in beam.tokens()] for beam in search.live])
        log_probs = reference(directory)(paths).logits[:, -1].log_softmax(-1)
        values, ids = LogitsProcessorList(processors)(paths, log_probs).topk(count + 1)
        sums = values + torch.tensor([beam.score for beam in search.live])[:, None]
        ranked = sums.flatten().sort(descending=True).values[: count + 1]
        least = min(least, float((ranked[:-1] - ranked[1:]).min()))
        rows = zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)
        search.advance([list(map(Candidate, *row)) for row in rows])
    return least


def result_of(output: GenerationOutput) -> list[object]:
    return [
        (each.text, each.token_ids, each.finish_reason, each.score, each.logprobs, each.prompt_logprobs)
        for each in output.completions
    ]


def engine_of(llm: LLM) -> Engine:
    assert llm._engine is not None
    return llm._engine


def run(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[GenerationOutput]:
    engine = engine_of(llm)
    generations = [engine.submit(*request) for request in requests]
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.capacity
    return [generation.output() for generation in generations]


@pytest.mark.parametrize(
    ("target", "num_requests", "options"),
    [
        ("torch", 10, {"max_num_seqs": 32}),
        ("cpp", 10, {"max_num_seqs": 32}),
        pytest.param("triton", 4, {"max_num_seqs": 8, "token_budget": 8, "dtype": "float32"}, marks=pytest.mark.slow),
    ],
)
def test_hypotheses_and_scores_are_those_of_transformers(
    directory: Path, target: str, num_requests: int, options: dict[str, Any]
) -> None:
    """All requests at once, so that beams of one stand among those of others."""
    rng = random.Random(3)
    requests = [drawn_request(directory, rng) for _ in range(num_requests)]
    with fastgen.load(directory, target=target, block_size=4, **options) as llm:
        outputs = run(llm, requests)
    num_compared = 0
    for request, output in zip(requests, outputs, strict=True):
        sampling, expected = request[1], theirs(directory, *request)
        given = [(each.token_ids, each.score) for each in output.completions]
        if [ids for ids, _ in given] != [ids for ids, _ in expected]:
            assert closest(directory, *request) < MARGIN, sampling
            continue
        num_compared += 1
        for completion, (token_ids, score) in zip(output.completions, expected, strict=True):
            tolerance = TOLERANCE * len(token_ids) ** (1 - sampling.length_penalty)
            assert completion.score == pytest.approx(score, abs=tolerance), sampling
            assert completion.finish_reason == ("stop" if token_ids[-1] in stop_ids(sampling) else "length")
    assert num_compared >= 0.75 * num_requests


@pytest.fixture(scope="module")
def requests(directory: Path) -> list[tuple[list[int], SamplingParams]]:
    """Beams with all that may be asked of them, among completions that are drawn."""
    rng = random.Random(8)
    found = []
    for index in range(8):
        prompt, sampling = drawn_request(directory, rng)
        found.append((prompt, replace(sampling, logprobs=rng.choice([None, 2]), prompt_logprobs=rng.choice([None, 1]))))
        drawn = SamplingParams(n=rng.randint(1, 5), temperature=1.0, seed=index, max_new_tokens=LONGEST)
        found.append((rng.choices(range(3, VOCAB_SIZE), k=rng.randint(1, 20)), drawn))
    return found


def test_other_requests_budget_and_preemptions_change_no_bit(
    directory: Path, requests: list[tuple[list[int], SamplingParams]]
) -> None:
    with fastgen.load(directory, target="cpp", block_size=4, prefix_caching=False) as llm:
        expected = [result_of(*run(llm, [request])) for request in requests]
        block_bytes = engine_of(llm).runner.kv_cache.size_bytes // llm.config.num_blocks
        kv = engine_of(llm).scheduler.kv
        most = max(
            engine_of(llm).scheduler.forks.blocks_needed(
                len(prompt), len(prompt) + each.max_new_tokens, each.beam_width
            )
            for prompt, each in requests
        )
    num_preempted = 0
    for sizes in (
        {"token_budget": 9, "max_num_seqs": 8},
        {"token_budget": 32, "max_num_seqs": 30, "kv_cache_memory": block_bytes * (most + 2)},
        {"token_budget": 64, "max_num_seqs": 6, "prefix_caching": False},
    ):
        with fastgen.load(directory, target="cpp", block_size=4, **sizes) as llm:
            outputs = run(llm, requests)
        assert list(map(result_of, outputs)) == expected
        num_preempted += sum(output.metrics.preemptions > 0 for output in outputs)
    assert num_preempted > 0 or any(kv.windows)  # what windows leave behind makes room


# What the user sees


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with fastgen.load(directory, target="torch") as llm:
        yield llm


def test_an_answer_has_text_scores_and_log_probabilities(llm: LLM) -> None:
    output = llm.generate("the cat", beam_width=4, n=3, max_new_tokens=6, logprobs=2)
    scores = [each.score for each in output.completions]
    assert scores == sorted(scores, reverse=True)
    for each in output.completions:
        assert each.logprobs is not None
        assert each.text == llm.tokenizer.decode(each.token_ids, skip_special_tokens=True)
        own = [entry[token_id] for entry, token_id in zip(each.logprobs, each.token_ids, strict=True)]
        assert each.score == pytest.approx(sum(own) / len(own), abs=1e-5)
        assert all(len(entry) == 3 for entry in each.logprobs)
        assert len(each.metrics.gaps_s) == len(each.token_ids) - 1
    assert llm.generate("the cat", max_new_tokens=6).score is None


def test_a_stream_gives_each_answer_whole_when_the_search_is_done(llm: LLM) -> None:
    fields: dict[str, Any] = {"beam_width": 3, "n": 2, "max_new_tokens": 5}
    with llm.stream("a cat", **fields) as stream:
        chunks = list(stream)
    expected = llm.generate("a cat", **fields)
    assert [(chunk.index, chunk.text, chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
        (index, each.text, each.token_ids, each.finish_reason) for index, each in enumerate(expected.completions)
    ]


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_search_that_is_ended_gives_the_best_so_far(llm: LLM, num_steps: int) -> None:
    engine = engine_of(llm)
    generation = engine.submit([5, 6, 7], SamplingParams(beam_width=3, n=2, max_new_tokens=9, ignore_eos=True))
    for _ in range(num_steps):
        engine.step()
    engine.cancel(generation)
    engine.cancel(generation)
    engine.check_integrity()
    assert not engine.has_work
    output = generation.output()
    assert [each.finish_reason for each in output.completions] == ["cancelled"] * 2
    assert [len(each.token_ids) for each in output.completions] == [num_steps] * 2
    if num_steps:
        shorter = llm.generate([5, 6, 7], beam_width=3, n=2, max_new_tokens=num_steps, ignore_eos=True)
        assert [each.token_ids for each in output.completions] == [each.token_ids for each in shorter.completions]


def test_one_beam_is_greedy(llm: LLM) -> None:
    """Whatever is said of beams."""
    fields: dict[str, Any] = {"max_new_tokens": 8, "length_penalty": 3.0, "early_stopping": "never"}
    assert result_of(llm.generate([9, 8], beam_width=1, **fields)) == result_of(llm.generate([9, 8], max_new_tokens=8))
