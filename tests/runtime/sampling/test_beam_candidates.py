"""Candidates of a beam: the likeliest tokens, as transformers' logits processors make their log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampled import Candidate
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.sampler import Sampler

VOCAB_SIZE = 50
EOS = 3
PROMPT = [7, 7, 12, 30]


def beam(generated: list[int] | None = None, **fields: Any) -> Sequence:
    request = Request(0, PROMPT, SamplingParams(beam_width=4, **fields), arrival_s=0.0)
    request.sequences[1].token_ids += generated or []
    return request.sequences[1]


def candidates(logits: torch.Tensor, sequences: list[Sequence]) -> list[list[Candidate]]:
    found = [token.candidates for token in Sampler([EOS]).sample(logits, sequences)]
    return [each for each in found if each is not None]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"logit_bias": {5: 4.0, 12: -3.0}},
        {"min_new_tokens": 4},
        {"repetition_penalty": 1.4, "logit_bias": {30: 2.5, 1: 1.0}, "min_new_tokens": 4, "stop_token_ids": [9]},
    ],
)
def test_scores_are_those_of_transformers(fields: dict[str, Any]) -> None:
    generated = [30, 5, 44]
    sampling = SamplingParams(**fields)
    stop_ids = [EOS, *sampling.stop_token_ids]
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[key], bias] for key, bias in sampling.logit_bias.items()]))
    if sampling.min_new_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), sampling.min_new_tokens, stop_ids))
    logits = torch.randn(1, VOCAB_SIZE) * 3
    scores, ids = processors(torch.tensor([PROMPT + generated]), logits.log_softmax(-1))[0].topk(4 * len(stop_ids) + 4)
    (found,) = candidates(logits, [beam(generated, **fields)])
    assert [each.token_id for each in found] == ids.tolist()
    assert [each.score for each in found] == pytest.approx(scores.tolist(), abs=1e-5)


def test_other_rows_change_no_bit() -> None:
    """Among rows of other requests, at any place, a beam has the same candidates."""
    logits = torch.randn(40, VOCAB_SIZE) * 5
    fields = [{}, {"repetition_penalty": 1.3}, {"logit_bias": {4: 1.5}}, {"min_new_tokens": 2}]
    sequences = [beam([row, row + 1], **fields[row % 4]) for row in range(38)]
    greedy = Request(1, PROMPT, SamplingParams(n=2), arrival_s=0.0).sequences
    together = candidates(logits, [greedy[0], *sequences, greedy[1]])
    alone = [candidates(logits[row : row + 1], [each])[0] for row, each in enumerate(sequences, start=1)]
    assert together == alone


def test_equal_scores_come_in_order_of_id() -> None:
    (found,) = candidates(torch.zeros(1, VOCAB_SIZE), [beam()])
    assert [each.token_id for each in found] == list(range(8))
    assert [each.score for each in found] == pytest.approx([-math.log(VOCAB_SIZE)] * 8)


def test_what_cannot_be_chosen_is_no_candidate() -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, [5, EOS, 8]] = torch.tensor([1.0, 2.0, 3.0])
    (found,) = candidates(logits, [beam(min_new_tokens=1)])
    assert [each.token_id for each in found] == [8, 5]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_an_error_and_disturbs_no_other(bad: float) -> None:
    logits = torch.randn(2, VOCAB_SIZE)
    logits[0, 4] = bad
    first, second = Sampler([EOS]).sample(logits, [beam(), beam()])
    assert first.error is not None
    assert first.candidates is None
    assert second.error is None
    assert second.candidates == candidates(logits[1:], [beam()])[0]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_log_probabilities_are_the_models_own(count: int) -> None:
    """Whatever the penalties make of the scores; the token first, then the likeliest others."""
    logits = torch.randn(1, VOCAB_SIZE)
    expected = logits[0].log_softmax(-1)
    order = expected.argsort(descending=True).tolist()
    (found,) = candidates(logits, [beam(logprobs=count, repetition_penalty=3.0)])
    for each in found:
        assert each.logprobs is not None
        others = [token_id for token_id in order if token_id != each.token_id][:count]
        assert list(each.logprobs) == [each.token_id, *others]
        assert list(each.logprobs.values()) == pytest.approx(expected[list(each.logprobs)].tolist())


def test_each_beam_reports_as_many_alternatives_as_it_asks_for() -> None:
    asked = [2, 6, None]
    found = candidates(torch.randn(3, VOCAB_SIZE), [beam(logprobs=count) for count in asked])
    for count, row in zip(asked, found, strict=True):
        reported = [each.logprobs for each in row]
        assert len(reported) >= 4
        assert [each if each is None else len(each) for each in reported] == [count and count + 1] * len(reported)


def test_rows_get_as_many_candidates_as_each_may_need_and_no_more_than_there_are_tokens() -> None:
    """So many that all beams continue even if every token that ends one is among them."""
    logits = torch.randn(3, VOCAB_SIZE)
    wide = Request(0, PROMPT, SamplingParams(beam_width=30, logprobs=VOCAB_SIZE), arrival_s=0.0).sequences[1]
    sequences = [beam(), beam(stop_token_ids=[9, 10, 11]), wide]
    found = candidates(logits, sequences)
    assert [len(each) for each in found] == [4 * 2, 4 * 5, VOCAB_SIZE]
    for row, each in enumerate(found):
        assert [token.token_id for token in each] == logits[row].argsort(descending=True).tolist()[: len(each)]
    assert all(token.logprobs is not None and len(token.logprobs) == VOCAB_SIZE for token in found[2])
    assert found[:2] == candidates(logits[:2], sequences[:2])


@pytest.mark.parametrize("fields", [{"repetition_penalty": 3.0}, {"min_new_tokens": 4}])
def test_a_beam_that_is_adjusted_has_its_scores_beside_one_that_is_not(fields: dict[str, Any]) -> None:
    logits = torch.randn(2, VOCAB_SIZE)
    logits[:, [EOS, 7]] += 3.0
    for sequences in ([beam(), beam([5], **fields)], [beam([5], **fields), beam()]):
        found = candidates(logits, sequences)
        assert found == [candidates(logits[row : row + 1], [each])[0] for row, each in enumerate(sequences)]
        assert found[0] != found[1]
