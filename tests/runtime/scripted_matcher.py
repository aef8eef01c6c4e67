"""A matcher that allows what a test says, for samplers without a grammar."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fastgen.runtime.requests.constraint import Mask


class ScriptedMatcher:
    """Allows the tokens of ``allowed``, the same at every step."""

    error = ""
    is_complete = is_late = False

    def __init__(self, allowed: Iterable[int], vocab_size: int):
        words = [0] * -(-vocab_size // 32)
        for token_id in allowed:
            words[token_id // 32] |= 1 << token_id % 32
        self._mask = np.array(words, np.uint32).view(np.int32)

    def prepare(self) -> None:
        pass

    def is_ready(self, deadline_s: float) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        pass

    def mask(self) -> Mask:
        return self._mask

    def advance(self, token_id: int) -> bool:
        return False
