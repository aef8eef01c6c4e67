"""Recorded allocations: what is alive at once, the arena that serves them, and lines through two recordings."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgen.compile.capture.allocations import META, Allocations, LinearAllocations, allocations_of
from fastgen.compile.capture.arena import Arena, aligned


def chain(x: Tensor) -> Tensor:
    """Each result is made beside the one before; a view and a sum in place take nothing."""
    x = x.new_empty(len(x), 3)
    y = x.view(-1).new_empty(2 * len(x))
    del x
    z = torch.empty_like(y, dtype=torch.int64)
    return z[1:].add_(1)


def test_what_is_alive_at_once_counts() -> None:
    found = allocations_of(lambda: chain(torch.empty(10, device=META)))
    assert found.sizes == (40, 120, 80, 160)
    assert found.peak_bytes == 240
    assert allocations_of(lambda: chain(torch.empty(10, device=META)), at_least=100).sizes == (120, 160)


def test_nothing_on_another_device_is_counted() -> None:
    assert allocations_of(lambda: torch.zeros(7) + 1).sizes == ()
    assert allocations_of(lambda: torch.zeros(7) + 1, device=torch.device("cpu")).peak_bytes == 56


MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a sum": lambda x, y: x + y,
    "a difference": lambda x, y: x - y,
    "a product with a number": lambda x, y: x * 2.5,
    "integers times a number": lambda x, y: y.int() * 2.5,
    "a product of two dtypes": lambda x, y: x.half() * y,
    "a power": lambda x, y: x**2,
    "an inverse root": lambda x, y: x.rsqrt(),
    "a whole quotient": lambda x, y: x // y,
    "a remainder": lambda x, y: x % 3,
    "no negatives": lambda x, y: x.half().relu(),
    "a comparison": lambda x, y: x >= y,
    "a comparison with a number": lambda x, y: x != 1,
    "a row by a column": lambda x, y: x[:1] + y[:, :1],
    "permuted rows": lambda x, y: x.t() + y.t(),
    "a like one of another dtype": lambda x, y: torch.empty_like(x, dtype=torch.int64),
    "a like one of permuted rows": lambda x, y: torch.empty_like(x.t()),
    "zeros": lambda x, y: x.new_zeros(3, 5),
    "zeros of another dtype": lambda x, y: x.new_zeros((3, 5), dtype=torch.bool),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_described_takes_what_it_takes_on_a_cpu(name: str) -> None:
    def found(device: torch.device) -> tuple[Allocations, torch.dtype, torch.Size]:
        made = list[Tensor]()
        x, y = (torch.ones(4, 6, device=device) for _ in range(2))
        taken = allocations_of(lambda: made.append(MADE[name](x, y)), device=device)
        return taken, made[0].dtype, made[0].shape

    assert found(META) == found(torch.device("cpu"))


def test_where_rows_per_expert_are_asked_for_all_are_the_first_ones() -> None:
    counts = list[list[int]]()
    allocations_of(
        lambda: counts.append(torch.bincount(torch.zeros(9, dtype=torch.int64, device=META), minlength=4).tolist())
    )
    assert counts == [[9, 0, 0, 0]]


def test_a_line_goes_through_every_number() -> None:
    def record(count: int) -> Allocations:
        return allocations_of(lambda: chain(torch.empty(count, 2, device=META)))

    line = LinearAllocations.through(record, 2, 3)
    for count in (1, 2, 5, 4096):
        assert line(count) == record(count)


def test_what_is_on_no_line_is_refused() -> None:
    with pytest.raises(ValueError, match="on no line"):
        LinearAllocations.through(lambda count: Allocations((count // 2,), (0,)), 2, 5)
    with pytest.raises(ValueError, match="differ in more than their sizes"):
        LinearAllocations.through(lambda count: Allocations((1,) * count, tuple(range(count))), 2, 3)


@pytest.mark.parametrize("seed", range(5))
def test_an_arena_takes_what_is_foretold(seed: int) -> None:
    draw, alive = random.Random(seed), set[int]()
    sizes: list[int] = []
    events: list[int] = []
    for _ in range(300):
        if alive and draw.random() < 0.48:
            index = draw.choice(sorted(alive))
            alive.remove(index)
            events.append(~index)
        else:
            alive.add(len(sizes))
            events.append(len(sizes))
            sizes.append(draw.choice([1, 1000, 70_000, 700_000]))
    foretold = Allocations(tuple(sizes), tuple(events))
    most = Allocations(tuple(map(aligned, sizes)), tuple(events)).peak_bytes
    arena, held = Arena(expected_bytes=most), dict[int, Tensor]()
    for event in events:
        if event < 0:
            del held[~event]
        else:
            held[event] = arena.like(torch.empty(sizes[event], dtype=torch.uint8, device=META))
    assert arena.size_bytes == foretold.arena_bytes >= most
