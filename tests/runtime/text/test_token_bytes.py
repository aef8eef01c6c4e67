"""A token's bytes are what it adds to a text, for every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastgen.models.checkpoint.hub import locate
from fastgen.runtime.text.codec import TextCodec
from fastgen.runtime.text.detokenizer import TokenDecoder
from fastgen.runtime.text.token_bytes import TokenBytes


def metaspace() -> PreTrainedTokenizerFast:
    """Spaces as U+2581, and a token for each byte: Llama 2's way."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ("▁Once", "▁upon", "▁", "a", "▁a", "é", "<s>"):
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def word_pieces() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece({"once": 0, "##ly": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def bytes_in_a_sequence() -> PreTrainedTokenizerFast:
    """GPT-2's alphabet, and a decoder that is the first step of several."""
    tokenizer = Tokenizer(models.BPE({"Ã": 0, "©": 1, "Ġa": 2}, []))
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.from_checkpoint(Path(locate("tiny-llama")), {})


@given(text=st.text(max_size=40))
def test_the_bytes_of_byte_level_tokens_are_the_text(codec: TextCodec, text: str) -> None:
    token_ids = codec.encode_text(text, add_special_tokens=False)
    if not any(token_id in codec.tokenizer.all_special_ids for token_id in token_ids):
        assert b"".join(map(codec.token_bytes, token_ids)) == text.encode()


def test_special_and_unknown_tokens(codec: TextCodec) -> None:
    assert codec.token_bytes(0) == b"<|bos|>"
    assert codec.token_bytes(10**6) == b""
    assert TextCodec(None, eos_token_ids=frozenset(), default_sampling=codec.default_sampling).token_bytes(1) == b""


@pytest.mark.parametrize(
    ("token", "expected"),
    [("▁Once", " Once"), ("a", "a"), ("▁a", " a"), ("▁", " "), ("é", "é"), ("<s>", "<s>")],
)
def test_metaspaces_are_spaces_even_where_a_text_would_begin(token: str, expected: str) -> None:
    tokenizer = metaspace()
    of = TokenBytes(tokenizer, TokenDecoder(tokenizer))
    assert of[tokenizer.convert_tokens_to_ids(token)] == expected.encode()
    assert [of[byte] for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_word_pieces_have_the_space_before_a_word() -> None:
    tokenizer = word_pieces()
    of = TokenBytes(tokenizer, TokenDecoder(tokenizer))
    assert [of[0], of[1]] == [b" once", b"ly"]


def test_halves_of_a_character_have_their_byte_also_where_decoders_follow_each_other() -> None:
    tokenizer = bytes_in_a_sequence()
    of = TokenBytes(tokenizer, TokenDecoder(tokenizer))
    assert [of[0] + of[1], of[0], of[1], of[2]] == ["é".encode(), b"\xc3", b"\xa9", b" a"]
