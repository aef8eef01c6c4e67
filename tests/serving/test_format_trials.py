"""Formats are compiled in a process that can be stopped, before the engine's process sees them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastgen.runtime.requests.response_format import parse_response_format
from fastgen.serving.grammars.trial import FormatTrials
from tests.serving.scripted import scripted_codec


@pytest.fixture(scope="module")
def trials() -> Iterator[FormatTrials]:
    tokenizer = scripted_codec().tokenizer
    trials = FormatTrials(tokenizer, len(tokenizer))
    yield trials
    trials.processes.close()


def refusal(trials: FormatTrials, schema: dict[str, object]) -> str | None:
    response_format = parse_response_format({"type": "json_schema", "schema": schema})
    assert response_format is not None
    found = trials.refusal(response_format)
    assert trials.knows(response_format)
    assert trials.refusal(response_format) == found
    return found


def test_a_format_that_takes_too_long_to_compile_is_refused_and_the_next_is_not(trials: FormatTrials) -> None:
    assert refusal(trials, {"type": "integer", "multipleOf": 7}) is None
    endless = refusal(trials, {"type": "integer", "multipleOf": 1_000_003})
    assert endless is not None
    assert endless.endswith("is refused: it takes more than 0.5 s of processor time to compile")
    assert refusal(trials, {"type": "boolean"}) is None


def test_what_the_library_refuses_is_told_as_the_engine_would(trials: FormatTrials) -> None:
    found = refusal(trials, {"type": "string", "format": "nobody knows"})
    assert found is not None
    assert found.startswith("response_format (json_schema) is refused: ")
    assert "nobody knows" in found


def test_any_object_needs_no_trial(trials: FormatTrials) -> None:
    response_format = parse_response_format({"type": "json_object"})
    assert response_format is not None
    assert trials.knows(response_format)
