"""The sequences that run: who decodes, who has more pending, on which slots, and what the device is to be told."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter

from fastgen.runtime.kv_cache.block_tables import BlockUpdate, TableEntry, held_entries
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus

_urgency = attrgetter("urgency")


class RunningSet:
    """At most ``max_num_seqs`` sequences, each on a slot of its own.

    ``decodes`` have their newest token pending and nothing else, or nothing at all: beams until their search has moved,
    and, while ``some_wait``, those that are planned without, since their newest token is not known yet. ``prompts``
    have more, and are in order of urgency. A decode costs nothing here from step to step.

    As long as a beam of a request runs, slots are kept for all of them.
    """

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self.decodes: list[Sequence] = []
        self.prompts: list[Sequence] = []
        self.some_wait = False
        # The requests of which beams run.
        self._searches: dict[int, Request] = {}
        self._free_slots = list(reversed(range(max_num_seqs)))
        # By slot, group and index: what the device has not been told.
        self._updates: dict[tuple[int, int, int], BlockUpdate] = {}

    def __len__(self) -> int:
        return len(self.decodes) + len(self.prompts)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.decodes
        yield from self.prompts

    @property
    def num_free_slots(self) -> int:
        """Those that are not kept for beams."""
        beams = (seq for request in self._searches.values() for seq in request.sequences)
        return len(self._free_slots) - sum(seq.status is SequenceStatus.WAITING for seq in beams)

    @property
    def due_decodes(self) -> list[Sequence]:
        """The decodes whose newest token is pending."""
        some_wait = self.some_wait or self._searches
        return [seq for seq in self.decodes if seq.num_pending_tokens] if some_wait else self.decodes

    @property
    def least_urgent(self) -> Sequence:
        return max(self, key=_urgency)

    @property
    def block_updates(self) -> tuple[BlockUpdate, ...]:
        """All entries of block tables that the device has not been told."""
        return tuple(self._updates.values())

    def add_prompt(self, seq: Sequence) -> None:
        """Give ``seq`` a slot, which there must be."""
        self._slot(seq)
        insort(self.prompts, seq, key=_urgency)

    def add_decode(self, seq: Sequence) -> None:
        """The same, where only its newest token is pending."""
        self._slot(seq)
        self.decodes.append(seq)

    def make_decode(self, seq: Sequence) -> None:
        """Of the prompt ``seq`` nothing but its newest token is pending any more."""
        self.prompts.remove(seq)
        self.decodes.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Take its slot, and forget what the device has not been told of it."""
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

    def tell(self, seq: Sequence, entries: Iterable[TableEntry]) -> None:
        """The device is to be told of these entries of the tables of ``seq``."""
        assert seq.slot is not None
        self.tell_all([BlockUpdate(seq.slot, *entry) for entry in entries])

    def tell_all(self, updates: Iterable[BlockUpdate]) -> None:
        """The device is to be told of these."""
        for update in updates:
            self._updates[update[:3]] = update

    def told(self) -> None:
        """The device has been told all."""
        self._updates.clear()

    @property
    def free_slots(self) -> tuple[int, ...]:
        """The next to be given last, those kept for beams among them."""
        return tuple(self._free_slots)

    def restore(
        self,
        decodes: list[Sequence],
        prompts: list[Sequence],
        free_slots: Iterable[int],
        untold: Iterable[BlockUpdate],
    ) -> None:
        """Be, new, as another was."""
        self.decodes, self.prompts, self._free_slots = decodes, prompts, list(free_slots)
        self._searches = {seq.key[0]: seq.request for seq in self if seq.request.has_beams}
        self.tell_all(untold)

    def check_integrity(self) -> None:
        """Assert that slots and order are accounted for."""
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
        told = {slot for slot, _, _ in self._updates}
        assert told <= set(taken), f"updates for the slots {told}"

    def _slot(self, seq: Sequence) -> None:
        seq.slot = self._free_slots.pop()
        seq.status = SequenceStatus.RUNNING
        if seq.request.has_beams:
            self._searches[seq.key[0]] = seq.request
        self.tell(seq, held_entries(seq))
