"""The answer of a request so far: how it ends, what a stream takes of it, and its times."""

from __future__ import annotations

import random

import pytest

from fastgen.runtime.answers.generation import Completion, Generation
from fastgen.runtime.requests.outputs import FinishReason, GenerationChunk
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.sampled import SampledToken
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.detokenizer import Detokenizer

NO_STOPS: frozenset[int] = frozenset()


class Letters:
    """A tokenizer's decoder whose id ``i`` is the ``i``-th letter."""

    byte_values: dict[int, int] = {}  # noqa: RUF012

    def is_text(self, token_id: int) -> bool:
        return True

    def piece(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(self.piece, token_ids))


def generation_of(*, with_text: bool = True, **fields: object) -> Generation:
    sampling = SamplingParams(**fields)
    request = Request(0, [3, 1, 4], sampling, arrival_s=10.0)

    def detokenizer() -> Detokenizer | None:
        return Detokenizer(Letters(), [3, 1, 4], stop=sampling.stop) if with_text else None  # type: ignore[arg-type]

    generation = Generation(request)
    for completion in generation.completions:
        completion.detokenizer = detokenizer()
    return generation


def spell(completion: Completion, word: str) -> list[object]:
    """Append the tokens of ``word``, a second apart; what each says of the end."""
    start = len(completion.token_ids)
    tokens = [SampledToken(ord(letter) - ord("a"), {0: -1.0}) for letter in word]
    return [completion.append(token, NO_STOPS, 20.0 + start + i) for i, token in enumerate(tokens)]


# How an answer ends


def test_it_ends_with_its_last_token() -> None:
    (completion,) = generation_of(max_new_tokens=3).completions
    assert spell(completion, "cat") == [None, None, "length"]
    assert completion.text == "cat"


def test_a_stop_token_ends_it_without_text_also_where_it_is_the_last() -> None:
    for max_new_tokens in (2, 3):
        (completion,) = generation_of(max_new_tokens=max_new_tokens).completions
        assert spell(completion, "c") == [None]
        assert completion.append(SampledToken(0), frozenset({0, 9}), 30.0) == "stop"
        assert (completion.text, completion.token_ids) == ("c", [2, 0])


def test_a_stop_string_ends_it_also_where_its_last_token_is_the_last() -> None:
    for max_new_tokens in (4, 9):
        (completion,) = generation_of(max_new_tokens=max_new_tokens, stop=["at"]).completions
        assert spell(completion, "xcat") == [None, None, None, "stop"]
        completion.finish("stop")
        assert (completion.text, len(completion.token_ids)) == ("xc", 4)


def test_what_was_held_back_for_a_stop_string_is_given_out_at_the_end() -> None:
    (completion,) = generation_of(max_new_tokens=3, stop=["catalogue"]).completions
    assert spell(completion, "cat") == [None, None, "length"]
    assert completion.text == ""
    completion.finish("length")
    assert (completion.text, completion.finish_reason, completion.error) == ("cat", "length", None)


def test_without_a_tokenizer_there_are_ids_only() -> None:
    (completion,) = generation_of(with_text=False, max_new_tokens=2).completions
    assert spell(completion, "ab") == [None, "length"]
    completion.finish("error", "broken")
    assert (completion.text, completion.token_ids, completion.error) == ("", [0, 1], "broken")


# What a stream takes


def test_chunks_hold_what_is_new() -> None:
    generation = generation_of(max_new_tokens=9, stop=["cab"])
    (completion,) = generation.completions
    assert generation.take_chunks() == []
    spell(completion, "xy")
    assert generation.take_chunks() == [GenerationChunk(index=0, text="xy", token_ids=[23, 24])]
    assert generation.take_chunks() == []
    spell(completion, "ca")  # may be the stop string: ids without text
    assert generation.take_chunks() == [GenerationChunk(index=0, text="", token_ids=[2, 0])]
    spell(completion, "t")
    completion.finish("length")
    assert generation.take_chunks() == [GenerationChunk(index=0, text="cat", token_ids=[19], finish_reason="length")]
    assert generation.take_chunks() == []
    assert generation.take_chunks() == []


