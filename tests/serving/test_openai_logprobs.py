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
