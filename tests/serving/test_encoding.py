"""Tokenizers that may take long for some texts encode them in another process, with limited time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastgen.errors import CheckpointError, InvalidArgumentError
from fastgen.models.checkpoint.hub import locate
from fastgen.runtime.text.codec import TextCodec
from fastgen.runtime.text.tokenizer_checks import (
    KNOWN_PATTERNS,
    check_can_be_served,
    check_tokenizer,
    may_encode_slowly,
)
from fastgen.serving.engine.messages import EngineFacts
from fastgen.serving.isolated.encoding.encoder import Encoded, Text, TextEncoder
from fastgen.serving.isolated.encoding.process import begin
from fastgen.serving.service import Service
from tests.fast import cases
from tests.serving.fake_engine import FACTS

# At each place of a text of these letters it looks at all the rest twice, so that its time grows with the third power.
CUBIC = "[ab]*[ab]*[cd]|."
# Stopped by the library itself after ten million steps, which raises no ``Exception``.
EXPONENTIAL = "(a+)+$|."
HOSTILE = "a" * 3000


VOCABULARY = {"a": 0, "b": 1, "<unk>": 2}
# A table that makes eighteen characters of one, as SentencePiece's own does.
TABLE = normalizers.Precompiled(b"\4\0\0\0" + b"\0\0\0\0" + b"x" * 18 + b"\0")


def with_parts(
    model: Any = None, *, normalizer: Any = None, pre_tokenizer: Any = None, added: AddedToken | None = None
) -> PreTrainedTokenizerFast:
    tokenizer: Any = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>") if model is None else model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    if added is not None:
        tokenizer.add_tokens([added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def with_pattern(pattern: str) -> PreTrainedTokenizerFast:
    return with_parts(pre_tokenizer=pre_tokenizers.Split(Regex(pattern), "isolated"))


def unigram(longest: int) -> models.Unigram:
    """Returns a model whose tokens are ``a``, ``aa`` and so on, up to ``longest`` characters."""
    return models.Unigram([("<unk>", 0.0), *(("a" * size, -float(size)) for size in range(1, longest + 1))], 0, False)


def bpe(dropout: float | None = None) -> models.BPE:
    """Returns a model without a pre-tokenizer whose tokens have up to 4096 characters."""
    sizes = [1 << power for power in range(13)]
    vocabulary = {"a" * size: index for index, size in enumerate(sizes)}
    return models.BPE(
        vocabulary, [("a" * size, "a" * size) for size in sizes[:-1]], dropout=dropout, byte_fallback=True
    )


def word_piece(longest_word: int) -> models.WordPiece:
    return models.WordPiece({**VOCABULARY, "##a": 3}, unk_token="<unk>", max_input_chars_per_word=longest_word)


SLOW = {
    "expression": with_pattern(CUBIC),
    "long tokens of Unigram": with_parts(unigram(1529)),
    "dropped merges": with_parts(bpe(dropout=0.999)),
    "long words of WordPiece": with_parts(word_piece(256)),
    "a long added token": with_parts(added=AddedToken("a" * 1000 + "b")),
    "an added token that becomes long": with_parts(
        normalizer=normalizers.Replace("x", "a" * 32), added=AddedToken("xxx", normalized=True)
    ),
    "an added token of spaces that takes spaces": with_parts(added=AddedToken(" ", rstrip=True, normalized=False)),
    "an added token that becomes spaces": with_parts(
        normalizer=normalizers.Replace("x", " "), added=AddedToken("x", lstrip=True, normalized=True)
    ),
    "a long text to replace": with_parts(normalizer=normalizers.Replace("b" * 10_000, "c")),
    "a long text to split at": with_parts(pre_tokenizer=pre_tokenizers.Split("b" * 10_000, "isolated")),
    "a character that becomes many": with_parts(normalizer=normalizers.Replace("x", "a" * 21)),
    "a character that becomes many in two parts": with_parts(
        normalizer=normalizers.NFKC(), pre_tokenizer=pre_tokenizers.ByteLevel(use_regex=False)
    ),
    "many rules for what a character becomes": with_parts(normalizer=normalizers.Sequence([normalizers.NFKC()] * 8)),
    # Each part of a text between added tokens gets it.
    "a long text before others": with_parts(
        normalizer=normalizers.Prepend("b" * 20), added=AddedToken("x", normalized=False)
    ),
    "many rules": with_parts(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer()] * 100)),
}
USUAL = {
    **{name: AutoTokenizer.from_pretrained(locate(name)) for name in ("tiny-llama", "tiny-mistral", "tiny-opt")},
    # Of T5, XLM-R and ALBERT.
    "Unigram": with_parts(unigram(16), pre_tokenizer=pre_tokenizers.Metaspace(), added=AddedToken("<extra_id_0>")),
    "Unigram with the longest usual tokens": with_parts(unigram(64)),
    # Of models with Unicode's compatibility characters.
    "NFKC": with_parts(unigram(16), normalizer=normalizers.NFKC(), pre_tokenizer=pre_tokenizers.Metaspace()),
    # Of T5, mT5 and XLM-R.
    "SentencePiece's table": with_parts(
        unigram(16),
        normalizer=normalizers.Sequence([TABLE, normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), "▁")]),
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    ),
    # Of Qwen and GPT-NeoX.
    "bytes": with_parts(normalizer=normalizers.NFC(), pre_tokenizer=pre_tokenizers.ByteLevel()),
    # Of Llama 2 and Mistral.
    "text before others": with_parts(
        bpe(), normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    # Of Gemma and Llama 2, which have no pre-tokenizer.
    "BPE": with_parts(bpe(), normalizer=normalizers.Replace(" ", "▁"), added=AddedToken(" " * 31)),
    "WordPiece": with_parts(
        word_piece(100), normalizer=normalizers.BertNormalizer(), pre_tokenizer=pre_tokenizers.BertPreTokenizer()
    ),
    # Of RoBERTa and Phi-3.
    "an added token that takes spaces": with_parts(added=AddedToken("<mask>", lstrip=True, rstrip=True)),
}


@pytest.fixture(scope="module")
def cubic() -> Iterator[TextEncoder]:
    encoder = TextEncoder(with_pattern(CUBIC))
    yield encoder
    encoder.processes.close()


@pytest.mark.parametrize("name", SLOW)
def test_a_tokenizer_that_may_take_long_is_told(name: str) -> None:
    check_tokenizer(SLOW[name])
    assert may_encode_slowly(SLOW[name])


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_tokenizer_encodes_in_the_process_of_the_server(name: str) -> None:
    check_tokenizer(USUAL[name])
    assert not may_encode_slowly(USUAL[name])


def test_which_tokenizers_have_patterns_of_their_own() -> None:
    assert not any(may_encode_slowly(with_pattern(pattern)) for pattern in KNOWN_PATTERNS)
    assert not may_encode_slowly(None)
    inner = normalizers.Replace(Regex("(x+)+y"), "")
    assert may_encode_slowly(with_parts(normalizer=normalizers.Sequence([normalizers.NFC(), inner])))


def test_a_model_of_an_unknown_type_may_take_long() -> None:
    backend = SimpleNamespace(
        to_str=lambda: '{"normalizer": null, "pre_tokenizer": null, "added_tokens": [], "model": {"type": "New"}}',
        normalizer=None,
    )
    assert may_encode_slowly(SimpleNamespace(backend_tokenizer=backend))


def test_a_tokenizer_in_python_is_taken_by_the_library_and_not_by_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CTRL's takes a time that grows with the square of the text's length."""
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "a": 1, "a</w>": 2, "a@@": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CTRLTokenizer"}))
    (tmp_path / "config.json").write_text("{}")
    codec = TextCodec.from_checkpoint(tmp_path, {})
    assert codec.decode(codec.encode("a a")) == "a a"
    service = Service({"model": str(tmp_path)})

    async def start() -> EngineFacts:
        return msgspec.structs.replace(FACTS, directory=str(tmp_path), tokenizer_class="CTRLTokenizer")

    monkeypatch.setattr(service.engine, "start", start)
    with pytest.raises(CheckpointError, match=r"tokenizer, CTRLTokenizer, is one in Python.* fastgen\.load takes this"):
        asyncio.run(service.start())
    assert service.state != "ready"
    check_can_be_served(None)


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


def test_long_tokens_of_unigram_take_no_more_than_the_limit() -> None:
    encoder = TextEncoder(SLOW["long tokens of Unigram"])
    try:
        with pytest.raises(InvalidArgumentError, match="more than 2 s of processor time"):
            encoder.encode("a" * 100_000, True)
        assert encoder.encode("aaa", True) == [3]
    finally:
        encoder.processes.close()


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
