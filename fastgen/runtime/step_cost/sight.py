"""Counts what layers with a sliding window read of their context, which is at most the window."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from fastgen.runtime.step_cost.work import StepWork, chunk_pairs


class Sight(NamedTuple):
    """The layers of a model that have the same window, and their share of its work."""

    # Positions that a token attends to, its own included; ``None`` for all.
    window: int | None
    # Their share of the bytes of a token's keys and values, and of the arithmetic of attention.
    context_share: float
    pair_share: float


# Every layer reads all of its context.
EVERYTHING: SequenceOf[Sight] = ()


def seen_work(
    work: StepWork, positions: Iterable[int], chunks: SequenceOf[tuple[int, int]], sights: SequenceOf[Sight]
) -> StepWork:
    """Returns ``work``, which was counted without windows, with the context and the pairs that layers with these
    ``sights`` read.

    :param positions: the position of each decode.
    :param chunks: the first position and the number of tokens of each chunk.
    """
    if not sights:
        return work
    context = sum(seen_context(position, 1, sights) for position in positions)
    context += sum(seen_context(start, num_tokens, sights) for start, num_tokens in chunks)
    pairs = sum(seen_pairs(start, num_tokens, sights) for start, num_tokens in chunks)
    return work._replace(num_context=round(context), num_pairs=round(pairs))


def seen_context(start: int, num_tokens: int, sights: SequenceOf[Sight] = EVERYTHING) -> float:
    """Returns how many positions of a sequence the tokens from ``start`` to ``start + num_tokens - 1`` read, as a mean
    over the layers. A position that several of these tokens read counts once.
    """
    end = start + num_tokens
    if not sights:
        return end
    return sum(share * (end if window is None else min(end, window + num_tokens - 1)) for window, share, _ in sights)


def seen_pairs(start: int, num_tokens: int, sights: SequenceOf[Sight] = EVERYTHING) -> float:
    """Returns how many positions each of the tokens from ``start`` to ``start + num_tokens - 1`` of a sequence reads,
    its own included, summed over these tokens. It is the mean over the layers.
    """
    if not sights:
        return chunk_pairs(start, num_tokens)
    total = 0.0
    for window, _, share in sights:
        growing = num_tokens if window is None else min(num_tokens, max(0, window - start))
        total += share * (chunk_pairs(start, growing) + (num_tokens - growing) * (window or 0))
    return total
