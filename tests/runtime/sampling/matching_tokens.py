"""Helpers for tests of masks: the matcher of a format, the tokens that it allows, and the text of each token."""

from __future__ import annotations

from typing import Any

from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.matcher import Matcher
from fastgen.runtime.sampling.structured_output import Grammars
from fastgen.runtime.text.detokenizer import TokenDecoder
from tests.runtime.constrained import (
    VOCAB_SIZE,
)


def matcher(grammars: Grammars, response_format: dict[str, Any], **fields: Any) -> Matcher:
    constraint = grammars.constraint(SamplingParams(response_format=response_format, **fields))  # type: ignore[arg-type]
    assert constraint is not None
    return constraint.matcher()


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    words = matcher.mask()
    assert words.shape == (-(-vocab_size // 32),)
    return {token_id for token_id in range(32 * len(words)) if words[token_id // 32] >> token_id % 32 & 1}


def texts_of(tokenizer: Any) -> dict[int, bytes]:
    """Returns what each token adds to a text, by its spelling. Special tokens and unknown ids are left out."""
    byte_of = {letter: byte for byte, letter in _byte_letters().items()}
    decoder = TokenDecoder(tokenizer)
    return {
        token_id: bytes(byte_of[letter] for letter in spelling)
        for spelling, token_id in tokenizer.get_vocab().items()
        if decoder.is_text(token_id)
    }


def _byte_letters() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones as they are, the others from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}
