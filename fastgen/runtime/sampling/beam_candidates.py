"""Takes the candidates of a beam search from rows of logits: the likeliest next tokens and their scores.

Penalties, bias and the tokens that ``min_new_tokens`` forbids apply to log-probabilities here, and to logits in
ordinary sampling. Nothing is normalised after them. transformers' logits processors do the same in a beam search. The
arithmetic is torch's on every target, row by row, so other requests in the batch do not change a score.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from fastgen.compile.ops.sampling.reference import Adjustments, adjust, likeliest
from fastgen.runtime.requests.outputs import Logprobs
from fastgen.runtime.requests.sampled import Candidate
from fastgen.runtime.sampling.host_copy import HostCopies


def beam_candidates(
    logits: Tensor, counts: SequenceOf[int], adjustments: Adjustments | None, num_logprobs: SequenceOf[int | None]
) -> Callable[[], list[list[Candidate]]]:
    """Computes the ``counts[row]`` likeliest tokens after each row of ``logits [R, V]``, or all that are possible, best
    first.

    ``adjustments`` are those of the rows. A row with ``num_logprobs`` reports that many alternatives beside each
    candidate, by the model's own distribution. Returns a function that waits for the candidates; ``logits`` may be
    overwritten before it is called.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    adjusted = log_probs if adjustments is None else adjust(log_probs, adjustments)
    scores, ids = likeliest(adjusted, min(max(counts), logits.shape[1]))
    raw = log_probs.gather(1, ids)
    most = max((number for number in num_logprobs if number is not None), default=0)
    # One more than requested, since the token itself may be among the likeliest.
    top, top_ids = likeliest(log_probs, min(most + 1, logits.shape[1]) if most else 0)
    copies = HostCopies([ids, scores, raw, top_ids, top])

    def candidates() -> list[list[Candidate]]:
        return [_candidates(*row) for row in zip(counts, num_logprobs, *map(Tensor.tolist, copies.wait()), strict=True)]

    return candidates


def _candidates(
    count: int,
    num_logprobs: int | None,
    ids: list[int],
    scores: list[float],
    raw: list[float],
    top_ids: list[int],
    top: list[float],
) -> list[Candidate]:
    alternatives = list(zip(top_ids, top, strict=True))
    return [
        Candidate(token_id, score, _reported(token_id, own, alternatives, num_logprobs))
        for token_id, score, own in list(zip(ids, scores, raw, strict=True))[:count]
        if score > -torch.inf
    ]


def _reported(token_id: int, own: float, alternatives: list[tuple[int, float]], count: int | None) -> Logprobs | None:
    if count is None:
        return None
    return {token_id: own, **dict([each for each in alternatives if each[0] != token_id][:count])}
