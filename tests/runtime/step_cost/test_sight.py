"""The tokens that layers with a sliding window read, counted one by one."""

from __future__ import annotations

import pytest

from fastgen.runtime.step_cost.sight import Sight, seen_context, seen_pairs, seen_work
from fastgen.runtime.step_cost.work import chunk_pairs, decode_work

ALTERNATING = (Sight(None, 0.5, 0.5), Sight(8, 0.5, 0.5))


def seen_by(position: int, window: int | None) -> range:
    """Returns the positions that a token sees."""
    return range(0 if window is None else max(0, position - window + 1), position + 1)


@pytest.mark.parametrize("window", [1, 3, 8, 100, None])
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 5), (2, 9), (7, 1), (8, 1), (20, 1), (20, 6), (5, 40)])
def test_windows_bound_what_is_read(window: int | None, start: int, num_tokens: int) -> None:
    sights = (Sight(window, 1.0, 1.0),)
    each = [seen_by(position, window) for position in range(start, start + num_tokens)]
    assert seen_context(start, num_tokens, sights) == len(set().union(*each))
    assert seen_pairs(start, num_tokens, sights) == sum(map(len, each))


def test_layers_count_by_their_share() -> None:
    sights = (Sight(None, 0.25, 0.5), Sight(8, 0.75, 0.5))
    assert seen_context(99, 1, sights) == 0.25 * 100 + 0.75 * 8
    assert seen_pairs(99, 2, sights) == 0.5 * (100 + 101) + 0.5 * (8 + 8)


def test_without_windows_all_is_read() -> None:
    assert (seen_context(5, 3), seen_pairs(5, 3)) == (8, chunk_pairs(5, 3))
    work = decode_work([5, 70]).with_chunk(30, 10, 1)
    assert seen_work(work, [5, 70], [(30, 10)], ()) is work


def test_the_work_of_a_step_is_that_of_its_parts() -> None:
    work = decode_work([5, 70]).with_chunk(30, 10, 1)
    found = seen_work(work, [5, 70], [(30, 10)], ALTERNATING)
    context = 0.5 * (6 + 71 + 40) + 0.5 * (6 + 8 + 17)
    assert found == work._replace(num_context=round(context), num_pairs=round(0.5 * chunk_pairs(30, 10) + 0.5 * 80))
