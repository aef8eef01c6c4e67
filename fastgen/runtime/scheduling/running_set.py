"""The running sequences: decodes and prompts, their slots, and block table updates for the device."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter

from fastgen.runtime.kv_cache.block_pool import PADDING_BLOCK
from fastgen.runtime.kv_cache.block_tables import BlockCopy, BlockUpdate
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus

_urgency = attrgetter("urgency")


class RunningSet:
    """Holds at most ``max_num_seqs`` sequences, each in a slot of its own.

    ``decodes`` have one pending token or none. Beams have none until their search has moved; while ``some_wait``,
    sequences whose newest token is not known yet have none either. ``prompts`` have more pending tokens and are kept in
    order of urgency. A decode costs nothing here from step to step.

    As long as a beam of a request runs, slots are reserved for all its beams.
    """

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self.decodes: list[Sequence] = []
        self.prompts: list[Sequence] = []
        self.some_wait = False
        # Whether there is a device, whose block tables need updates.
        self.has_device = True
        # Requests with running beams.
        self._searches: dict[int, Request] = {}
        self._free_slots = list(reversed(range(max_num_seqs)))
        # Updates that the device does not have yet, by slot, group and index.
        self._updates: dict[tuple[int, int, int], BlockUpdate] = {}

    def __len__(self) -> int:
        return len(self.decodes) + len(self.prompts)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.decodes
        yield from self.prompts

    @property
    def num_free_slots(self) -> int:
        """Returns how many slots are free and not reserved for beams."""
        if not self._searches:
            return len(self._free_slots)
        beams = (seq for request in self._searches.values() for seq in request.sequences)
        return len(self._free_slots) - sum(seq.status is SequenceStatus.WAITING for seq in beams)

    @property
    def pending_decodes(self) -> list[Sequence]:
        """Returns the decodes whose newest token is pending."""
        some_wait = self.some_wait or self._searches
        return [seq for seq in self.decodes if seq.num_pending_tokens] if some_wait else self.decodes

    @property
    def least_urgent(self) -> Sequence:
        return max(self, key=_urgency)

    @property
    def block_updates(self) -> tuple[BlockUpdate, ...]:
        """Returns all entries of block tables that the device does not have yet."""
        return tuple(self._updates.values())

    def add_prompt(self, seq: Sequence) -> None:
        """Gives ``seq`` a slot. There must be a free one."""
        self._slot(seq)
        insort(self.prompts, seq, key=_urgency)

    def add_decode(self, seq: Sequence) -> None:
        """Gives ``seq`` a slot, as a decode: only its newest token is pending."""
        self._slot(seq)
        self.decodes.append(seq)

    def make_decode(self, seq: Sequence) -> None:
        """Turns the prompt ``seq`` into a decode: only its newest token is pending now."""
        self.prompts.remove(seq)
        self.decodes.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Frees the slot of ``seq`` and drops its updates."""
        assert seq.slot is not None
        place = bisect_left(self.prompts, seq.urgency, key=_urgency)
        if place < len(self.prompts) and self.prompts[place] is seq:
            del self.prompts[place]
        else:
            self.decodes.remove(seq)
        if self._updates:
            self._updates = {place: update for place, update in self._updates.items() if place[0] != seq.slot}
        self._free_slots.append(seq.slot)
        seq.slot = None
        if seq.request.has_beams and all(beam.slot is None for beam in seq.request.sequences):
            del self._searches[seq.key[0]]

    def add_blocks(self, seq: Sequence, first: int = 0, copies: Iterable[BlockCopy] = ()) -> None:
        """Adds to the updates for the device the blocks in the tables of ``seq`` from index ``first`` on, and the
        destinations of ``copies``.
        """
        slot = seq.slot
        assert slot is not None
        if not self.has_device:
            return
        for group, table in enumerate(seq.block_tables):
            for index in range(first, len(table)):
                if table[index] != PADDING_BLOCK:
                    self._updates[slot, group, index] = BlockUpdate(slot, group, index, table[index])
        for group, index, _, block_id in copies:
            self._updates[slot, group, index] = BlockUpdate(slot, group, index, block_id)

    def add_updates(self, updates: Iterable[BlockUpdate]) -> None:
        """Adds ``updates`` for the device."""
        for update in updates if self.has_device else ():
            self._updates[update[:3]] = update

    def updates_launched(self) -> None:
        """Clears the updates: a launched step carries all of them."""
        self._updates.clear()

    @property
    def free_slots(self) -> tuple[int, ...]:
        """Returns the free slots, also those reserved for beams; the last one is given next."""
        return tuple(self._free_slots)

    def restore(
        self,
        decodes: list[Sequence],
        prompts: list[Sequence],
        free_slots: Iterable[int],
        updates: Iterable[BlockUpdate],
    ) -> None:
        """Restores the state of a snapshot into a new set."""
        self.decodes, self.prompts, self._free_slots = decodes, prompts, list(free_slots)
        self._searches = {seq.key[0]: seq.request for seq in self if seq.request.has_beams}
        self.add_updates(updates)

    def check_integrity(self) -> None:
        """Asserts that slots and order are accounted for."""
        running = list(self)
        taken = [seq.slot for seq in running if seq.slot is not None]
        assert len(taken) == len(running), f"running without a slot: {running}"
        assert sorted([*self._free_slots, *taken]) == list(range(self.max_num_seqs)), (
            f"slots {taken} taken, {self._free_slots} free"
        )
        urgencies = [seq.urgency for seq in self.prompts]
        assert urgencies == sorted(urgencies), f"prompts out of order: {self.prompts}"
        assert all(seq.status is SequenceStatus.RUNNING for seq in running), f"running: {running}"
        searches = {seq.key[0] for seq in running if seq.request.has_beams}
        assert self._searches.keys() == searches, f"searches {searches}, known {list(self._searches)}"
        assert self.num_free_slots >= 0, f"{self._free_slots} free, but more are kept for {self._searches}"
        slots = {slot for slot, _, _ in self._updates}
        assert slots <= set(taken), f"updates for the slots {slots}"

    def _slot(self, seq: Sequence) -> None:
        seq.slot = self._free_slots.pop()
        seq.status = SequenceStatus.RUNNING
        if seq.request.has_beams:
            self._searches[seq.key[0]] = seq.request
        self.add_blocks(seq)
