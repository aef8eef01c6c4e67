"""The updates that the engine's progress becomes."""

from __future__ import annotations

import pytest

from fastgen.runtime.requests.outputs import RequestMetrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.answers import Answers, TextRules
from fastgen.serving.engine.messages import End, Progress

END = End("length", None, None, RequestMetrics(queue_s=0.0, ttft_s=0.1), 0.0)
ALL = Progress(7, 1, [5, 6, 9], [{5: -1.0}, {6: -2.0}, {9: -3.0}], END, [None, {3: -4.0}])


def answers(*, reports_each_token: bool) -> Answers:
    codec = TextCodec(None, eos_token_ids=frozenset(), default_sampling=SamplingParams())
    return Answers([2, 3], SamplingParams(n=2), codec, TextRules(reports_each_token=reports_each_token))


def test_each_token_has_an_update_of_its_own_where_that_is_wanted() -> None:
    assert answers(reports_each_token=True).parts(ALL) == [
        Progress(7, 1, [5], [{5: -1.0}], None, [None, {3: -4.0}]),
        Progress(7, 1, [6], [{6: -2.0}], None),
        Progress(7, 1, [9], [{9: -3.0}], END),
    ]
    assert answers(reports_each_token=True).parts(Progress(7, 0, [5, 6], None, None)) == [
        Progress(7, 0, [5], None, None),
        Progress(7, 0, [6], None, None),
    ]


@pytest.mark.parametrize("token_ids", [[], [5]])
def test_one_token_or_none_is_one_update(token_ids: list[int]) -> None:
    progress = Progress(7, 0, token_ids, None, END)
    assert answers(reports_each_token=True).parts(progress) == [progress]


def test_usually_all_tokens_are_one_update() -> None:
    assert answers(reports_each_token=False).parts(ALL) == [ALL]
