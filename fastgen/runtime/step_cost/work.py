"""The work of a step, as far as its time depends on it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple


class StepWork(NamedTuple):
    """The work of a step, as far as its time depends on it."""

    num_tokens: int
    # Tokens read from the context, each its own included, summed over all sequences.
    num_context: int
    # Tokens read by each token of a chunk, summed over all chunks.
    num_pairs: int
    # Tokens that need logits: one for each sequence that is given a token, and one for each of its drafts.
    num_rows: int = 0
    # Parts of prompts, and decodes with drafts.
    num_chunks: int = 0
    # 1 where its batch is built; 0 for the same decodes as in the step before, whose batch is continued.
    num_built: int = 0

    def with_chunk(self, start: int, num_tokens: int, num_rows: int = 0) -> StepWork:
        """Returns this work with tokens ``start .. start + num_tokens - 1`` of one sequence more, of which the last
        ``num_rows`` need logits.
        """
        return StepWork(
            self.num_tokens + num_tokens,
            self.num_context + start + num_tokens,
            self.num_pairs + chunk_pairs(start, num_tokens),
            self.num_rows + num_rows,
            self.num_chunks + 1,
            1,
        )


def chunk_pairs(start: int, num_tokens: int) -> int:
    """Returns how many tokens those from ``start`` to ``start + num_tokens - 1`` of a sequence read, each its own
    included.
    """
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def decode_work(positions: SequenceOf[int]) -> StepWork:
    """Returns the work of decodes at these positions, and nothing else."""
    num_decodes = len(positions)
    return StepWork(num_decodes, sum(positions) + num_decodes, 0, num_decodes)
