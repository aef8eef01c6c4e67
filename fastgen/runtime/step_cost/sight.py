"""What layers with a sliding window read of their context: at most the window."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from fastgen.runtime.step_cost.work import StepWork, chunk_pairs


class Sight(NamedTuple):
    """The layers whose tokens see equally far back, and their part of the model."""

    # Positions that a token sees, its own included; ``None`` for all.
    window: int | None
    # Their share of the keys and values of a token, and of the arithmetic of attention.
    context_share: float
    pair_share: float


# Every layer reads all of its context.
EVERYTHING: SequenceOf[Sight] = ()


def seen_work(
    work: StepWork, positions: Iterable[int], chunks: SequenceOf[tuple[int, int]], sights: SequenceOf[Sight]
) -> StepWork:
    """Returns ``work``, which is of a step without windows, with what layers of these ``sights`` read of the context.

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
    """Returns how many tokens those from ``start`` to ``start + num_tokens - 1`` of a sequence read, each counted once:
    all that the first of them sees, and the others. It is the mean over the layers.
    """
    end = start + num_tokens
    if not sights:
        return end
    return sum(share * (end if window is None else min(end, window + num_tokens - 1)) for window, share, _ in sights)


def seen_pairs(start: int, num_tokens: int, sights: SequenceOf[Sight] = EVERYTHING) -> float:
    """Returns how many tokens those from ``start`` to ``start + num_tokens - 1`` of a sequence read, each its own
    included, summed over them. It is the mean over the layers.
    """
    if not sights:
        return chunk_pairs(start, num_tokens)
    total = 0.0
    for window, _, share in sights:
        growing = num_tokens if window is None else min(num_tokens, max(0, window - start))
        total += share * (chunk_pairs(start, growing) + (num_tokens - growing) * (window or 0))
    return total
