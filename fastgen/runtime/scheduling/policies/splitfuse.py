"""Dynamic SplitFuse: decodes in every step, and prompts split and fused so that steps have even sizes.

After "DeepSpeed-FastGen: High-throughput Text Generation for LLMs via MII and DeepSpeed-Inference" (Holmes et al.,
2024). The rule follows from two observations of the paper. The throughput of a forward pass depends on its number of
tokens and hardly on their sequences, so long prompts are split and short ones fused to reach a good number. And
throughput is concave in that number, so the even split of the same tokens over the same number of passes is the
fastest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.scheduling.policies.policy import Policy, StepPlan, StepView

# With this many passes of prompts pending, an even share is nearly the whole budget; counting stops there.
FILLS_FROM_PASSES = 8


class SplitFuse(Policy):
    splits_prompts = True

    def plan(self, view: StepView) -> StepPlan:
        num_decodes = len(view.decodes)
        enough = FILLS_FROM_PASSES * (view.token_budget - num_decodes)
        num_pending = count_pending(view.prompts, enough)
        num_pending += count_pending(view.waiting, enough - num_pending)
        _, num_prompt_tokens = even_share(num_decodes, num_pending, view.token_budget, view.sizes)
        return StepPlan(True, num_prompt_tokens, view.num_free_slots)


def count_pending(prompts: Iterable[Sequence], enough: int) -> int:
    """Returns the number of pending tokens of ``prompts``. It stops counting at ``enough``."""
    num_pending = 0
    for seq in prompts if enough > 0 else ():
        num_pending += seq.num_pending_tokens
        if num_pending >= enough:
            break
    return num_pending


def captured_sizes(token_budget: int) -> tuple[int, ...]:
    """Returns the step sizes that graphs are captured for, ascending: powers of two to 64, multiples of 64 to 512 and
    of 128 beyond, none above ``token_budget``, and ``token_budget`` itself.
    """
    regular = [*(1 << power for power in range(6)), *range(64, 512, 64), *range(512, token_budget, 128)]
    return (*(size for size in regular if size < token_budget), token_budget)


def smallest_size(num_tokens: int, sizes: SequenceOf[int]) -> int:
    """Returns the smallest of the ascending ``sizes`` that holds ``num_tokens``, which must not exceed the largest."""
    assert num_tokens <= sizes[-1], f"{num_tokens} tokens exceed the token budget {sizes[-1]}"
    return sizes[bisect_left(sizes, num_tokens)]


def even_share(num_decodes: int, num_pending: int, token_budget: int, sizes: SequenceOf[int]) -> tuple[int, int]:
    """Returns ``(target, num_prompt_tokens)``: the size to run the step at, and how many prompt tokens join the
    decodes.

    With ``d`` decodes and ``p`` pending prompt tokens, a budget of ``b > d`` tokens leaves ``b - d`` for prompts, so
    these need ``n = ceil(p / (b - d))`` passes. Each takes an even share: the target is the smallest captured size that
    holds ``d + ceil(p / n)``. That size is run anyway, so prompt tokens fill it as far as there are any. From
    :data:`FILLS_FROM_PASSES` passes on it is ``b`` itself. With ``d = b``, or nothing pending, the decodes run alone.

    For example ``d = 4``, ``p = 600``, ``b = 512``: two passes are needed, 300 each; the target is 320 and 316 go in.
    """
    assert num_decodes <= token_budget, f"{num_decodes} decodes exceed the token budget {token_budget}"
    num_places = token_budget - num_decodes
    if num_pending == 0 or num_places == 0:
        return smallest_size(num_decodes, sizes), 0
    if num_pending >= FILLS_FROM_PASSES * num_places:
        return token_budget, num_places
    num_passes = -(-num_pending // num_places)
    target = smallest_size(num_decodes - (-num_pending // num_passes), sizes)
    return target, min(num_pending, target - num_decodes)
