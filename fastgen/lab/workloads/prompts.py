"""Tokens of prompts without a text: drawn, the same for the same seed."""

from __future__ import annotations

import hashlib

import numpy as np

from fastgen.errors import InvalidArgumentError


def generator(seed: int, *parts: str | int) -> np.random.Generator:
    """Returns a generator of random numbers that depends on ``seed`` and on ``parts``, and on nothing else.

    Each purpose has a generator of its own (``parts`` name it), so that a new draw for one leaves the others unchanged.
    """
    name = "\0".join(map(str, (seed, *parts))).encode(errors="surrogatepass")  # JSON may name halves of characters
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name).digest()[:16], "little"))


def drawn_ids(draw: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Returns ``count`` token ids, each below ``vocab_size`` and equally likely.

    :raises InvalidArgumentError: if the vocabulary has no token.
    """
    if vocab_size < 1:
        raise InvalidArgumentError(f"vocab_size={vocab_size}: expected an integer of at least 1")
    found: list[int] = draw.integers(0, vocab_size, count).tolist()
    return found


def drawn_length(draw: np.random.Generator, mean: int, range_ratio: float) -> int:
    """Returns a length of at least 1 between ``mean * (1 - range_ratio)`` and ``mean * (1 + range_ratio)``; all are
    equally likely.
    """
    low, high = round(mean * (1 - range_ratio)), round(mean * (1 + range_ratio))
    return max(1, int(draw.integers(low, high, endpoint=True)))


def same_ids(seed: int, name: str | int, count: int, vocab_size: int) -> list[int]:
    """Returns ``count`` token ids that are the same whenever ``seed``, ``name`` and ``vocab_size`` are: the first
    tokens of an endless sequence that ``name`` stands for. Prompts share a prefix by sharing names.
    """
    return drawn_ids(generator(seed, "named", name), count, vocab_size)
