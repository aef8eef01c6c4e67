"""The policy that keeps to a time: a chunk has the most tokens that fit among the lengths that steps are padded to."""

from __future__ import annotations

import random

from fastgen.runtime.scheduling.policies.time_budget import TimeBudgetSplitFuse
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.work import StepWork

COST = StepCost.linear(step_s=0.001, token_s=1e-4, context_s=0.0, pair_s=1e-8)
FEW = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def test_a_chunk_is_the_longest_that_fits_beside_any_number_of_decodes() -> None:
    rng = random.Random(0)
    for target_s in (0.004, 0.009, 0.02, 0.05):
        policy = TimeBudgetSplitFuse(target_s)
        for _ in range(200):
            work = StepWork(rng.choice(SIZES), 0, rng.randrange(200_000))
            policy.observe(work, COST.seconds(work))
        for num_before in (0, 1, 15, 16, 40, 62, 63, 64, 65, 100, 128, 300, 511):
            for num_tokens in (1, 40, 1000):
                work = StepWork(num_before, 0, 1000)  # another prompt has a chunk already
                most = min(num_tokens, 512 - num_before)
                lengths = {length for length in FEW if num_before + length < 64}
                lengths |= {size - num_before for size in SIZES if size >= 64}
                possible = {length for length in lengths if 0 < length < most} | {most}
                fitting = [n for n in possible if policy.model.upper_bound_s(work.with_chunk(0, n)) <= target_s]
                assert policy.limit(work, 0, num_tokens, SIZES) == max(fitting, default=0), (num_before, num_tokens)
