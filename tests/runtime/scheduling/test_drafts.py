"""Prompt lookup: what is drafted, against a search by hand, and how many where drafts prove right or wrong."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from fastgen.runtime.requests.request import TO_COME, Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.drafts import (
    INDEXED_AT_ONCE,
    DraftedSequence,
    NgramDrafter,
    NgramIndex,
    owner,
    with_drafts,
)
from fastgen.runtime.scheduling.schedule import ScheduledTokens


def sequence(token_ids: list[int], num_generated: int = 0, **fields: int) -> Sequence:
    prompt = token_ids[: len(token_ids) - num_generated]
    made = Request(0, prompt, SamplingParams(**{"max_new_tokens": 1000, **fields}), arrival_s=0.0).sequences[0]
    made.token_ids.extend(token_ids[len(prompt) :])
    return made


def place_by_hand(token_ids: list[int]) -> int | None:
    """Three tokens before two, the latest place first."""
    for size in (3, 2):
        for place in reversed(range(size, len(token_ids))):
            if token_ids[place - size : place] == token_ids[-size:]:
                return place
    return None


def test_the_documented_example() -> None:
    assert list(NgramDrafter(4).propose(sequence([5, 9, 2, 7, 4, 1, 5, 9, 2]), 4)) == [7, 4, 1, 5]


@pytest.mark.parametrize("seed", range(20))
def test_the_place_is_that_of_a_search_by_hand(seed: int) -> None:
    """Over a text that grows a token, or several at once, at a time."""
    rng = random.Random(seed)
    num_letters = rng.randint(1, 6)
    index, text = NgramIndex(), [rng.randrange(num_letters) for _ in range(rng.randint(1, 50))]
    num_found = 0
    for _ in range(200):
        place = index.find(text)
        assert place == place_by_hand(text)
        num_found += place is not None
        text += [rng.randrange(num_letters) for _ in range(rng.choice([0, 1, 1, 1, 5]))]
    assert num_found > 20


def test_a_long_prompt_is_indexed_in_parts_and_nothing_is_found_before() -> None:
    rng = random.Random(1)
    text = [rng.randrange(50) for _ in range(3 * INDEXED_AT_ONCE)]
    index = NgramIndex()
    places = [index.find(text) for _ in range(3)]
    assert places[:2] == [None, None]
    assert places[2] == place_by_hand(text) is not None


def test_drafts_overlap_what_they_are_copied_from() -> None:
    assert list(NgramDrafter(5).propose(sequence([8, 3, 3, 3]), 9)) == [3] * 5
    assert list(NgramDrafter(7).propose(sequence([1, 2, 1, 2, 1, 2]), 9)) == [1, 2, 1, 2, 1, 2, 1]


def test_a_text_that_does_not_repeat_itself_gets_none() -> None:
    assert list(NgramDrafter(4).propose(sequence(list(range(100))), 4)) == []
    assert list(NgramDrafter(4).propose(sequence([1, 2, 3, 1]), 4)) == [], "one token is no evidence"


@pytest.mark.parametrize(
    ("max_tokens", "max_new_tokens", "expected"), [(9, 1000, 6), (3, 1000, 3), (0, 1000, 0), (9, 7, 3), (9, 4, 0)]
)
def test_no_more_than_there_is_room_for(max_tokens: int, max_new_tokens: int, expected: int) -> None:
    """Three tokens are generated. The one that is sampled after the last draft counts too."""
    seq = sequence([4] * 10, num_generated=3, max_new_tokens=max_new_tokens)
    assert len(NgramDrafter(6).propose(seq, max_tokens)) == expected


def test_as_many_as_were_right_and_twice_as_many_where_all_were() -> None:
    """The text repeats one token; after so many it has another in between."""
    drafter, seq = NgramDrafter(8), sequence([7] * 5)

    def asked(num_right: int) -> int:
        """Returns how many tokens are drafted if so many of them are right."""
        drafts = list(drafter.propose(seq, 100))
        assert set(drafts) == {7}
        seq.token_ids.extend([7] * num_right)
        seq.token_ids.extend([1000 + seq.num_tokens, 7, 7, 7, 7] if num_right < len(drafts) else [7])
        return len(drafts)

    rights = [8, 3, 3, 6, 0, 1, 2, 4, 8, 8]
    assert [asked(num_right) for num_right in rights] == [8, 8, 3, 6, 8, 1, 2, 4, 8, 8]


def test_asking_again_before_a_token_has_come_gives_the_same() -> None:
    """A step may fail, or have no room for drafts after all."""
    drafter, seq = NgramDrafter(4), sequence([7] * 9)
    assert [list(drafter.propose(seq, 4)) for _ in range(3)] == [[7] * 4] * 3


def test_each_sequence_has_its_own_and_is_forgotten_when_it_ends() -> None:
    drafter = NgramDrafter(4)
    one, other = sequence([1] * 5), sequence([2] * 5)
    assert [list(drafter.propose(each, 2)) for each in (one, other)] == [[1, 1], [2, 2]]
    one.token_ids += [9, 1, 1, 1]
    drafter.propose(one, 4)
    drafter.forget(one)
    drafter.forget(one)
    assert list(drafter.propose(one, 9)) == [9, 1, 1, 1], "as if it had never drafted"


def test_some_sequences_may_not_draft() -> None:
    refused, other = sequence([1] * 5), sequence([2] * 5)
    drafter = NgramDrafter(4, may_draft=lambda seq: seq is not refused)
    assert [len(drafter.propose(seq, 4)) for seq in (refused, other)] == [0, 4]


def test_a_constrained_sequence_gets_no_drafts() -> None:
    """A grammar does not know what may follow a draft before the draft is accepted."""
    seq = sequence([1] * 5)
    seq.matcher = cast(Any, object())
    assert list(NgramDrafter(4).propose(seq, 4)) == []


def test_a_drafted_sequence_is_the_sequence_with_its_drafts_generated() -> None:
    seq = sequence([5, 6, 7, 8], num_generated=2)
    drafted = DraftedSequence(seq, [9, 4])
    assert drafted.token_ids == [5, 6, 7, 8, 9, 4]
    assert (drafted.num_tokens, drafted.num_prompt_tokens) == (6, 2)
    assert (drafted.request, drafted.index) == (seq.request, seq.index)
    assert seq.token_ids == [5, 6, 7, 8]
    assert owner(drafted) is owner(seq) is seq


def test_decodes_with_drafts_are_chunks_as_long_as_there_are_places() -> None:
    first, second, third = sequence([1, 2]), sequence([3]), sequence([4])
    first.num_computed_tokens = 1
    awaits, beam, refused = sequence([5, TO_COME]), sequence([6], beam_width=2), sequence([7])
    asked, allocated = [], []

    def propose(seq: Sequence, most: int) -> list[int]:
        asked.append((seq, most))
        return [9] * min(most, 3)

    def allocate(seq: Sequence, num_tokens: int) -> bool:
        allocated.append((seq, num_tokens))
        return seq is not refused

    plain, drafted = with_drafts([first, awaits, beam, refused, second, third], 5, propose, allocate)
    assert plain == [awaits, beam, refused, third]
    chunks = [ScheduledTokens(first, 1, 4, True, (9, 9, 9)), ScheduledTokens(second, 0, 3, True, (9, 9))]
    assert drafted == chunks
    assert [chunk.num_rows for chunk in chunks] == [4, 3]
    assert asked == [(first, 5), (refused, 2), (second, 2)]
    assert allocated == [(first, 4), (refused, 3), (second, 3)]
    assert with_drafts([first], 5, lambda seq, most: [], allocate) == ([first], [])
