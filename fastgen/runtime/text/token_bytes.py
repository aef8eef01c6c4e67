"""The bytes that a single token stands for, independent of its neighbours."""

from __future__ import annotations

import json
from typing import Any

from fastgen.runtime.text.detokenizer import REPLACEMENT, TokenDecoder


class TokenBytes:
    """The bytes that each id adds to a text. A special token has the bytes of its spelling, although no text shows
    them. An id that the tokenizer does not know has none.
    """

    def __init__(self, tokenizer: Any, decoder: TokenDecoder):
        self._tokenizer, self._decoder = tokenizer, decoder
        self._bytes_of_characters = _byte_alphabet() if _is_byte_level(tokenizer) else {}
        self._kept: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        if token_id not in self._kept:
            self._kept[token_id] = self._look_up(token_id)
        return self._kept[token_id]

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._decoder.byte_values:
            return bytes([self._decoder.byte_values[token_id]])
        if not self._decoder.is_text(token_id):
            spelling = self._tokenizer.convert_ids_to_tokens(token_id)
            return spelling.encode() if isinstance(spelling, str) else b""
        # After itself, so that a leading space of the token is not taken for the start of the text.
        once, twice = self._decoder.decode([token_id]), self._decoder.decode([token_id, token_id])
        if REPLACEMENT not in twice:
            return twice[len(once) :].encode()
        spelling = self._tokenizer.convert_ids_to_tokens(token_id)
        if all(character in self._bytes_of_characters for character in spelling):
            return bytes(self._bytes_of_characters[character] for character in spelling)
        return once.encode()


def _is_byte_level(tokenizer: Any) -> bool:
    """Returns whether tokens are spelled in characters that stand for one byte each."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    return any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [decoder]))


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character in GPT-2's alphabet: printable characters as they are, the others from U+0100
    on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
