"""From a schedule to the ragged batch: arrays built on the host, moved to the device in one packed copy.

Every buffer is static: its address never changes after construction, so a captured graph may read it. A batch at
captured size ``T`` is a set of views of the first ``T`` entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastgen.compile.ops.next_decodes import NextDecodesKernel
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.runtime.request import Sequence
from fastgen.runtime.schedule import BlockUpdate, Schedule, ScheduledTokens

_NUM_STAGING_BUFFERS = 2  # the host may fill one while the device still reads the other
_ALIGNMENT = 16  # bytes

_HostArrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class _Field:
    dtype: npt.DTypeLike
    torch_dtype: torch.dtype
    offset: int  # bytes
    count: int


class _PackedLayout:
    """Where each array lies in one buffer of bytes."""

    def __init__(self, counts: dict[str, tuple[npt.DTypeLike, torch.dtype, int]]):
        self.fields: dict[str, _Field] = {}
        self.size_bytes = 0
        for name, (dtype, torch_dtype, count) in counts.items():
            self.fields[name] = _Field(dtype, torch_dtype, self.size_bytes, count)
            size = count * np.dtype(dtype).itemsize
            self.size_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def host_views(self, buffer: Tensor) -> _HostArrays:
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


class InputBatch:
    """Owns the device-side inputs of a step: the packed buffer, the block tables, the ids last sampled for each seat.

    ``block_tables [G, S, max_blocks]`` stay on the device; a step's copy carries only the entries that changed. With
    ``pads`` its sizes are few: of tokens the captured ones, of block updates one.
    """

    def __init__(
        self,
        *,
        token_budget: int,
        max_num_seqs: int,
        num_groups: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        pads: bool = True,
    ):
        self.block_size, self.pads = block_size, pads
        self.num_groups, self.max_num_seqs, self.max_blocks = num_groups, max_num_seqs, max_blocks
        # A chunk of n tokens begins at most n/P + 1 blocks in each group. Twice that leaves a margin for the updates of
        # steps that failed, which are still due.
        self.max_updates = 2 * num_groups * (token_budget // block_size + max_num_seqs)
        i32 = (np.int32, torch.int32)
        self._layout = _PackedLayout(
            {
                "slot_mapping": (np.int64, torch.int64, num_groups * token_budget),
                "update_index": (np.int64, torch.int64, self.max_updates),
                "update_block": (*i32, self.max_updates),
                "input_ids": (*i32, token_budget),
                "token_source": (*i32, token_budget),
                "positions": (*i32, token_budget),
                "cu_seqlens_q": (*i32, max_num_seqs + 1),
                "seq_lens": (*i32, max_num_seqs),
                "logits_indices": (*i32, max_num_seqs),
                "logits_seats": (*i32, max_num_seqs),
                "sampled_positions": (*i32, max_num_seqs),
            }
        )
        pinned = device.type == "cuda"
        self._staging = [
            torch.zeros(self._layout.size_bytes, dtype=torch.uint8, pin_memory=pinned)
            for _ in range(_NUM_STAGING_BUFFERS)
        ]
        self._host = [self._layout.host_views(buffer) for buffer in self._staging]
        self._turn = 0
        self._packed = torch.zeros(self._layout.size_bytes, dtype=torch.uint8, device=device)
        self._device = self._layout.device_views(self._packed)
        # one entry more than the tables hold: unused updates are written there
        self._flat_tables = torch.zeros(num_groups * max_num_seqs * max_blocks + 1, dtype=torch.int32, device=device)
        self.block_tables = self._flat_tables[:-1].view(num_groups, max_num_seqs, max_blocks)
        self.sampled_ids = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._sampled: list[tuple[Sequence, int, int] | None] = [None] * max_num_seqs
        """For each seat, whose token ``sampled_ids`` holds: sequence, its preemptions so far, the token's position."""

    def build(self, schedule: Schedule) -> tuple[RaggedBatch, list[Sequence]]:
        """The batch of ``schedule``, at its captured size where it ``pads``, and the sequences that need a token,
        in the order of its ``logits_indices``."""
        size = schedule.size if self.pads else schedule.num_tokens
        entries = sorted(schedule.entries, key=lambda entry: _seat(entry.seq))
        host = self._host[self._turn]
        sampled = self._fill_tokens(host, entries, size)
        updates = schedule.block_updates[: self.max_updates]
        self._fill_updates(host, updates)
        self._packed.copy_(self._staging[self._turn], non_blocking=True)
        self._turn = (self._turn + 1) % _NUM_STAGING_BUFFERS
        num_updates = self.max_updates if self.pads else len(updates)
        if num_updates:
            index, block = (self._device[name][:num_updates] for name in ("update_index", "update_block"))
            self._flat_tables[index] = block
        if rest := schedule.block_updates[self.max_updates :]:  # a long prefix out of the cache brings its whole table
            index, block = (torch.from_numpy(array).to(self._packed.device) for array in self._table_entries(rest))
            self._flat_tables[index] = block
        return self.views(size, len(sampled)), sampled

    def views(self, num_tokens: int, num_rows: int) -> RaggedBatch:
        """The batch of ``num_tokens`` tokens and ``num_rows`` that need logits, whatever they are by then."""
        device = self._device
        return RaggedBatch(
            input_ids=device["input_ids"][:num_tokens],
            token_source=device["token_source"][:num_tokens],
            positions=device["positions"][:num_tokens],
            cu_seqlens_q=device["cu_seqlens_q"],
            seq_lens=device["seq_lens"],
            block_tables=self.block_tables,
            slot_mapping=device["slot_mapping"].view(self.num_groups, -1)[:, :num_tokens],
            logits_indices=device["logits_indices"][:num_rows],
            sampled_ids=self.sampled_ids,
        )

    def advance(self, kernel: NextDecodesKernel, num_rows: int, token_ids: Tensor, sampled_positions: Tensor) -> None:
        """Make of the inputs of so many decodes those of their next step; see :func:`~fastgen.compile.ops.next_decodes`."""
        batch = self.views(num_rows, num_rows)
        kernel(
            token_ids,
            self._device["logits_seats"][:num_rows],
            self.block_tables,
            batch.input_ids,
            batch.token_source,
            batch.positions,
            batch.seq_lens,
            batch.slot_mapping,
            sampled_positions,
            block_size=self.block_size,
        )

    def sampled_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """For each row that needs logits its seat, −1 behind the last row in use, and where its token will stand; i32.
        Whatever they are by then."""
        return self._device["logits_seats"][:num_rows], self._device["sampled_positions"][:num_rows]

    def store_sampled(self, token_ids: list[int], sequences: list[Sequence]) -> None:
        """Keep the new ``token_ids`` of ``sequences`` on the device, where the next step's ``token_source`` finds them.

        Call before the tokens are appended to the sequences.
        """
        seats = self._device["logits_seats"][: len(sequences)].long()
        self.sampled_ids.index_copy_(0, seats, torch.tensor(token_ids, dtype=torch.int32, device=seats.device))
        self.note_sampled(sequences)

    def note_sampled(self, sequences: list[Sequence]) -> None:
        """As :meth:`store_sampled`, where kernels wrote the ids to :attr:`sampled_ids` themselves."""
        for sequence in sequences:
            self._sampled[_seat(sequence)] = (sequence, sequence.num_preemptions, sequence.num_tokens)

    def _fill_tokens(self, host: _HostArrays, entries: list[ScheduledTokens], size: int) -> list[Sequence]:
        input_ids, positions, token_source = host["input_ids"], host["positions"], host["token_source"]
        slots = host["slot_mapping"].reshape(self.num_groups, -1)
        host["cu_seqlens_q"][:] = 0
        host["seq_lens"][:] = 0
        sampled: list[Sequence] = []
        end = 0
        for entry in entries:
            sequence, seat, start, stop = entry.seq, _seat(entry.seq), entry.start, entry.end
            rows = slice(end, end + entry.num_tokens)
            end = rows.stop
            input_ids[rows] = sequence.token_ids[start:stop]
            positions[rows] = np.arange(start, stop) if entry.num_tokens > 1 else start
            token_source[rows] = -1
            if self._sampled[seat] == (sequence, sequence.num_preemptions, stop - 1):
                token_source[end - 1] = seat
            for group, table in enumerate(sequence.block_tables):
                slots[group, rows] = self._slots(table, start, stop)
            host["cu_seqlens_q"][seat + 1] = entry.num_tokens
            host["seq_lens"][seat] = stop
            if entry.samples:
                host["logits_indices"][len(sampled)] = end - 1
                host["logits_seats"][len(sampled)] = seat
                host["sampled_positions"][len(sampled)] = stop
                sampled.append(sequence)
        np.cumsum(host["cu_seqlens_q"], out=host["cu_seqlens_q"])
        host["logits_indices"][len(sampled) :] = 0
        host["logits_seats"][len(sampled) :] = -1
        input_ids[end:size] = 0
        positions[end:size] = 0
        token_source[end:size] = -1
        slots[:, end:size] = 0
        return sampled

    def _slots(self, table: list[int], start: int, stop: int) -> npt.NDArray[np.int64] | int:
        """Where in the cache the tokens ``start`` to ``stop`` of the sequence with this block table lie."""
        first_block, offset = divmod(start, self.block_size)
        if stop == start + 1:  # a decode: there are many, and numpy takes longer than the arithmetic
            return table[first_block] * self.block_size + offset
        where = np.arange(start, stop)
        blocks = np.asarray(table[first_block : (stop - 1) // self.block_size + 1], dtype=np.int64)
        return blocks[where // self.block_size - first_block] * self.block_size + where % self.block_size

    def _fill_updates(self, host: _HostArrays, updates: tuple[BlockUpdate, ...]) -> None:
        """Where entries of the block tables go; padding writes the spare entry."""
        if self.pads:
            host["update_index"][:] = self._flat_tables.numel() - 1
            host["update_block"][:] = 0
        if updates:
            host["update_index"][: len(updates)], host["update_block"][: len(updates)] = self._table_entries(updates)

    def _table_entries(self, updates: tuple[BlockUpdate, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """For each update the entry of the flat tables, and the block id that goes there."""
        seat, group, index, block = np.array(updates, dtype=np.int64).T
        return (group * self.max_num_seqs + seat) * self.max_blocks + index, block.astype(np.int32)


def _seat(sequence: Sequence) -> int:
    assert sequence.seat is not None
    return sequence.seat
