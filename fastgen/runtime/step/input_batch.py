"""Builds the ragged batch of a schedule: arrays are filled on the host and moved to the device in one packed copy.

A batch at captured size ``T`` is a set of views of the first ``T`` entries of static buffers, see
:mod:`fastgen.runtime.step.input_buffers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastgen.compile.host.device import to_device
from fastgen.compile.ops.next_decodes.cpp import NextDecodesKernel
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.runtime.kv_cache.block_tables import BlockUpdate
from fastgen.runtime.requests.request import TO_COME, Sequence
from fastgen.runtime.scheduling.drafts import DraftedSequence, SampledSequence, owner
from fastgen.runtime.scheduling.schedule import Schedule, ScheduledTokens
from fastgen.runtime.step.input_buffers import HostArrays, InputBuffers


@dataclass(frozen=True)
class Built:
    """The inputs of a step on the host: the bytes ``packed``, which contain ``num_updates`` updates of block tables.
    Updates that do not fit into them lie in ``places`` and ``blocks``."""

    packed: Tensor
    num_updates: int
    places: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


_NONE = np.empty(0, np.int64)


class InputBatch:
    """Owns the device-side inputs of a step: the packed buffer, the block tables, the ids last sampled for each slot.

    ``block_tables [G, S, max_blocks]`` stay on the device; the copy of a step carries only the entries that changed.
    With ``pads`` a batch has one of the captured sizes, and always the same number of block updates. A step has at most
    ``max_rows`` rows that need logits: one for each sequence, and one for each draft.

    With ``keeps_sampled`` a step may take tokens from where the step before sampled them; ranks that get no sampled
    tokens lack these.

    The host works on whole arrays, so that a decode costs little: Python only reads a few numbers of each sequence.
    """

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
        pads: bool = True,
        keeps_sampled: bool = True,
    ):
        self.block_size, self.pads, self.keeps_sampled = block_size, pads, keeps_sampled
        self.num_groups, self.max_num_seqs, self.max_rows = num_groups, max_num_seqs, max_rows
        buffers = InputBuffers(
            token_budget=token_budget,
            max_num_seqs=max_num_seqs,
            max_rows=max_rows,
            num_groups=num_groups,
            max_blocks=max_blocks,
            block_size=block_size,
            device=device,
        )
        self.buffers, self.max_updates = buffers, buffers.max_updates
        self.block_tables, self.sampled_ids = buffers.block_tables, buffers.sampled_ids
        self._host = [buffers.layout.host_views(buffer) for buffer in buffers.staging]
        self._device = buffers.layout.device_views(buffers.packed)
        self._tables = buffers.host_tables.numpy()
        # Events after the last copy out of each staging buffer, for devices that copy asynchronously.
        self._copied: list[torch.cuda.Event | None] = [None] * len(buffers.staging)
        self._turn = 0
        # By slot, the token that ``sampled_ids`` holds: its sequence, the preemptions of that so far, and its position.
        self._noted: dict[int, tuple[Sequence, int, int]] = {}
        self._token_views: dict[int, dict[str, Tensor]] = {}
        # The last step's.
        self.built = Built(buffers.staging[0], 0, _NONE, _NONE)
        self._starts = self._host[0]["cu_seqlens_q"]

    def build(self, schedule: Schedule) -> tuple[RaggedBatch, list[SampledSequence]]:
        """Returns the batch of ``schedule``, padded to its captured size if it ``pads``, and what the rows of its
        ``logits_indices`` are sampled for: the decodes, then each sequence whose chunk catches up, followed by its
        drafts.
        """
        size = schedule.size if self.pads else schedule.num_tokens
        self._await_staging()
        host = self._host[self._turn]
        self._starts = host["cu_seqlens_q"]
        self.built = built = self._fill_updates(host, schedule.block_updates)
        rows = self._fill_tokens(host, schedule, size)
        self._copy_staging()
        self._update_tables(built.num_updates)
        return self.views(size, len(rows)), rows

    def first_row(self, sequence: Sequence) -> int:
        """Returns the row at which the tokens of ``sequence`` begin in the batch that was built last."""
        return int(self._starts[_slot(sequence)])

    def take(self, packed: Tensor, size: int, num_updates: int) -> RaggedBatch:
        """Returns the batch of ``size`` tokens that another process built: the bytes ``packed`` of its
        :class:`Built`."""
        self._await_staging()
        self.buffers.staging[self._turn].copy_(packed)
        self._copy_staging()
        self._update_tables(num_updates)
        return self.views(size, 0)

    def _await_staging(self) -> None:
        """Waits until the device has read the staging buffer whose turn it is."""
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()

    def _copy_staging(self) -> None:
        """Copies the staging buffer whose turn it is to the device, and gives the turn to the next one."""
        packed = self.buffers.packed.copy_(self.buffers.staging[self._turn], non_blocking=True)
        if packed.is_cuda:
            self._copied[self._turn] = copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._turn = (self._turn + 1) % len(self._copied)

    def write_tables(self, places: Tensor, blocks: Tensor) -> None:
        """Writes entries of block tables on the device: flat ``places`` and ``blocks`` on the host, i64."""
        index, given = (to_device(each, self.buffers.packed.device) for each in (places, blocks.to(torch.int32)))
        self.buffers.flat_tables[index] = given

    def _update_tables(self, num_updates: int) -> None:
        if num_updates:
            index, block = (self._device[name][:num_updates] for name in ("update_index", "update_block"))
            self.buffers.flat_tables[index] = block

    def views(self, num_tokens: int, num_rows: int) -> RaggedBatch:
        """Returns views of a batch of ``num_tokens`` tokens with ``num_rows`` rows that need logits. Their contents are
        those of the step that runs.
        """
        device = self._device
        if num_tokens not in self._token_views:
            self._token_views[num_tokens] = {
                "input_ids": device["input_ids"][:num_tokens],
                "token_source": device["token_source"][:num_tokens],
                "positions": device["positions"][:num_tokens],
                "slot_mapping": device["slot_mapping"].view(self.num_groups, -1)[:, :num_tokens],
            }
        return RaggedBatch(
            **self._token_views[num_tokens],
            cu_seqlens_q=device["cu_seqlens_q"],
            seq_lens=device["seq_lens"],
            block_tables=self.block_tables,
            logits_indices=device["logits_indices"][:num_rows],
            sampled_ids=self.sampled_ids,
        )

    def advance(self, kernel: NextDecodesKernel, slots: Tensor, token_ids: Tensor, sampled_positions: Tensor) -> None:
        """Turns a batch of decodes, those in ``slots``, into the batch of their next step; see :func:`next_decodes`."""
        batch = self.views(len(slots), 0)
        kernel(
            token_ids,
            slots,
            self.block_tables,
            batch.input_ids,
            batch.token_source,
            batch.positions,
            batch.seq_lens,
            batch.slot_mapping,
            sampled_positions,
            block_size=self.block_size,
        )

    def update_tables(self, updates: SequenceOf[BlockUpdate]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Writes ``updates``, at least one, into the block tables at once. For CPUs, where no copy has to carry
        them. Returns their flat places and their blocks.
        """
        entry, block = self._enter(updates)
        self.buffers.flat_tables.numpy()[entry] = block
        return entry, block

    def sampled_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Returns views of the slot of each row that needs logits, −1 for unused rows, and of the position of its
        token; i32. Their contents are those of the step that runs.
        """
        return self._device["logits_slots"][:num_rows], self._device["sampled_positions"][:num_rows]

    def forget_sampled(self, rows: Iterable[SampledSequence]) -> None:
        """Forgets the tokens sampled last for ``rows``, which are about to be overwritten."""
        for row in rows:
            self._noted.pop(_slot(owner(row)), None)

    def note_sampled(self, sequences: SequenceOf[Sequence]) -> None:
        """Notes that the kernels of a step wrote the next token of each of ``sequences`` to :attr:`sampled_ids`, where
        the next step can read it. Call this before the token is appended to the sequence. Tokens of beams always come
        from the host, since the search chooses them.
        """
        for sequence in sequences if self.keeps_sampled else ():
            if not sequence.request.has_beams:
                self._noted[_slot(sequence)] = (sequence, sequence.num_preemptions, sequence.num_tokens)

    def _fill_tokens(self, host: HostArrays, schedule: Schedule, size: int) -> list[SampledSequence]:
        decodes, chunks, num_decodes = schedule.decodes, schedule.chunks, len(schedule.decodes)
        slots = np.array([sequence.slot for sequence in decodes], np.int64)
        positions = np.array(schedule.positions, np.int64)
        cu_seqlens_q, seq_lens = host["cu_seqlens_q"], host["seq_lens"]
        cu_seqlens_q[:] = 0
        seq_lens[:] = 0
        cu_seqlens_q[slots + 1] = 1
        seq_lens[slots] = positions + 1
        for chunk in chunks:
            cu_seqlens_q[_slot(chunk.seq) + 1] = chunk.num_tokens
            seq_lens[_slot(chunk.seq)] = chunk.end
        np.cumsum(cu_seqlens_q, out=cu_seqlens_q)

        end = cu_seqlens_q[-1]
        host["input_ids"][end:size] = 0
        host["positions"][end:size] = 0
        host["token_source"][:size] = -1
        kv_slots = host["slot_mapping"].reshape(self.num_groups, -1)
        kv_slots[:, end:size] = 0
        rows: list[SampledSequence] = list(decodes)
        if num_decodes:
            places = cu_seqlens_q[slots]
            host["input_ids"][places] = [sequence.token_ids[-1] for sequence in decodes]
            host["positions"][places] = positions
            blocks, offsets = np.divmod(positions, self.block_size)
            kv_slots[:, places] = self._tables[:, slots, blocks] * self.block_size + offsets
            host["logits_indices"][:num_decodes] = places
            host["logits_slots"][:num_decodes] = slots
            host["sampled_positions"][:num_decodes] = positions + 1
        for chunk in chunks:
            self._fill_chunk(host, kv_slots, chunk, rows)
        host["logits_indices"][len(rows) :] = 0
        host["logits_slots"][len(rows) :] = -1
        if self._noted:
            self._take_from_device(host, schedule)
        is_known = (host["input_ids"][:size] != TO_COME) | (host["token_source"][:size] >= 0)
        assert is_known.all(), "a token that is not known yet is not on the device either"
        return rows

    def _take_from_device(self, host: HostArrays, schedule: Schedule) -> None:
        """Lets the device read the next token of each sequence whose slot has it noted."""
        for sequence in (*schedule.decodes, *(chunk.seq for chunk in schedule.chunks)):
            slot, position = _slot(sequence), sequence.num_computed_tokens
            if self._noted.get(slot) == (sequence, sequence.num_preemptions, position):
                host["token_source"][host["cu_seqlens_q"][slot]] = slot

    def _fill_chunk(
        self, host: HostArrays, kv_slots: npt.NDArray[np.int64], chunk: ScheduledTokens, rows: list[SampledSequence]
    ) -> None:
        sequence, slot, drafts = chunk.seq, _slot(chunk.seq), chunk.drafts
        first = int(host["cu_seqlens_q"][slot])
        places = slice(first, first + chunk.num_tokens)
        positions = np.arange(chunk.start, chunk.end)
        host["input_ids"][places] = [*sequence.token_ids[chunk.start : chunk.end], *drafts]
        host["positions"][places] = positions
        blocks, offsets = np.divmod(positions, self.block_size)
        kv_slots[:, places] = self._tables[:, slot, blocks] * self.block_size + offsets
        if chunk.num_rows:
            sampled = slice(len(rows), len(rows) + chunk.num_rows)
            host["logits_indices"][sampled] = np.arange(places.stop - chunk.num_rows, places.stop)
            host["logits_slots"][sampled] = slot
            host["sampled_positions"][sampled] = positions[-chunk.num_rows :] + 1
            rows.append(sequence)
            rows.extend(DraftedSequence(sequence, drafts[: index + 1]) for index in range(len(drafts)))

    def _fill_updates(self, host: HostArrays, updates: SequenceOf[BlockUpdate]) -> Built:
        """Fills in the updates of block tables. Padding writes the extra entry. Updates for which the step's copy has
        no room are written here: a long prefix from the cache brings its whole table.
        """
        packed, places, blocks = self.buffers.staging[self._turn], _NONE, _NONE
        num_carried = min(len(updates), self.max_updates)
        if self.pads:
            host["update_index"][:] = self.buffers.flat_tables.numel() - 1
            host["update_block"][:] = 0
        if updates:
            entry, block = self._enter(updates)
            carried, rest = slice(num_carried), slice(num_carried, None)
            host["update_index"][carried], host["update_block"][carried] = entry[carried], block[carried]
            if len(updates) > num_carried:
                places, blocks = entry[rest], block[rest]
                self.write_tables(torch.from_numpy(places), torch.from_numpy(blocks))
        return Built(packed, self.max_updates if self.pads else num_carried, places, blocks)

    def _enter(self, updates: SequenceOf[BlockUpdate]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Enters ``updates`` into the host's tables. Returns their flat places and their blocks."""
        slot, group, index, block = np.array(updates).T
        entry = np.ravel_multi_index((group, slot, index), self._tables.shape)
        self._tables.reshape(-1)[entry] = block
        return entry, block


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot
