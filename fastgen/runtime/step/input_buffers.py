"""The memory of a step's inputs: static buffers on the device, and on the host what is copied into them.

A buffer never moves, so a captured graph may read it. On ``meta`` the buffers are described only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_NUM_STAGING_BUFFERS = 2  # the host may fill one while the device still reads the other
_ALIGNMENT = 16  # bytes: kernels of a GPU take addresses that are multiples of it

_CPU = torch.device("cpu")

HostArrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class _Field:
    dtype: npt.DTypeLike
    torch_dtype: torch.dtype
    offset: int  # bytes
    count: int


class PackedLayout:
    """The places of arrays in one buffer of bytes."""

    def __init__(self, counts: dict[str, tuple[npt.DTypeLike, torch.dtype, int]]):
        self.fields: dict[str, _Field] = {}
        self.size_bytes = 0
        for name, (dtype, torch_dtype, count) in counts.items():
            self.fields[name] = _Field(dtype, torch_dtype, self.size_bytes, count)
            itemsize = np.dtype(dtype).itemsize
            self.size_bytes += _aligned(count, itemsize) * itemsize

    def host_views(self, buffer: Tensor) -> HostArrays:
        raw = buffer.numpy()
        return {
            name: raw[f.offset : f.offset + f.count * np.dtype(f.dtype).itemsize].view(f.dtype)
            for name, f in self.fields.items()
        }

    def device_views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            name: buffer[f.offset : f.offset + f.count * np.dtype(f.dtype).itemsize].view(f.torch_dtype)
            for name, f in self.fields.items()
        }


class InputBuffers:
    """Holds the buffers of :class:`~fastgen.runtime.step.input_batch.InputBatch` for an engine of these sizes."""

    def __init__(
        self,
        *,
        token_budget: int,
        max_num_seqs: int,
        max_rows: int,
        num_groups: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        host: torch.device = _CPU,
    ):
        self.max_updates = _max_updates(token_budget, max_num_seqs, num_groups, block_size)
        self.layout = _input_layout(token_budget, max_num_seqs, max_rows, num_groups, self.max_updates)
        size = self.layout.size_bytes
        self.packed = torch.zeros(size, dtype=torch.uint8, device=device)
        # On the host; copied into ``packed`` in turns.
        self.staging = [
            torch.zeros(size, dtype=torch.uint8, device=host, pin_memory=device.type == "cuda")
            for _ in range(_NUM_STAGING_BUFFERS)
        ]
        tables = num_groups, max_num_seqs, _table_width(max_blocks)
        # One entry more than the tables hold: unused updates are written there.
        self.flat_tables = torch.zeros(math.prod(tables) + 1, dtype=torch.int32, device=device)
        self.block_tables = self.flat_tables[:-1].view(tables)
        # The block tables as the host knows them, to find slots by.
        self.host_tables = torch.zeros(tables, dtype=torch.int64, device=host)
        # The ids last sampled for each slot.
        self.sampled_ids = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def inputs(self, *, on_host: bool = True) -> list[Tensor]:
        """Returns what holds a step's inputs, block tables aside; ``on_host`` also what is copied to the device."""
        return [self.packed, self.sampled_ids, *(self.staging if on_host else ())]

    def tables(self, *, on_host: bool = True) -> list[Tensor]:
        """Returns what holds block tables; ``on_host`` also those that the host knows."""
        return [self.flat_tables, *([self.host_tables] if on_host else [])]


def _input_layout(
    token_budget: int, max_num_seqs: int, max_rows: int, num_groups: int, max_updates: int
) -> PackedLayout:
    """Returns where each of a step's inputs lies in the buffer that is copied to the device."""
    i32 = (np.int32, torch.int32)
    return PackedLayout(
        {
            "slot_mapping": (np.int64, torch.int64, num_groups * _aligned(token_budget, 8)),
            "update_index": (np.int64, torch.int64, max_updates),
            "update_block": (*i32, max_updates),
            "input_ids": (*i32, token_budget),
            "token_source": (*i32, token_budget),
            "positions": (*i32, token_budget),
            "cu_seqlens_q": (*i32, max_num_seqs + 1),
            "seq_lens": (*i32, max_num_seqs),
            "logits_indices": (*i32, max_rows),
            "logits_slots": (*i32, max_rows),
            "sampled_positions": (*i32, max_rows),
        }
    )


def _max_updates(token_budget: int, max_num_seqs: int, num_groups: int, block_size: int) -> int:
    """Returns the most updates of block tables in a step.

    A chunk of n tokens begins at most n/P + 1 blocks in each group. Twice that leaves a margin for the updates of
    steps that failed, which are still to be made.
    """
    return 2 * num_groups * (token_budget // block_size + max_num_seqs)


def _table_width(max_blocks: int) -> int:
    """Returns the width of a block table for ``max_blocks`` blocks: each group's tables begin at an aligned address."""
    return _aligned(max_blocks, 4)


def _aligned(count: int, itemsize: int) -> int:
    """Returns ``count`` numbers of ``itemsize`` bytes, and as many more as fill up the last 16 bytes."""
    step = _ALIGNMENT // itemsize
    return -(-count // step) * step
