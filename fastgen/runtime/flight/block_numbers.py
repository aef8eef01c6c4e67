"""Numbers that say which blocks of a recording contain the same tokens, without containing tokens."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf


class BlockNumbers:
    """Numbers full blocks of tokens in order of appearance. Two blocks have the same number if their own tokens and all
    tokens before them are the same.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, token_ids: SequenceOf[int]) -> tuple[int, ...]:
        """Returns the numbers of the full blocks of ``token_ids``."""
        numbers, previous = [], -1
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            previous = self.number(previous, tuple(token_ids[end - self._block_size : end]))
            numbers.append(previous)
        return tuple(numbers)

    def number(self, previous: int, token_ids: tuple[int, ...]) -> int:
        """Returns the number of a block that follows the block with the number ``previous``."""
        return self._numbers.setdefault((previous, token_ids), len(self._numbers))

    def behind_prompt(self, token_ids: SequenceOf[int], num_prompt_tokens: int) -> tuple[int, ...]:
        """Returns the numbers of the blocks after those that the prompt fills by itself."""
        return self.of(token_ids)[num_prompt_tokens // self._block_size :]
