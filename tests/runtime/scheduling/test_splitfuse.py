"""The SplitFuse rule: worked examples, and the arithmetic against its definition by exhaustion."""

from __future__ import annotations

import itertools

import pytest

from fastgen.runtime.scheduling.policies.splitfuse import FILLS_FROM_PASSES, captured_sizes, even_share, smallest_size


@pytest.mark.parametrize(
    ("token_budget", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (48, (1, 2, 4, 8, 16, 32, 48)),
        (64, (1, 2, 4, 8, 16, 32, 64)),
        (65, (1, 2, 4, 8, 16, 32, 64, 65)),
        (300, (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 300)),
        (512, (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512)),
        (800, (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 800)),
        (1024, (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)),
    ],
)
def test_captured_sizes(token_budget, sizes):
    assert captured_sizes(token_budget) == sizes


def test_captured_sizes_by_definition():
    """Every number up to the budget is captured if the design's list names it, and no other is."""
    powers = {1, 2, 4, 8, 16, 32, 64}
    for budget in [*range(1, 200), 511, 513, 640, 2048, 2049]:
        expected = [
            n
            for n in range(1, budget + 1)
            if n == budget or n in powers or (n % 64 == 0 and n <= 512) or (n % 128 == 0 and n > 512)
        ]
        assert list(captured_sizes(budget)) == expected, budget


def test_smallest_size():
    sizes = (1, 2, 4, 8, 12)
    assert [smallest_size(n, sizes) for n in (1, 2, 3, 4, 5, 8, 9, 12)] == [1, 2, 4, 4, 8, 8, 12, 12]
    with pytest.raises(AssertionError, match="13 tokens exceed the token budget 12"):
        smallest_size(13, sizes)


# Computed by hand: d decodes, R pending, B budget -> F passes, share ceil(R / F), target, tokens that go in.
EXAMPLES = [
    pytest.param(0, 1, 512, 1, 1, id="one token runs at size 1"),
    pytest.param(5, 0, 512, 8, 0, id="decodes alone run at the smallest size that holds them"),
    pytest.param(0, 512, 512, 512, 512, id="a prompt of exactly the budget takes one pass"),
    pytest.param(0, 513, 512, 320, 320, id="one token more: 2 passes of 257, not 512 and 1"),
    pytest.param(0, 1000, 512, 512, 512, id="2 passes of 500"),
    pytest.param(4, 600, 512, 320, 316, id="2 passes of 300; 304 runs at 320"),
    pytest.param(100, 1000, 512, 448, 348, id="412 places: 3 passes of 334; 434 runs at 448"),
    pytest.param(7, 9, 8, 8, 1, id="one place: 9 passes of 1"),
    pytest.param(3, 20, 8, 8, 5, id="5 places: 4 passes of 5"),
    pytest.param(3, 6, 8, 8, 5, id="5 places: 2 passes of 3; 6 runs at 8, so 5 go in"),
    pytest.param(1, 9, 9, 8, 7, id="8 places: 2 passes of 5; 6 runs at 8"),
    pytest.param(8, 30, 8, 8, 0, id="no place: decodes alone"),
    pytest.param(0, 3, 8, 4, 3, id="fewer than the size they run at"),
    pytest.param(63, 10, 100, 100, 10, id="1 pass: 73 runs at the budget"),
]


@pytest.mark.parametrize(("num_decodes", "num_pending", "token_budget", "target", "num_prompt_tokens"), EXAMPLES)
def test_examples(num_decodes, num_pending, token_budget, target, num_prompt_tokens):
    sizes = captured_sizes(token_budget)
    assert even_share(num_decodes, num_pending, token_budget, sizes) == (target, num_prompt_tokens)


def test_more_decodes_than_the_budget_are_a_mistake():
    with pytest.raises(AssertionError, match="9 decodes exceed the token budget 8"):
        even_share(9, 1, 8, captured_sizes(8))


BUDGETS = [*range(1, 20), 31, 32, 33, 64, 100]


def cases():
    for budget in BUDGETS:
        for num_decodes in range(budget):
            for num_pending in range(1, 3 * budget + 2, 1 if budget < 40 else 7):
                yield budget, num_decodes, num_pending


def test_definition_by_exhaustion():
    """The fewest passes the budget allows, and of the sizes that can do it in so many, the smallest; many passes fill
    the budget.
    """
    for budget, num_decodes, num_pending in cases():
        sizes = captured_sizes(budget)
        passes = next(f for f in itertools.count(1) if f * (budget - num_decodes) >= num_pending)
        target = next(size for size in sizes if passes * (size - num_decodes) >= num_pending)
        if num_pending >= FILLS_FROM_PASSES * (budget - num_decodes):
            target = budget
        got = even_share(num_decodes, num_pending, budget, sizes)
        assert got == (target, min(num_pending, target - num_decodes)), (budget, num_decodes, num_pending)


def test_draining():
    """Pass after pass, the prompts take the fewest passes there could be, all but the last fill their size, and none is
    larger than the one before.
    """
    for budget, num_decodes, num_pending in cases():
        sizes = captured_sizes(budget)
        remaining, targets = num_pending, []
        while remaining:
            target, num_tokens = even_share(num_decodes, remaining, budget, sizes)
            remaining -= num_tokens
            targets.append(target)
            assert num_tokens >= 1
            assert target == num_decodes + num_tokens or not remaining, (budget, num_decodes, num_pending)
        assert len(targets) == -(-num_pending // (budget - num_decodes)), (budget, num_decodes, num_pending)
        assert targets == sorted(targets, reverse=True), (budget, num_decodes, num_pending, targets)
