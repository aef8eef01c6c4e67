"""Sampling: from logits to token ids, with draws that depend only on (seed, position, sequence, token).

A draw is counter-based. Random bits come from Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as
easy as 1, 2, 3", SC 2011) with the request's 64-bit seed as key and (vocabulary id // 4, position, sequence index, 0)
as counter; lane ``id % 4`` of the result belongs to the id. Adding Gumbel noise ``-log(-log u)`` to log-weights and
taking the largest draws from their softmax. So a row's token does not depend on the batch, its order, or repetition.

Logits are adjusted and filtered in this order, with the meaning transformers' logits processors give to each:
repetition penalty, presence and frequency penalty, bias (−inf forbids), temperature, top-k, top-p, min-p. Where top-p
cuts between equal scores, the lowest ids are kept; transformers leaves that to an unstable sort.

Shapes: ``R`` rows (one per sampled token), ``V`` vocabulary. All arithmetic is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_FP32 = torch.finfo(torch.float32)


class RowStatus(IntEnum):
    """The outcome of sampling a row. Unless it is OK the row's token id is meaningless."""

    OK = 0
    # Its logits hold NaN or +inf.
    NOT_FINITE = 1
    # Every token has weight zero: all logits are −inf, or all are forbidden.
    NOTHING_LEFT = 2


@dataclass(frozen=True)
class Adjustments:
    """Changes to the logits of rows before sampling; neutral values leave a row as it is."""

    # ``[R, V]`` bool: the token is in the prompt or was generated.
    seen: Tensor
    # ``[R, V]`` fp32: how often the token was generated.
    counts: Tensor
    # ``[R]`` fp32, 1 is neutral.
    repetition: Tensor
    # ``[R]`` fp32, 0 is neutral.
    presence: Tensor
    # ``[R]`` fp32, 0 is neutral.
    frequency: Tensor
    # ``[R, V]`` fp32, added last; −inf forbids a token.
    bias: Tensor


@dataclass(frozen=True)
class Draws:
    """The sampling parameters of each row, all ``[R]``. Reals are fp64: a threshold is rounded once, when
    it is used.
    """

    # fp64; 0 takes the largest logit, the lowest id on ties, and ignores the other parameters.
    temperature: Tensor
    # int64; 0 keeps all.
    top_k: Tensor
    # fp64; 1 keeps all.
    top_p: Tensor
    # fp64; 0 keeps all.
    min_p: Tensor
    # int64, the 64 bits of the request's seed.
    seeds: Tensor
    # int64: the drawn token's position in its sequence; below 2**32.
    positions: Tensor
    # int64: which of its request's sequences the row is; below 2**32.
    sequence_indices: Tensor

    def rows(self, index: Tensor) -> Draws:
        """Returns the parameters of some rows."""
        return replace(self, **{item.name: getattr(self, item.name)[index] for item in fields(self)})


