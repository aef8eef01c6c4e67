"""The arena: memory that comes back as tensors die, at the same addresses for the same requests."""

from __future__ import annotations

import random
from itertools import pairwise

import torch

from fastgen.compile.capture.arena import SLAB, Arena, Space


def test_an_arena_gives_memory_again_and_the_same_to_the_same_requests() -> None:
    arena = Arena()

    def history(seed: int) -> list[int]:
        draw, alive, addresses = random.Random(seed), [], []
        for _ in range(400):
            if alive and draw.random() < 0.5:
                alive.pop(draw.randrange(len(alive)))
            else:
                shape = (draw.randrange(5), draw.choice([1, 7, 1000, 40000]))
                dtype = draw.choice([torch.float32, torch.bfloat16, torch.bool, torch.int64])
                tensor = arena.like(torch.empty(shape, dtype=dtype, device="meta"))
                assert (tensor.shape, tensor.dtype) == (shape, dtype)
                assert tensor.data_ptr() % 64 == 0
                tensor.fill_(1)
                alive.append(tensor)
                addresses.append(tensor.data_ptr())
                spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in alive if each.nbytes)
                assert all(end <= start for (_, end), (start, _) in pairwise(spans)), f"{seed=}"
        return addresses

    first = [history(seed) for seed in range(5)]
    assert arena.num_pieces == 0
    size = arena.size_bytes
    assert [history(seed) for seed in range(5)] == first
    assert arena.size_bytes == size


def test_an_odd_number_of_large_pieces_leaves_the_same_places_for_the_next_step() -> None:
    """Large pieces come from either end in turn, and each step begins at the same one."""
    space = Space(1600)
    first = [space.take(400) for _ in range(3)]
    assert first == [(0, 400), (1200, 1600), (400, 800)]
    for piece in first:
        assert piece is not None
        space.give_back(piece)
    assert [space.take(400) for _ in range(3)] == first


def test_a_tensor_larger_than_what_an_arena_grows_by_gets_a_slab_of_its_size() -> None:
    arena = Arena()
    for size, growth in ((SLAB - 64, SLAB), (SLAB, 0), (SLAB + 64, 2 * SLAB), (3 * SLAB, 3 * SLAB)):
        before = arena.size_bytes
        tensor = arena.like(torch.empty(size, dtype=torch.uint8, device="meta")).fill_(1)
        assert int(tensor.sum(dtype=torch.int64)) == size
        del tensor
        assert arena.size_bytes - before == growth


def test_what_is_fixed_reads_the_piece_without_holding_it() -> None:
    arena = Arena()
    tensor = arena.like(torch.empty(4, 6, dtype=torch.bfloat16, device="meta"))
    tensor.copy_(torch.arange(24).view(4, 6))
    view = tensor[1:, ::2]
    fixed = arena.fixed(view)
    assert torch.equal(fixed, view)
    assert fixed.data_ptr() == view.data_ptr()
    del tensor, view
    assert arena.num_pieces == 0
