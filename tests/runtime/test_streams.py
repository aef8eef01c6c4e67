"""Streams of several completions, and of what is asked of a stream at the wrong time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import fastgen
from fastgen.errors import FastgenError
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.llm import LLM
from tests.runtime.checkpoints import save_checkpoint

PROMPT = [5, 17, 99, 3]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with fastgen.load(save_checkpoint("llama", tmp_path_factory.mktemp("llama"))) as llm:
        yield llm


def test_chunks_of_one_step_come_in_the_order_of_their_completions(llm: LLM) -> None:
    stream = llm.stream(PROMPT, n=3, max_new_tokens=4, ignore_eos=True)
    # The first computes the prompt, and in the next step the others join it.
    assert [chunk.index for chunk in stream] == [0, *[0, 1, 2] * 3, 1, 2]


def test_what_was_ready_when_the_stream_was_closed_is_dropped(llm: LLM) -> None:
    stream = llm.stream(PROMPT, n=3, max_new_tokens=4, ignore_eos=True)
    assert [next(stream).index for _ in range(2)] == [0, 0]  # those of the other two completions are ready
    stream.close()
    assert list(stream) == []
    assert [len(completion.token_ids) for completion in stream.output.completions] == [2, 1, 1]


def test_the_output_is_there_at_the_end_only(llm: LLM) -> None:
    with llm.stream(PROMPT, max_new_tokens=4, ignore_eos=True) as stream:
        next(stream)
        with pytest.raises(FastgenError, match="the stream has not ended"):
            _ = stream.output
        rest = [chunk.finish_reason for chunk in stream]
    assert rest == [None, None, "length"]
    assert (stream.output.finish_reason, len(stream.output.token_ids)) == ("length", 4)


def test_nothing_is_kept_of_streams_that_ended(llm: LLM) -> None:
    def num_generations() -> int:
        llm.generate(PROMPT, max_new_tokens=1)
        gc.collect()
        return sum(isinstance(each, Generation) for each in gc.get_objects())

    before = num_generations()
    for _ in range(3):
        list(llm.stream(PROMPT, max_new_tokens=2))
    assert num_generations() == before
