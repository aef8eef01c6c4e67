"""The updates that the engine's progress becomes."""

from __future__ import annotations

import pytest

from fastgen.runtime.requests.outputs import RequestMetrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.answers import Answers, TextRules
from fastgen.serving.engine.messages import End, Progress
from fastgen.serving.engine.packed_logprobs import pack
from tests.serving.scripted import scripted_codec

END = End("length", None, None, RequestMetrics(queue_s=0.0, ttft_s=0.1), 0.0)
ALL = Progress(7, 1, [5, 6, 9], pack([{5: -1.0}, {6: -2.0}, {9: -3.0}]), END, pack([None, {3: -4.0}]))


def answers(*, reports_each_token: bool) -> Answers:
    codec = TextCodec(None, eos_token_ids=frozenset(), default_sampling=SamplingParams())
    return Answers([2, 3], SamplingParams(n=2), codec, TextRules(reports_each_token=reports_each_token))


def test_each_token_has_an_update_of_its_own_where_that_is_wanted() -> None:
    assert answers(reports_each_token=True).parts(ALL) == [
        Progress(7, 1, [5], pack([{5: -1.0}]), None, pack([None, {3: -4.0}])),
        Progress(7, 1, [6], pack([{6: -2.0}]), None),
        Progress(7, 1, [9], pack([{9: -3.0}]), END),
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


def test_an_output_is_all_that_its_updates_had() -> None:
    codec = TextCodec(None, eos_token_ids=frozenset(), default_sampling=SamplingParams())
    found = Answers([2, 3], SamplingParams(n=2, logprobs=0), codec)
    failed = End("error", "bad luck", -0.5, RequestMetrics(queue_s=0.0, ttft_s=0.2), None)
    found.add(Progress(7, 1, [5], pack([{5: -1.0}]), None))
    found.add(Progress(7, 1, [6, 9], pack([{6: -2.0}, {9: -3.0}]), END))
    assert not found.finished
    update = found.add(Progress(7, 0, [8], pack([{8: -4.0}]), failed, pack([None, {3: -5.0}])))
    assert found.finished
    assert (update.index, update.text, update.token_ids, list(update.logprobs or ())) == (0, "", [8], [{8: -4.0}])
    assert (update.end, list(update.prompt_logprobs or ())) == (failed, [None, {3: -5.0}])
    first, second = found.output(11).completions
    for output in (first, second):
        assert (output.request_id, output.prompt_token_ids) == (11, [2, 3])
        assert list(output.prompt_logprobs or ()) == [None, {3: -5.0}]
    assert (first.index, first.token_ids, list(first.logprobs or ())) == (0, [8], [{8: -4.0}])
    assert (first.finish_reason, first.error, first.score) == ("error", "bad luck", -0.5)
    assert (second.index, second.token_ids, second.finish_reason) == (1, [5, 6, 9], "length")
    assert list(second.logprobs or ()) == [{5: -1.0}, {6: -2.0}, {9: -3.0}]
    assert (second.error, second.score, second.metrics.ttft_s) == (None, None, 0.1)


@pytest.mark.parametrize(("includes_stop", "num_shown"), [(False, 2), (True, 3)])
def test_the_stop_token_has_a_text_where_that_is_wanted(includes_stop: bool, num_shown: int) -> None:
    codec = scripted_codec()
    token_ids = codec.encode_text("the cat sat", add_special_tokens=False)[:3]
    sampling = SamplingParams(stop_token_ids=(token_ids[-1],))
    found = Answers([2], sampling, codec, TextRules(includes_stop=includes_stop))
    texts = [found.add(Progress(7, 0, [each], None, None)).text for each in token_ids[:2]]
    texts.append(found.add(Progress(7, 0, token_ids[2:], None, END)).text)
    output = found.output(7)
    assert output.text == "".join(texts) == codec.tokenizer.decode(token_ids[:num_shown])
    assert (output.token_ids, output.logprobs) == (token_ids, None)
