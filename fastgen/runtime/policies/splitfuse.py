"""Dynamic SplitFuse: how many tokens a step takes. Arithmetic only; the scheduler decides whose tokens they are.

After "DeepSpeed-FastGen: High-throughput Text Generation for LLMs via MII and DeepSpeed-Inference" (Holmes et al.,
2024). Two observations of the paper make the rule. A forward pass has a throughput that depends on its number of tokens
and hardly on whose they are, so long prompts are split and short ones fused to reach a good number. And throughput is
concave in that number, so for the same tokens in the same number of passes the even split is the fastest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def captured_sizes(token_budget: int) -> tuple[int, ...]:
    """The step sizes that graphs are captured for, ascending: powers of two to 64, multiples of 64 to 512, of 128
    beyond, none above ``token_budget``, and ``token_budget`` itself.
    """
    regular = [*(1 << power for power in range(6)), *range(64, 512, 64), *range(512, token_budget, 128)]
    return (*(size for size in regular if size < token_budget), token_budget)


def smallest_size(num_tokens: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending ``sizes`` that holds ``num_tokens``, which must not exceed the largest."""
    assert num_tokens <= sizes[-1], f"{num_tokens} tokens exceed the token budget {sizes[-1]}"
    return sizes[bisect_left(sizes, num_tokens)]


def plan(num_decodes: int, num_pending: int, token_budget: int, sizes: Sequence[int]) -> tuple[int, int]:
    """``(target, num_prompt_tokens)``: the size to run the step at, and how many prompt tokens join the decodes.

    With ``d`` decodes and ``R`` pending prompt tokens, budget ``B > d`` leaves ``B - d`` places a step, so the prompts
    need ``F = ceil(R / (B - d))`` passes. Each takes an even share: the target is the smallest captured size that holds
    ``d + ceil(R / F)``, and since that size is run anyway, prompt tokens fill it as far as there are any. With
    ``d = B``, or nothing pending, the decodes run alone.

    For example ``d = 4``, ``R = 600``, ``B = 512``: two passes are needed, 300 each; the target is 320 and 316 go in.
    """
    assert num_decodes <= token_budget, f"{num_decodes} decodes exceed the token budget {token_budget}"
    num_places = token_budget - num_decodes
    if num_pending == 0 or num_places == 0:
        return smallest_size(num_decodes, sizes), 0
    num_passes = -(-num_pending // num_places)
    target = smallest_size(num_decodes - (-num_pending // num_passes), sizes)
    return target, min(num_pending, target - num_decodes)
