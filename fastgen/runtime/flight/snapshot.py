"""The scheduler's state between two steps: captured while it runs, described by names and block numbers, and restored.

Capturing copies only numbers and references, about a tenth of a microsecond for each block and each request. The fields
of a :class:`~fastgen.runtime.flight.recording.Snapshot` are computed when a recording is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from fastgen.runtime.flight.recording import BlockEntry, Copy, PrefixState, SequenceState, Snapshot, Waiting
from fastgen.runtime.kv_cache.block_tables import BlockCopy, BlockUpdate, held_entries
from fastgen.runtime.kv_cache.kv_state import KVState
from fastgen.runtime.kv_cache.prefix_cache import PrefixNode
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus
from fastgen.runtime.scheduling.scheduler import Scheduler

# Returns the number of a block of tokens, given the number of the block before it (−1: it is the first).
NumberOf = Callable[[int, tuple[int, ...]], int]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A sequence's tokens up to now. Tokens that it is given later do not change this."""

    seq: Sequence
    num_tokens: int
    num_computed: int
    cached_tokens: int
    num_preemptions: int
    urgency: tuple[int, int, int]
    slot: int | None
    tables: tuple[tuple[int, ...], ...]
    node: PrefixNode | None


class SchedulerState:
    """The captured state of ``scheduler`` before the step ``step``. It has no unfinished step."""

    def __init__(self, scheduler: Scheduler, step: int):
        running, waiting, kv = scheduler.running, scheduler.waiting, scheduler.kv
        self.step = step
        self.num_opened, self.now_s = scheduler.place
        self.policy = scheduler.policy.learned
        self.kv: KVState = kv.state()
        self.nodes = () if kv.prefix_cache is None else tuple(kv.prefix_cache.nodes)
        self.block_ids = tuple([node.block_ids for node in self.nodes])
        self.decodes, self.prompts = tuple(running.decodes), tuple(running.prompts)
        self.free_slots, self.updates = running.free_slots, running.block_updates
        self.forked = tuple(scheduler.forks.forked)
        self.waiting = waiting.entries
        self.held = tuple(waiting.held)
        others = (*(who for who, _ in self.waiting if isinstance(who, Sequence)), *self.held)
        self.sequences = [_tokens(seq, self.kv.nodes.get(seq)) for seq in (*running, *others)]

    @property
    def num_bytes(self) -> int:
        """Returns about how much memory the state takes."""
        num_entries = sum(len(table) for each in self.sequences for table in each.tables)
        num_blocks = len(self.kv.free) + len(self.kv.cached) + num_entries
        return 1000 + 16 * num_blocks + 150 * (len(self.nodes) + len(self.waiting)) + 500 * len(self.sequences)

    def snapshot(self, number_of: NumberOf) -> Snapshot:
        """Returns the state in names and numbers."""
        places: dict[PrefixNode, int] = {}
        numbers: dict[PrefixNode, int] = {}
        nodes = []
        urgencies = {each.seq: each.urgency for each in self.sequences}
        for node, block_ids in zip(self.nodes, self.block_ids, strict=True):  # parents come first
            assert node.parent is not None
            numbers[node] = number_of(numbers.get(node.parent, -1), tuple(node.token_ids))
            nodes.append(PrefixState(places.get(node.parent, 0), numbers[node], block_ids))
            places[node] = len(nodes)
        return Snapshot(
            step=self.step,
            num_opened=self.num_opened,
            now_s=self.now_s,
            policy=self.policy,
            free=tuple(self.kv.free),
            cached=tuple(self.kv.cached),
            nodes=tuple(nodes),
            sequences=tuple(
                SequenceState(
                    each.seq.name,
                    each.num_tokens,
                    each.num_computed,
                    each.cached_tokens,
                    each.num_preemptions,
                    each.urgency,
                    each.slot,
                    each.tables,
                    None if each.node is None else places.get(each.node, 0),
                )
                for each in self.sequences
            ),
            decodes=_names(self.decodes),
            prompts=_names(self.prompts),
            free_slots=self.free_slots,
            updates=tuple(BlockEntry(*update) for update in self.updates),
            waiting=tuple(
                Waiting(f"{who.request_id}.0", since_s, (who.sampling.priority, who.turn, 0))
                if isinstance(who, Request)
                else Waiting(who.name, since_s, urgencies[who])
                for who, since_s in self.waiting
            ),
            held=_names(self.held),
            forked=_names(self.forked),
            copies=tuple((seq.name, Copy(*copy)) for copy, seq in self.kv.copies),
            private=_names(self.kv.private),
            may_share=_names(self.kv.may_share),
        )


