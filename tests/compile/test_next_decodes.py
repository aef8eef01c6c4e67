"""From one step of decodes to the next: the kernel beside its reference, and both beside a batch built from scratch."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cpp import CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.ops.next_decodes.cpp import NextDecodesKernel, next_decodes_spec
from fastgen.compile.ops.next_decodes.reference import next_decodes

NUM_SLOTS, MAX_BLOCKS = 7, 5


@dataclass
class Inputs:
    """The inputs of a step of decodes. ``positions`` are those of the rows' slots; the longest tables are full."""

    slots: list[int]
    positions: list[int]
    tables: Tensor
    block_size: int

    def built(self, num_steps: int, ids: list[int]) -> list[Tensor]:
        """After ``num_steps`` the input ids, whose they are on the device, positions, lengths, slots and the positions
        of the tokens to be sampled, each written down by its definition.
        """
        positions = [position + num_steps for position in self.positions]
        lengths = [100 + slot for slot in range(NUM_SLOTS)]  # other slots keep theirs
        for slot, position in zip(self.slots, positions, strict=True):
            lengths[slot] = position + 1
        kv_slots = [
            [
                int(table[slot, position // self.block_size]) * self.block_size + position % self.block_size
                for slot, position in zip(self.slots, positions, strict=True)
            ]
            for table in self.tables
        ]
        i32, i64 = torch.int32, torch.int64
        return [
            torch.tensor(ids, dtype=i32),
            torch.full((len(ids),), -1, dtype=i32),
            torch.tensor(positions, dtype=i32),
            torch.tensor(lengths, dtype=i32),
            torch.tensor(kv_slots, dtype=i64).reshape(len(self.tables), -1),
            torch.tensor([position + 1 for position in positions], dtype=i64),
        ]


def draw_inputs(rng: random.Random, num_groups: int, block_size: int) -> Inputs:
    slots = sorted(rng.sample(range(NUM_SLOTS), rng.randint(0, NUM_SLOTS)))
    most = MAX_BLOCKS * block_size - 4
    positions = [rng.choice((0, block_size - 1, rng.randrange(most))) for _ in slots]
    tables = torch.tensor([rng.randrange(2**30) for _ in range(num_groups * NUM_SLOTS * MAX_BLOCKS)])
    return Inputs(slots, positions, tables.int().view(num_groups, NUM_SLOTS, MAX_BLOCKS), block_size)


@pytest.fixture(scope="module")
def kernel() -> NextDecodesKernel:
    loader = KernelLoader(CppBuilder(cpp_arch(device.current("cpu"))))
    return NextDecodesKernel(loader.load(next_decodes_spec()))


@pytest.mark.parametrize(("num_groups", "block_size"), [(1, 16), (3, 4), (2, 1)])
def test_three_steps(kernel: NextDecodesKernel, num_groups: int, block_size: int) -> None:
    rng = random.Random(num_groups)
    for _ in range(30):
        given = draw_inputs(rng, num_groups, block_size)
        num_rows = len(given.slots)
        wide = torch.full((num_groups, num_rows + 2), -7)  # kv_slots and positions lie in larger buffers, kept whole
        columns = torch.full((num_rows, 5), -7)
        for step in (kernel, next_decodes):
            ids, source, positions, lengths, kv_slots, sampled = given.built(0, [9] * num_rows)
            source.fill_(3)
            wide[:, :num_rows], columns[:, 2] = kv_slots, sampled
            for num_steps in range(1, 4):
                chosen = [rng.randrange(-2, 2**20) for _ in given.slots]
                step(
                    torch.tensor(chosen, dtype=torch.int64),
                    torch.tensor(given.slots, dtype=torch.int32),
                    given.tables,
                    *(ids, source, positions, lengths, wide[:, :num_rows], columns[:, 2]),
                    block_size=block_size,
                )
                found = (ids, source, positions, lengths, wide[:, :num_rows], columns[:, 2])
                for one, other in zip(found, given.built(num_steps, chosen), strict=True):
                    assert torch.equal(one, other)
            assert (wide[:, num_rows:] == -7).all()
            assert (columns[:, [0, 1, 3, 4]] == -7).all()
