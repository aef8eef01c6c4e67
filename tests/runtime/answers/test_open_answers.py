"""The open requests: which answers get a text, and what is said where it cannot be made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.runtime.answers.answers import Answers
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.sampling_params import SamplingParams
from tests.runtime.test_engine import Bench


@pytest.mark.parametrize(
    ("has_tokenizer", "gives_text", "stop", "is_decoded"),
    [
        (True, True, (), True),
        (True, False, (), False),
        (True, False, ("x",), True),
        (True, True, ("x",), True),
        (False, True, (), False),
    ],
)
def test_answers_are_decoded_where_a_text_is_given_or_may_end_them(
    has_tokenizer: bool, gives_text: bool, stop: tuple[str, ...], is_decoded: bool
) -> None:
    made: list[list[int]] = []

    def make(prompt_ids: Any, sampling: SamplingParams) -> object:
        made.append(list(prompt_ids))
        return made

    generation = Generation(Request(0, [3, 1], SamplingParams(n=2, stop=stop), arrival_s=0.0))
    given: Any = SimpleNamespace(new_detokenizer=make if has_tokenizer else None, gives_text=gives_text)
    Answers._prepare(given, generation)
    assert made == ([[3, 1]] * 2 if is_decoded else [])
    assert [each.detokenizer is not None for each in generation.completions] == [is_decoded] * 2


class Broken:
    """A detokenizer that cannot end a text."""

    stopped = False

    def append(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        raise ValueError("half a character")


@pytest.mark.parametrize(
    ("cause", "error"), [(None, "ValueError: half a character"), ("the step failed", "the step failed")]
)
@pytest.mark.parametrize("beam_width", [1, 2])
def test_an_error_is_said_before_that_of_the_text_which_cannot_be_made_then(
    beam_width: int, cause: str | None, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    if beam_width > 1:

        def adopt(generation: Generation, stop_ids: frozenset[int]) -> None:
            Broken().finish()

        monkeypatch.setattr(Generation, "adopt_beams", adopt)
    else:
        bench.engine.answers.new_detokenizer = lambda prompt_ids, sampling: Broken()  # type: ignore[assignment, return-value]
    generation = bench.submit(max_new_tokens=4, beam_width=beam_width, n=beam_width)
    other = bench.submit(max_new_tokens=4)
    if beam_width == 1:
        bench.engine.step()
    bench.engine.answers.cancel(generation, "error" if cause else "cancelled", cause)
    output = generation.output()
    assert [(each.finish_reason, each.error) for each in output.completions] == [("error", error)] * beam_width
    bench.engine.cancel(other)
    assert not bench.engine.has_work
