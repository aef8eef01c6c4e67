"""Effective throughput by the rule of the FastGen paper (Holmes et al., 2024): which answers were fast enough.

An answer is good at a rate of ``r`` tokens/s if its first token came within ``prompt_tokens / 512`` seconds, and every
value of the exponential moving average of its later gaps lies below ``1 / r`` seconds. The average has the span 16, so
``α = 2 / 17``, and is adjusted for its beginning: after the gaps ``g_0 … g_i`` it is ``Σ w^j g_{i-j} / Σ w^j`` with
``w = 1 - α``.
"""

from __future__ import annotations

from collections.abc import Iterable

# Rates, in tokens per second, of the paper.
RATES = (2, 4, 6)
# Prompt tokens per second that the first token must keep up with.
PROMPT_RATE = 512
_WEIGHT = 1 - 2 / 17


def is_first_token_in_time(num_prompt_tokens: int, ttft_s: float) -> bool:
    """Returns whether the first token, ``ttft_s`` seconds after the request, came as soon as the paper requires."""
    return ttft_s <= num_prompt_tokens / PROMPT_RATE


def longest_average_gap_s(gaps_s: Iterable[float]) -> float:
    """Returns the largest value of the moving average of ``gaps_s``, in seconds; 0 without gaps."""
    longest_s = weighted_s = weights = 0.0
    for gap_s in gaps_s:
        weighted_s = gap_s + _WEIGHT * weighted_s
        weights = 1 + _WEIGHT * weights
        longest_s = max(longest_s, weighted_s / weights)
    return longest_s


def good_rates(num_prompt_tokens: int, ttft_s: float, gaps_s: Iterable[float]) -> list[int]:
    """Returns the :data:`RATES` at which an answer is good whose first token took ``ttft_s`` seconds and whose later
    tokens had these gaps.
    """
    if not is_first_token_in_time(num_prompt_tokens, ttft_s):
        return []
    longest_s = longest_average_gap_s(gaps_s)
    return [rate for rate in RATES if longest_s < 1 / rate]