def sample(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draws a token for each row of ``logits [R, V]``. Returns token ids and :class:`RowStatus`, both ``[R]`` int64."""
    scores = logits.float()
    status = row_status(scores)
    scores = scores.masked_fill((status != RowStatus.OK).unsqueeze(1), 0.0)
    token_ids = scores.argmax(dim=-1)
    drawn = draws.temperature.gt(0).nonzero().squeeze(1)
    if drawn.numel():
        row_draws = draws.rows(drawn)
        weights = log_weights(scores[drawn], row_draws)
        noise = gumbel_noise(row_draws.seeds, row_draws.positions, row_draws.sequence_indices, scores.shape[1])
        token_ids[drawn] = weights.add_(noise).argmax(dim=-1)
    return token_ids, status


def row_status(logits: Tensor) -> Tensor:
    """Returns the :class:`RowStatus` ``[R]`` int64 of ``logits [R, V]`` by each row's largest value (NaN is the
    largest).
    """
    peak = logits.amax(dim=-1)
    status = torch.where(peak == -torch.inf, RowStatus.NOTHING_LEFT, RowStatus.OK)
    return status.masked_fill(peak.isnan() | (peak == torch.inf), RowStatus.NOT_FINITE)


def adjust(logits: Tensor, adjustments: Adjustments) -> Tensor:
    """Returns ``logits [R, V]`` with penalties and bias applied, fp32; the argument is unchanged."""
    scores = logits.float()
    repetition = adjustments.repetition.unsqueeze(1)
    penalised = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(adjustments.seen, penalised, scores)
    scores = scores - adjustments.presence.unsqueeze(1) * (adjustments.counts > 0)
    scores = scores - adjustments.frequency.unsqueeze(1) * adjustments.counts
    # A tiny repetition penalty may overflow. The largest number still wins; +inf would be an error, and NaN with a bias
    # of -inf.
    return scores.clamp(max=_FP32.max) + adjustments.bias


def log_weights(scores: Tensor, draws: Draws) -> Tensor:
    """Returns unnormalised log-probabilities ``[R, V]``, the largest of each row 0; −inf is filtered out.

    Every row of ``scores [R, V]`` has a finite largest value, and a temperature above 0.
    """
    scores = _filter_min_p(_filter_top_p(_filter_top_k(_temper(scores, draws), draws), draws), draws)
    # Relative to the largest, so that noise is not lost in the rounding of a large number.
    return scores - scores.amax(dim=-1, keepdim=True)


def _temper(scores: Tensor, draws: Draws) -> Tensor:
    temperature = draws.temperature.clamp(_FP32.tiny, _FP32.max).float().unsqueeze(1)
    peak = scores.amax(dim=-1, keepdim=True)
    # Scores are taken relative to the largest only where the division would overflow, since that costs a rounding.
    shift = torch.where((peak / temperature).isinf(), peak, 0.0)
    return (scores - shift) / temperature


def _filter_top_k(scores: Tensor, draws: Draws) -> Tensor:
    vocab_size = scores.shape[1]
    rows = ((draws.top_k > 0) & (draws.top_k < vocab_size)).nonzero().squeeze(1)
    if not rows.numel():
        return scores
    top_k = draws.top_k[rows]
    largest = scores[rows].topk(int(top_k.max()), dim=-1).values
    threshold = largest.gather(1, (top_k - 1).unsqueeze(1))
    return _keep(scores, rows, scores[rows] >= threshold)


def _filter_top_p(scores: Tensor, draws: Draws) -> Tensor:
    rows = (draws.top_p < 1).nonzero().squeeze(1)
    if not rows.numel():
        return scores
    # Equal scores are in falling order of id, so that the highest ids are cut off first.
    ascending, flipped_ids = scores[rows].flip(-1).sort(dim=-1, stable=True)
    below = ascending.softmax(dim=-1).cumsum(dim=-1)
    keep = below > (1 - draws.top_p[rows]).float().unsqueeze(1)
    keep[:, -1] = True
    return _keep(scores, rows, torch.empty_like(keep).scatter_(1, flipped_ids, keep).flip(-1))


def _filter_min_p(scores: Tensor, draws: Draws) -> Tensor:
    rows = (draws.min_p > 0).nonzero().squeeze(1)
    if not rows.numel():
        return scores
    probabilities = scores[rows].softmax(dim=-1)
    threshold = draws.min_p[rows].float().unsqueeze(1) * probabilities.amax(dim=-1, keepdim=True)
    return _keep(scores, rows, probabilities >= threshold)


def _keep(scores: Tensor, rows: Tensor, keep: Tensor) -> Tensor:
    return scores.index_put((rows,), scores[rows].masked_fill(~keep, -torch.inf))


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Computes Philox4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key.

    Words are int64 tensors with values in [0, 2**32); their shapes broadcast. A product wraps modulo 2**64, but its
    bits, taken by shift and mask, are those of the unsigned product.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        product0, product1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0 = (product1 >> 32 & _MASK32) ^ c1 ^ k0
        c2 = (product0 >> 32 & _MASK32) ^ c3 ^ k1
        c1, c3 = product1 & _MASK32, product0 & _MASK32
        k0, k1 = k0 + _PHILOX_KEY_STEPS[0] & _MASK32, k1 + _PHILOX_KEY_STEPS[1] & _MASK32
    return c0, c1, c2, c3


def uniforms(seeds: Tensor, positions: Tensor, sequence_indices: Tensor, vocab_size: int) -> Tensor:
    """Returns uniform numbers ``[R, V]`` fp32, strictly inside (0, 1): the upper 23 bits of each id's word, centred."""
    quads = torch.arange((vocab_size + 3) // 4, device=seeds.device).unsqueeze(0)
    seeds, positions, indices = (item.unsqueeze(1) for item in (seeds, positions, sequence_indices))
    key = (seeds & _MASK32, seeds >> 32 & _MASK32)
    lanes = philox4x32((quads, positions, indices, torch.zeros_like(indices)), key)
    words = torch.stack(lanes, dim=-1).flatten(1)[:, :vocab_size]
    return ((words >> 9).float() + 0.5) * 2.0**-23


def gumbel_noise(seeds: Tensor, positions: Tensor, sequence_indices: Tensor, vocab_size: int) -> Tensor:
    """Returns standard Gumbel noise ``[R, V]`` fp32 for ``[R]`` int64 seeds, positions and sequence indices."""
    return uniforms(seeds, positions, sequence_indices, vocab_size).log_().neg_().log_().neg_()


def log_probabilities(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities under ``logits [R, V]``: of ``token_ids [R]``, and of each row's ``num_top`` likeliest.

    They are ``[R]`` fp32, ``[R, num_top]`` fp32 in falling order and their ids ``[R, num_top]`` int64; among equals the
    lowest ids come first.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    actual = log_probs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return actual, *likeliest(log_probs, num_top)


def likeliest(scores: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Returns the ``num_top`` largest of each row of ``scores [R, V]`` fp32, in falling order, and their ids, ``[R,
    num_top]`` fp32 and int64; among equals the lowest ids come first.
    """
    if num_top == 0:
        return scores[:, :0], torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    # fp32 bits, flipped for negative numbers, have the numbers' order; the id in the low bits decides ties.
    bits = scores.view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    vocab_size = scores.shape[1]
    ranks = order << 32 | torch.arange(vocab_size - 1, -1, -1, device=scores.device)
    top_ids = vocab_size - 1 - (ranks.topk(num_top, dim=-1).values & _MASK32)
    return scores.gather(1, top_ids), top_ids
