"""A batch of no request, to try captured steps on before there is one."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.compile.host.device import to_device
from fastgen.runtime.step.input_batch import InputBatch


class TrialBatch:
    """Fills the inputs of ``input_batch`` on the device, of which its host side knows nothing, without waiting for it.

    Its sequences have a block of tokens and one token in turn, so there are chunks and decodes. Each uses one block of
    each KV group, from block 1 on. What they leave there is overwritten before it is read. It holds as many sequences
    as there are slots and blocks for.
    """

    def __init__(self, input_batch: InputBatch, *, num_blocks: int, max_model_len: int, vocab_size: int):
        self._batch, self._vocab_size = input_batch, vocab_size
        self._max_length = min(input_batch.block_size, max_model_len)
        self._max_seqs = min(input_batch.max_num_seqs, (num_blocks - 1) // input_batch.num_groups)

    def fill(self, size: int) -> int:
        """Fills in a batch of ``size`` tokens. Returns how many of them belong to sequences, the first ones."""
        lengths: list[int] = []
        while sum(lengths) < size and len(lengths) < self._max_seqs:
            lengths.append(min(1 if len(lengths) % 2 else self._max_length, size - sum(lengths)))
        num_tokens, count, views = sum(lengths), len(lengths), self._batch.views(size, 0)
        rows = torch.arange(count).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        positions = torch.cat([torch.arange(length) for length in (*lengths, size - num_tokens)])
        positions[num_tokens:] = 0
        _copy(torch.arange(size) % self._vocab_size, views.input_ids)
        views.token_source.fill_(-1)
        _copy(positions, views.positions)
        starts, ends = torch.zeros(len(views.cu_seqlens_q), dtype=torch.int64), torch.zeros(len(views.seq_lens))
        starts[1 : count + 1], ends[:count] = torch.tensor(lengths), torch.tensor(lengths)
        _copy(starts.cumsum(0), views.cu_seqlens_q)
        _copy(ends, views.seq_lens)
        views.slot_mapping.zero_()
        for group, slots in enumerate(views.slot_mapping):
            blocks = 1 + group * count + torch.arange(count)
            _copy(blocks[rows] * self._batch.block_size + positions[:num_tokens], slots[:num_tokens])
            _copy(blocks, views.block_tables[group, :count, 0])
        return num_tokens

    def clear(self) -> None:
        """Makes the inputs zero, as they were before."""
        self._batch.buffers.packed.zero_()
        self._batch.buffers.flat_tables.zero_()


def _copy(numbers: Tensor, to: Tensor) -> None:
    """Copies the host's ``numbers`` in the order of launches, without waiting for those before."""
    to.copy_(to_device(numbers, to.device))
