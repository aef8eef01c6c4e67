"""Log-probabilities that JSON, and tokens that text, cannot hold."""

from __future__ import annotations

import math
import re

from fastgen.serving.http.openai.logprobs import CompletionLogprobsWriter, chat_logprobs
from tests.serving.scripted import scripted_codec


def test_an_impossible_token_has_minus_9999() -> None:
    codec, logprobs = scripted_codec(), {300: -0.5, 301: -math.inf}
    (of_chat,) = chat_logprobs(codec, [300], [logprobs], 2)["content"]
    assert [each["logprob"] for each in of_chat["top_logprobs"]] == [-0.5, -9999.0]
    (of_completion,) = CompletionLogprobsWriter(codec, 2, {}).write([300], [logprobs])["top_logprobs"]
    assert of_completion is not None
    assert [*of_completion.values()] == [-0.5, -9999.0]


def test_a_token_that_is_no_whole_character_is_spelled_by_its_bytes() -> None:
    codec = scripted_codec()
    token_id = codec.encode_text("👍", add_special_tokens=False)[-1]
    (token,) = CompletionLogprobsWriter(codec, 0, {}).write([token_id], [None])["tokens"]
    assert re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", token)
    assert bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) == codec.token_bytes(token_id)


def test_the_likeliest_tokens_come_first_and_the_chosen_one_is_always_there() -> None:
    codec = scripted_codec()
    likeliest_first = [codec.encode_text(f" {word}", add_special_tokens=False)[0] for word in ("the", "was", "and")]
    logprobs = dict(zip(reversed(likeliest_first), (-3.0, -2.0, -1.0), strict=True))
    names = [codec.token_bytes(token_id).decode() for token_id in likeliest_first]
    assert len({*names}) == 3
    for num_top, chosen, wanted in ((0, 2, [2]), (1, 0, [0]), (1, 2, [0, 2]), (2, 2, [0, 1, 2]), (2, 0, [0, 1])):
        chosen_id = likeliest_first[chosen]
        found = CompletionLogprobsWriter(codec, num_top, {}).write([chosen_id], [logprobs])
        assert [*found["token_logprobs"]] == [-1.0 - chosen]
        (top,) = found["top_logprobs"]
        assert top == {names[rank]: -1.0 - rank for rank in wanted}
        assert [*top] == [names[rank] for rank in wanted], "in this order"
        (of_chat,) = chat_logprobs(codec, [chosen_id], [logprobs], num_top)["content"]
        assert (of_chat["token"], of_chat["logprob"]) == (names[chosen], -1.0 - chosen)
        assert bytes(of_chat["bytes"]).decode() == names[chosen]
        assert [each["token"] for each in of_chat["top_logprobs"]] == names[:num_top]


def test_offsets_begin_after_the_prompt_and_end_with_the_text() -> None:
    codec = scripted_codec()
    ids = codec.encode_text("Once upon a time", add_special_tokens=False)
    starts = [len(codec.decode(ids[:number])) for number in range(len(ids))]
    writer = CompletionLogprobsWriter(codec, 0, {}, start=100)
    first, rest = writer.write(ids[:2], [None] * 2), writer.write(ids[2:], [None] * (len(ids) - 2), 100 + starts[-2])
    assert first["text_offset"] == [100 + start for start in starts[:2]]
    assert rest["text_offset"] == [*(100 + start for start in starts[2:-1]), 100 + starts[-2]]
    assert [*first["token_logprobs"]] == [*first["top_logprobs"]] == [None] * 2
