"""Tokens sampled for drafted sequences: those their sequence would get had it generated the drafts; and which of them
counts."""

from __future__ import annotations

import random

import pytest
import torch

from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.requests.sampled import SampledToken
from fastgen.runtime.sampling.sampler import Sampler
from fastgen.runtime.scheduling.drafts import DraftedSequence, SampledSequence
from fastgen.runtime.step.model_runner import accept
from tests.runtime.sampling.test_sampler import EOS, VOCAB, cpp_kernel, logits_of, random_sequence, sequence


def new_sampler(target: str) -> Sampler:
    return Sampler([EOS], cpp_kernel(VOCAB) if target == "cpp" else None)


def with_drafts(seq: Sequence, drafts: list[int]) -> list[SampledSequence]:
    return [seq, *(DraftedSequence(seq, drafts[: index + 1]) for index in range(len(drafts)))]


def generated(seq: Sequence, tokens: list[int]) -> Sequence:
    """Another sequence just like ``seq`` that has generated ``tokens`` as well."""
    made = seq.request.__class__(0, seq.request.prompt_ids, seq.request.sampling, 0.0).sequences[seq.index]
    made.token_ids = [*seq.token_ids, *tokens]
    return made


@pytest.mark.parametrize("target", ["torch", "cpp"])
@pytest.mark.parametrize("seed", range(8))
def test_as_if_the_drafts_were_generated(target: str, seed: int) -> None:
    """With every sampling field, and from step to step: what was drafted before leaves no trace."""
    draw = random.Random(seed)
    sampler = new_sampler(target)
    sequences = [random_sequence(draw) for _ in range(6)]
    for step in range(4):
        rows: list[SampledSequence] = []
        for seq in sequences:
            # tokens it has and tokens that are new to it, some twice
            drafts = [draw.choice([draw.randrange(VOCAB), *seq.token_ids[:2]]) for _ in range(draw.choice([0, 1, 4]))]
            rows += with_drafts(seq, drafts)
        logits = logits_of(100 * seed + step, len(rows))
        if step == 2:
            logits[draw.randrange(len(rows)), 3] = torch.nan
        found = sampler.sample(logits, rows)
        for row, one_row, token in zip(rows, logits, found, strict=True):
            alone = row if isinstance(row, Sequence) else generated(row.sequence, list(row.drafts))
            assert token == new_sampler(target).sample(one_row.unsqueeze(0), [alone])[0]
        for seq, token in accept(rows, found)[0]:
            seq.token_ids.append(token.token_id)


def test_drafts_count_up_to_the_first_that_was_not_sampled() -> None:
    one, two, three = (sequence([9, 9]) for _ in range(3))
    rows = [*with_drafts(one, [1, 2, 3]), *with_drafts(two, [4]), *with_drafts(three, [])]
    tokens = [SampledToken(token_id) for token_id in (1, 2, 7, 3, 4, 5, 6)]
    sampled, num_accepted = accept(rows, tokens)
    expected = [(one, 1), (one, 2), (one, 7), (two, 4), (two, 5), (three, 6)]
    assert sampled == [(seq, SampledToken(token_id)) for seq, token_id in expected]
    assert num_accepted == {one: 2, two: 1}


def test_what_follows_a_wrong_draft_never_counts_though_it_be_right_again() -> None:
    seq = sequence([9])
    sampled, num_accepted = accept(with_drafts(seq, [1, 2, 3]), [SampledToken(token) for token in (0, 2, 3, 4)])
    assert sampled == [(seq, SampledToken(0))]
    assert num_accepted == {seq: 0}


def test_an_error_ends_what_counts_and_behind_a_wrong_draft_is_none() -> None:
    """The id that stands in for a token where there is an error is no token."""
    seq = sequence([9])
    failed = SampledToken(0, error="NaN")
    tokens = [SampledToken(1), failed, SampledToken(5)]
    assert accept(with_drafts(seq, [1, 0]), tokens) == ([(seq, SampledToken(1)), (seq, failed)], {seq: 1})
    assert accept(with_drafts(seq, [2, 0]), tokens) == ([(seq, SampledToken(1))], {seq: 0})