def restore(scheduler: Scheduler, snapshot: Snapshot, sequences: Mapping[str, Sequence]) -> None:
    """Brings the new ``scheduler`` to the state of ``snapshot``.

    ``sequences`` holds those of all requests that had arrived by then, with their tokens. A token of a full block in
    the prefix cache is the block's number.
    """

    def found(names: SequenceOf[str]) -> list[Sequence]:
        return [sequences[name] for name in names]

    for seq in sequences.values():
        seq.status = SequenceStatus.FINISHED
    nodes: list[PrefixNode] = []
    cache = scheduler.kv.prefix_cache
    if cache is not None:
        nodes.append(cache.root)
        for place in snapshot.nodes:
            tokens = [place.number] * cache.block_size
            nodes.append(cache.add(nodes[place.parent], tokens, place.blocks))
    for state in snapshot.sequences:
        seq = sequences[state.sequence]
        seq.status = SequenceStatus.WAITING if state.slot is None else SequenceStatus.RUNNING
        seq.num_computed_tokens, seq.num_cached_tokens = state.num_computed, state.cached_tokens
        seq.num_preemptions, seq.urgency, seq.slot = state.num_preemptions, state.urgency, state.slot
        seq.block_tables = [list(table) for table in state.tables]
    for each in snapshot.waiting:
        sequences[each.sequence].urgency = each.urgency
    for seq in found([*(each.sequence for each in snapshot.waiting), *snapshot.held]):
        seq.status = SequenceStatus.WAITING
    scheduler.kv.restore(
        KVState(
            free=list(snapshot.free),
            cached=list(snapshot.cached),
            nodes={
                sequences[state.sequence]: nodes[state.node] for state in snapshot.sequences if state.node is not None
            },
            private=found(snapshot.private),
            may_share=found(snapshot.may_share),
            copies=[(BlockCopy(*copy), sequences[name]) for name, copy in snapshot.copies],
        ),
        [entry.block_id for seq in found((*snapshot.decodes, *snapshot.prompts)) for entry in held_entries(seq)],
    )
    scheduler.running.restore(
        found(snapshot.decodes),
        found(snapshot.prompts),
        snapshot.free_slots,
        [BlockUpdate(*entry) for entry in snapshot.updates],
    )
    for seq in scheduler.running:
        scheduler.reservations.reserve(seq)
    scheduler.waiting.restore(
        [(sequences[each.sequence], each.since_s) for each in snapshot.waiting],
        found(snapshot.held),
        scheduler.running,
    )
    scheduler.forks.forked.update(found(snapshot.forked))
    scheduler.place = (snapshot.num_opened, snapshot.now_s)
    scheduler.policy.recall(snapshot.policy)


def _tokens(seq: Sequence, node: PrefixNode | None) -> _Tokens:
    return _Tokens(
        seq=seq,
        num_tokens=seq.num_tokens,
        num_computed=seq.num_computed_tokens,
        cached_tokens=seq.num_cached_tokens,
        num_preemptions=seq.num_preemptions,
        urgency=seq.urgency,
        slot=seq.slot,
        tables=tuple(map(tuple, seq.block_tables)),
        node=node,
    )


def _names(sequences: SequenceOf[Sequence]) -> tuple[str, ...]:
    return tuple(seq.name for seq in sequences)
