"""Tokenizers with regular expressions of their own encode texts in another process, with limited time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastgen.errors import CheckpointError, InvalidArgumentError
from fastgen.models.checkpoint.hub import locate
from fastgen.runtime.text.tokenizer_checks import KNOWN_PATTERNS, check_tokenizer, has_unknown_patterns
from fastgen.serving.isolated.encoding.encoder import Encoded, Text, TextEncoder
from fastgen.serving.isolated.encoding.process import begin
from tests.fast import cases

# At each place of a text of these letters it looks at all the rest twice, so that its time grows with the third power.
CUBIC = "[ab]*[ab]*[cd]|."
# Stopped by the library itself after ten million steps, which raises no ``Exception``.
EXPONENTIAL = "(a+)+$|."
HOSTILE = "a" * 3000


def with_pattern(pattern: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(scope="module")
def cubic() -> Iterator[TextEncoder]:
    encoder = TextEncoder(with_pattern(CUBIC))
    yield encoder
    encoder.processes.close()


def test_which_tokenizers_have_patterns_of_their_own() -> None:
    assert has_unknown_patterns(with_pattern(CUBIC))
    assert not any(has_unknown_patterns(with_pattern(pattern)) for pattern in KNOWN_PATTERNS)
    assert not has_unknown_patterns(AutoTokenizer.from_pretrained(locate("tiny-llama")))
    assert not has_unknown_patterns(None)
    tokenizer = with_pattern(" {2,}")
    inner = normalizers.Replace(Regex("(x+)+y"), "")
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), inner])
    assert has_unknown_patterns(tokenizer)


def test_a_decoder_with_a_pattern_is_refused() -> None:
    tokenizer = with_pattern(" {2,}")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("(x+)+y"), "")])
    with pytest.raises(CheckpointError, match="decoder of its tokenizer has a regular expression"):
        check_tokenizer(tokenizer)


@pytest.mark.parametrize("text", ["", "abba", "a<unk>b", "é好 a" * 10, "ab" * 20])
def test_ids_are_those_of_transformers(cubic: TextEncoder, text: str) -> None:
    tokenizer = with_pattern(CUBIC)
    for special in (True, False):
        assert cubic.encode(text, special) == tokenizer(text, add_special_tokens=special)["input_ids"]


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_are_those_of_transformers(special: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(locate("tiny-llama"))
    encoder = TextEncoder(tokenizer)
    try:
        for text in ("Once upon a time", "<s>a</s>", "  é👍\n"):
            assert encoder.encode(text, special) == tokenizer(text, add_special_tokens=special)["input_ids"]
    finally:
        encoder.processes.close()


def test_texts_are_neither_cut_nor_filled_up_as_the_tokenizer_wants_it() -> None:
    tokenizer: Any = with_pattern(CUBIC).backend_tokenizer
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    encode = begin(tokenizer.to_str().encode())
    answer = encode(msgspec.msgpack.encode(Text("abba", True)))
    assert msgspec.msgpack.decode(answer, type=Encoded).ids == [0, 1, 1, 0]


def test_ctrl_c_in_a_terminal_does_not_end_the_process(cubic: TextEncoder) -> None:
    assert cubic.encode("ab", True) == [0, 1]
    before = {*cubic.processes._processes}
    for process in before:
        os.kill(process.pid, signal.SIGINT)
    assert cubic.encode("ba", True) == [1, 0]
    assert cubic.processes._processes == before


def test_a_text_that_takes_too_long_is_refused_and_the_next_is_encoded(cubic: TextEncoder) -> None:
    with pytest.raises(InvalidArgumentError, match="more than 2 s of processor time"):
        cubic.encode(HOSTILE, True)
    assert cubic.encode("ab", True) == [0, 1]


def test_an_expression_that_the_library_stops_is_a_refusal() -> None:
    encoder = TextEncoder(with_pattern(EXPONENTIAL))
    try:
        with pytest.raises(InvalidArgumentError, match=r"cannot encode this text: .*retry-limit"):
            encoder.encode("a" * 60 + "b", True)
        assert encoder.encode("a", True) == [0]
    finally:
        encoder.processes.close()


@pytest.mark.parametrize("pattern", cases(sorted(KNOWN_PATTERNS), fast=sorted(KNOWN_PATTERNS)[-2:]))
def test_the_time_of_known_patterns_is_proportional_to_the_text(pattern: str) -> None:
    """Four times the text takes about four times as long; the square would be sixteen."""
    tokenizer: Any = with_pattern(pattern)
    for unit in ("a", " ", "1", "\n", "'", "!", " a", "  \n", "\t ", "é", "' ", "a1"):
        times_s = []
        for size in (30_000, 120_000):
            text = (unit * size)[:size] + "b"
            times_s.append(min(_time_of(tokenizer, text) for _ in range(3)))
        assert times_s[1] < 10 * times_s[0] + 0.05, unit


def _time_of(tokenizer: Any, text: str) -> float:
    began_s = time.process_time()
    tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return time.process_time() - began_s
