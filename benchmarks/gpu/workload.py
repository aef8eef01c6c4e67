"""Draws requests as the FastGen paper does: prompts of about 2600 tokens, answers of about 60.

Both are normal with a deviation of 30 %, at least 1, and together no longer than the model allows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.gpu.llama import LlamaShape

PROMPT, ANSWER = 2600, 60
_DEVIATION, _SEED = 0.3, 42


def lengths(shape: LlamaShape, *, toy: bool) -> Iterator[tuple[int, int]]:
    """Yields the tokens of prompt and answer of one request after the other, without end."""
    draw = random.Random(_SEED)
    prompt, answer = (5, 2) if toy else (PROMPT, ANSWER)
    while True:
        num_new = max(1, round(draw.gauss(answer, _DEVIATION * answer)))
        longest = shape.max_positions - num_new
        yield min(longest, max(1, round(draw.gauss(prompt, _DEVIATION * prompt)))), num_new
