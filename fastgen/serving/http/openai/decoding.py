"""Texts of given token ids. Those of a million ids take seconds, so they are found in pieces, between which other
requests have their turn.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import islice

from fastgen.runtime.text.codec import TextCodec

# Token ids that are decoded at once. Each may take some hundredths of a millisecond.
_PIECE_IDS = 32


def decoding(codec: TextCodec, token_ids: Sequence[int]) -> Generator[None, None, str]:
    """Decodes ``token_ids`` as ``codec.decode`` does, and yields after each piece. Raises what that does."""
    texts, pieces = [], codec.pieces(token_ids)
    while batch := [*islice(pieces, _PIECE_IDS)]:
        texts.append("".join(batch))
        yield
    return "".join(texts)


def echoing(
    codec: TextCodec, prompts: Iterable[str | list[int]], prompt_ids: Iterable[list[int]]
) -> Generator[None, None, list[str]]:
    """Returns the texts of ``prompts``, and yields after each piece of decoding them. Token ids have none without a
    tokenizer. Raises what ``codec.decode`` does.
    """
    texts = []
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if isinstance(prompt, str):
            texts.append(prompt)
        else:
            texts.append((yield from decoding(codec, ids)) if codec.has_tokenizer else "")
    return texts
