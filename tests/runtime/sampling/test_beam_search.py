"""The search by itself, fed with log-probabilities: against transformers' generate, brute force and worked examples."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastgen.runtime.requests.sampled import Candidate
from fastgen.runtime.sampling.beam_search import Beam, BeamSearch, num_candidates
from tests.reference import randomise

VOCAB_SIZE = 40


@cache
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=None,
    )
    found: Any = randomise(LlamaForCausalLM(config), seed=7, spread=1.0)
    return found


@torch.no_grad()
def likeliest(paths: list[list[int]], count: int) -> list[list[Candidate]]:
    values, ids = model()(torch.tensor(paths)).logits[:, -1].log_softmax(-1).topk(count)
    return [list(map(Candidate, *row)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


def searched(prompt: list[int], search: BeamSearch) -> BeamSearch:
    count = min(num_candidates(search.beam_width, search.stop_ids), VOCAB_SIZE)
    while not search.done:
        before = list(search.live)
        parents = search.advance(likeliest([prompt + token_ids(beam) for beam in before], count))
        assert [beam.parent for beam in search.live] == [before[parent] for parent in parents]
    return search


def token_ids(beam: Beam) -> list[int]:
    return [token.token_id for token in beam.tokens()]


def drawn(rng: random.Random, prompt: list[int]) -> dict[str, Any]:
    """The tokens that end a beam are among those likely to be met."""
    likely = [token.token_id for token in likeliest([prompt], 16)[0]]
    return {
        "beam_width": rng.randint(2, 6),
        "max_new_tokens": rng.randint(1, 14),
        "length_penalty": rng.choice([1.0, 1.0, 0.0, -1.5, 0.6, 2.5]),
        "early_stopping": rng.choice([False, True, "never"]),
        "stop_ids": frozenset(rng.sample(likely, rng.choice([0, 1, 2, 3, 8]))),
    }


def test_hypotheses_and_scores_are_those_of_transformers() -> None:
    rng = random.Random(5)
    ended = early = 0
    for _ in range(40):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        fields = drawn(rng, prompt)
        search = searched(prompt, BeamSearch(**fields))
        theirs = model().generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            num_beams=fields["beam_width"],
            num_return_sequences=fields["beam_width"],
            max_new_tokens=fields["max_new_tokens"],
            length_penalty=fields["length_penalty"],
            early_stopping=fields["early_stopping"],
            eos_token_id=sorted(fields["stop_ids"]) or None,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert len(search.ranking()) == fields["beam_width"]
        assert [found.score for found in search.ranking()] == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
        for found, row in zip(search.ranking(), theirs.sequences[:, len(prompt) :].tolist(), strict=True):
            expected = row[: found.beam.length]
            assert token_ids(found.beam) == expected
            ended += expected[-1] in fields["stop_ids"]
            early += len(expected) < fields["max_new_tokens"]
    assert ended >= 40
    assert early >= 30


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_a_search_wide_enough_finds_the_best_of_all_answers(length_penalty: float) -> None:
    """Three tokens of which one ends, four steps: every answer is listed, and 27 beams never drop one."""
    rng = random.Random(11)
    scores: dict[tuple[int, ...], list[float]] = {}

    def score(path: tuple[int, ...]) -> list[float]:
        if path not in scores:
            scores[path] = torch.tensor([rng.gauss(0, 2) for _ in range(3)]).log_softmax(0).tolist()
        return scores[path]

    search = BeamSearch(
        27, max_new_tokens=4, length_penalty=length_penalty, early_stopping="never", stop_ids=frozenset({2})
    )
    while not search.done:
        paths = [tuple(token_ids(beam)) for beam in search.live]
        search.advance([sorted(map(Candidate, range(3), score(path)), key=lambda each: -each.score) for path in paths])

    answers: dict[tuple[int, ...], float] = {}
    for path in itertools.chain.from_iterable(itertools.product(range(3), repeat=length) for length in range(1, 5)):
        if 2 in path[:-1] or (path[-1] != 2 and len(path) < 4):
            continue
        answers[path] = sum(score(path[:i])[token] for i, token in enumerate(path)) / len(path) ** length_penalty
    best = sorted(answers, key=lambda path: -answers[path])[:27]
    found = [tuple(token_ids(each.beam)) for each in search.ranking()]
    assert found == best
    assert [each.score for each in search.ranking()] == pytest.approx([answers[path] for path in best])


# Worked examples. Token 0 ends; scores are chosen by hand.


def step(search: BeamSearch, *candidates: dict[int, float]) -> list[int]:
    return search.advance([[Candidate(*item) for item in each.items()] for each in candidates])


def answers(search: BeamSearch) -> list[tuple[list[int], float]]:
    return [(token_ids(each.beam), each.score) for each in search.ranking()]


def test_an_ending_behind_the_best_is_dropped_and_the_others_move_up() -> None:
    search = BeamSearch(2, max_new_tokens=9, stop_ids=frozenset({0}))
    assert step(search, {5: -1.0, 6: -2.0, 0: -3.0, 7: -4.0}) == [0, 0]
    assert search.finished == []
    # Of the second beam both are better than what the first beam has besides its ending.
    assert step(search, {0: -1.0, 5: -9.0}, {6: -0.5, 7: -0.75}) == [1, 1]
    assert [found.score for found in search.finished] == [-1.0]  # (-1 - 1) / 2
    assert [beam.score for beam in search.live] == [-2.5, -2.75]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "last_score", "done"),
    [
        (True, 1.0, -0.5, True),
        (False, 1.0, -1.5, False),  # the live beam has -3.0 / 2, the worst hypothesis -3.25 / 2
        (False, 1.0, -1.75, True),  # as good is not better
        (False, 0.0, -1.5, False),
        (False, 0.0, -1.75, True),
        ("never", 1.0, -2.0, False),  # -3.5 / 9 is still better
        ("never", 0.0, -1.75, True),
        ("never", -1.0, -1.5, False),  # -3.0 * 2 against -3.25 * 2
        ("never", -1.0, -1.75, True),
    ],
)
def test_when_as_many_have_ended_as_there_are_beams(
    early_stopping: Any, length_penalty: float, last_score: float, done: bool
) -> None:
    search = BeamSearch(
        2, max_new_tokens=9, early_stopping=early_stopping, length_penalty=length_penalty, stop_ids=frozenset({0})
    )
    step(search, {0: -1.0, 5: -1.25, 6: -1.5})
    step(search, {0: -2.0, 7: -9.0}, {8: last_score, 9: -9.0})
    assert len(search.finished) == 2
    assert search.done == done


def test_before_its_end_live_beams_are_ranked_with_the_hypotheses() -> None:
    search = BeamSearch(2, max_new_tokens=9, stop_ids=frozenset({0}))
    assert answers(search) == [([], 0.0)]
    step(search, {5: -1.0, 6: -2.0})
    assert answers(search) == [([5], -1.0), ([6], -2.0)]
    step(search, {0: -0.4, 7: -2.0}, {8: -0.2, 9: -6.0})
    assert answers(search) == [([5, 0], pytest.approx(-0.7)), ([6, 8], -1.1), ([5, 7], -1.5)]


def test_equal_scores_keep_the_better_beam_and_the_lower_id() -> None:
    search = BeamSearch(2, max_new_tokens=3)
    step(search, {3: -1.0, 4: -1.0, 5: -1.0})
    assert step(search, {1: -2.0, 2: -2.0}, {1: -2.0, 2: -2.0}) == [0, 0]
    assert [path for path, _ in answers(search)] == [[3, 1], [3, 2]]


def test_with_fewer_possible_tokens_than_beams_fewer_live() -> None:
    search = BeamSearch(3, max_new_tokens=2)
    assert step(search, {4: -0.1}) == [0]
    assert step(search, {5: -0.1, 6: -3.0}) == []
    assert [path for path, _ in answers(search)] == [[4, 5], [4, 6]]


def test_a_beam_is_equal_to_itself_only() -> None:
    """Beams are many, and hold no more than their fields."""
    beam = Beam()
    assert not hasattr(beam, "__dict__")
    assert beam != Beam()
    assert beam.extended(Candidate(3, -1.0)).tokens() == [Candidate(3, -1.0)]