def test_the_end_is_a_chunk_though_nothing_is_new() -> None:
    generation = generation_of(max_new_tokens=9)
    (completion,) = generation.completions
    spell(completion, "x")
    generation.take_chunks()
    completion.finish("cancelled")
    assert generation.take_chunks() == [GenerationChunk(index=0, text="", token_ids=[], finish_reason="cancelled")]
    assert generation.take_chunks() == []


def test_chunks_of_several_completions_add_up_however_they_are_taken() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        generation = generation_of(n=3, max_new_tokens=30, stop=["abcabc"])
        taken: list[list[GenerationChunk]] = [[], [], []]
        while not generation.finished:
            completion = rng.choice([each for each in generation.completions if each.finish_reason is None])
            reason = spell(completion, rng.choice("aabbc"))[0]
            if reason is not None:
                completion.finish(reason)  # type: ignore[arg-type]
            if rng.random() < 0.4:
                for chunk in generation.take_chunks():
                    taken[chunk.index].append(chunk)
        for chunk in generation.take_chunks():
            taken[chunk.index].append(chunk)
        for completion, chunks in zip(generation.completions, taken, strict=True):
            assert "".join(chunk.text for chunk in chunks) == completion.text, f"seed {seed}"
            assert [token_id for chunk in chunks for token_id in chunk.token_ids] == completion.token_ids
            assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [completion.finish_reason]


# The output


def test_the_output_has_everything() -> None:
    generation = generation_of(n=2, max_new_tokens=3, logprobs=0, prompt_logprobs=0)
    one, two = generation.completions
    assert generation.prompt_logprobs == [None] * 3
    generation.prompt_logprobs[1:] = [{1: -0.5}, {4: -0.25}]
    generation.left_queue_s = 12.5
    two.sequence.num_preemptions = 4
    spell(one, "cat")
    one.finish("length")
    assert not generation.finished
    two.finish("error", "NaN")
    assert generation.finished
    output = generation.output()
    assert output.completions == (output, *output.others)
    assert (output.text, output.token_ids, output.finish_reason, output.error) == ("cat", [2, 0, 19], "length", None)
    assert output.logprobs == [{0: -1.0}] * 3
    assert output.prompt_token_ids == [3, 1, 4]
    assert output.prompt_logprobs == [None, {1: -0.5}, {4: -0.25}]
    metrics = output.metrics
    assert (metrics.queue_s, metrics.ttft_s, metrics.gaps_s, metrics.preemptions) == (2.5, 10.0, [1.0, 1.0], 0)
    (other,) = output.others
    assert (other.text, other.token_ids, other.finish_reason, other.error) == ("", [], "error", "NaN")
    assert (other.others, other.logprobs) == ((), [])
    assert (other.metrics.ttft_s, other.metrics.gaps_s, other.metrics.preemptions) == (None, [], 4)


@pytest.mark.parametrize("count", [None, 0, 3])
def test_log_probabilities_are_there_where_they_were_asked_for(count: int | None) -> None:
    generation = generation_of(logprobs=count, prompt_logprobs=count)
    generation.left_queue_s = 10.0
    generation.completions[0].finish("cancelled")
    output = generation.output()
    assert output.logprobs == (None if count is None else [])
    assert output.prompt_logprobs == (None if count is None else [None] * 3)


# Other threads


def test_asking_whether_a_waiting_request_has_finished_makes_nothing_of_it() -> None:
    """Another thread may be making its sequences and completions just then."""
    request = Request(0, [3, 1, 4], SamplingParams(n=2), arrival_s=10.0)
    generation = Generation(request)
    assert not generation.finished
    assert request.made_sequences == ()
    sequences = [completion.sequence for completion in generation.completions]
    assert sequences == list(request.sequences) == list(request.made_sequences)


def test_two_threads_that_ask_at_once_skip_no_completion() -> None:
    generation = generation_of(n=2)

    class AskedAtOnce(Completion):
        @property
        def finish_reason(self) -> FinishReason:  # type: ignore[override]
            if not asked:
                asked.append(self)
                assert not generation.finished  # the other thread, in the middle of this one
            return "length"

        @finish_reason.setter
        def finish_reason(self, reason: FinishReason | None) -> None:
            """Set by the dataclass."""

    asked: list[Completion] = []
    generation.completions[0] = AskedAtOnce(generation.completions[0].sequence)
    assert not generation.finished
    assert asked
    generation.completions[1].finish("length")
    assert generation.finished
