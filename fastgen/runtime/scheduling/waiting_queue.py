"""The waiting queue: strict priority classes, first come, first served in each, without starvation.

A lower ``priority`` is a more urgent class, as in vLLM. A class waits while a more urgent class has waiting sequences.
A sequence that has waited in a class for ``aging_s`` seconds moves to the end of the next more urgent class with
waiting sequences. So a sequence that is overtaken again and again reaches the most urgent class, in which nothing
overtakes it, and comes to its head.

The sequences of a request share its prompt. The first is queued. The others are *held* until it has computed the prompt
or has ended, and are queued in its place then.

The cost of a step does not depend on how many sequences wait: adding, removing and looking at the head take constant
time, and only a few sequences move up at a time. An empty class costs nothing. A new request stands in the queue for
its first sequence, which is created only when it is looked at.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import count
from operator import attrgetter

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.request import Request, Sequence, SequenceStatus

DEFAULT_AGING_S = 30.0
# Most sequences that move up in one step.
_MOST_AGED = 2

_urgency = attrgetter("urgency")
# An entry of the queue: a sequence, or a request that stands for its first sequence.
_Waiting = Request | Sequence


def _sequence(entry: _Waiting) -> Sequence:
    return entry.sequences[0] if isinstance(entry, Request) else entry


def check_aging_s(aging_s: float) -> float:
    """Returns ``aging_s``, or refuses a value that is no number of seconds above 0."""
    if not isinstance(aging_s, int | float) or isinstance(aging_s, bool) or not aging_s > 0:
        raise InvalidArgumentError(f"aging_s={aging_s!r}: expected a number of seconds above 0")
    return aging_s


class _Class:
    """The waiting sequences of one class, each part in order of urgency: the ``came`` ones follow all earlier ones; the
    ``returned`` ones, which are few, have run before.
    """

    __slots__ = ("came", "returned")

    def __init__(self) -> None:
        self.returned: list[Sequence] = []
        self.came: OrderedDict[_Waiting, None] = OrderedDict()

    def __iter__(self) -> Iterator[Sequence]:
        came = map(_sequence, self.came)
        return merge(self.returned, came, key=_urgency) if self.returned else came

    def remove(self, entry: _Waiting) -> None:
        if entry in self.came:
            del self.came[entry]
            return
        seq = _sequence(entry)
        place = bisect_left(self.returned, seq.urgency, key=_urgency)
        assert self.returned[place] is seq, f"{seq} does not wait"
        del self.returned[place]


class WaitingQueue:
    """Iterates in order of urgency. It keeps :attr:`Sequence.urgency` of its sequences: the class, the turn in it, and
    the index among the sequences of a request. Running sequences keep theirs, so that all can be compared.
    """

    def __init__(self, aging_s: float = DEFAULT_AGING_S):
        self.aging_s = check_aging_s(aging_s)
        self._classes: dict[int, _Class] = {}
        # The classes with waiting sequences, ascending.
        self._levels: list[int] = []
        # When each entry came into its class, in that order.
        self._since_s: OrderedDict[_Waiting, float] = OrderedDict()
        self._turns = count()
        # The held sequences, by request.
        self._held: dict[int, dict[Sequence, None]] = {}
        self.num_held = 0

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, seq: Sequence) -> bool:
        return self._entry(seq) in self._since_s

    def __iter__(self) -> Iterator[Sequence]:
        for level in self._levels:
            yield from self._classes[level]

    @property
    def head(self) -> Sequence | None:
        """Returns the most urgent waiting sequence."""
        return next(iter(self), None)

    @property
    def request_ids(self) -> set[int]:
        """Returns the ids of all requests with waiting or held sequences."""
        waiting = {entry.request_id if isinstance(entry, Request) else entry.key[0] for entry in self._since_s}
        return waiting.union(self._held)

    @property
    def held(self) -> list[Sequence]:
        """Returns the sequences that are not in the queue yet."""
        return [seq for held in self._held.values() for seq in held]

    def add(self, request: Request) -> None:
        """Queues the first sequence of ``request`` behind all others of its class, and holds the others."""
        request.queue(next(self._turns))
        self._class(request.sampling.priority).came[request] = None
        self._since_s[request] = request.arrival_s
        if request.num_sequences > 1:
            others = request.sequences[1:]
            self._held[request.request_id] = dict.fromkeys(others)
            self.num_held += len(others)

    def release(self, first: Sequence, now_s: float) -> None:
        """Queues the sequences that are held for ``first``."""
        held = self._held.pop(first.key[0], {})
        self.num_held -= len(held)
        for seq in held:
            level, turn, _ = first.urgency
            seq.urgency = (level, turn, seq.index)
            self.requeue(seq, now_s)

    def hold(self, seq: Sequence) -> None:
        """Keeps ``seq`` out of the queue until it is released or removed."""
        held = self._held.setdefault(seq.key[0], {})
        assert seq not in held, f"{seq} is held already"
        held[seq] = None
        self.num_held += 1

    def requeue(self, seq: Sequence, now_s: float) -> None:
        """Queues ``seq`` again at the place of its urgency; it, or another sequence of its request, has waited
        before.
        """
        insort(self._class(seq.urgency[0]).returned, seq, key=_urgency)
        self._since_s[seq] = now_s

    def remove(self, seq: Sequence) -> None:
        """Removes a waiting or held ``seq``."""
        held = self._held.get(seq.key[0], {})
        if seq in held:
            del held[seq]
            self.num_held -= 1
            if not held:
                del self._held[seq.key[0]]
            return
        entry = self._entry(seq)
        del self._since_s[entry]
        level = seq.urgency[0]
        members = self._classes[level]
        members.remove(entry)
        if not members.came and not members.returned:
            del self._classes[level]
            del self._levels[bisect_left(self._levels, level)]

    def age(self, now_s: float) -> None:
        """Moves up sequences that have waited in a class for too long."""
        for _ in range(_MOST_AGED):
            if len(self._levels) < 2:
                return
            entry, since_s = next(iter(self._since_s.items()))
            if now_s - since_s < self.aging_s:
                return
            seq = _sequence(entry)
            place = bisect_left(self._levels, seq.urgency[0])
            if place == 0:  # it is in the most urgent class for now
                self._since_s[entry] = now_s
                self._since_s.move_to_end(entry)
            else:
                level = self._levels[place - 1]
                self.remove(seq)
                seq.urgency = (level, next(self._turns), seq.index)
                self._class(level).came[seq] = None
                self._since_s[seq] = now_s

    @property
    def entries(self) -> list[tuple[_Waiting, float]]:
        """Returns what waits, in the order in which it entered its class, with the time of that."""
        return list(self._since_s.items())

    def restore(
        self, entries: Iterable[tuple[Sequence, float]], held: Iterable[Sequence], running: Iterable[Sequence]
    ) -> None:
        """Restores a snapshot into a new queue; the sequences have their urgency. New requests get later turns than
        these and the ``running`` ones.
        """
        entries = list(entries)
        self._since_s = OrderedDict(entries)
        waiting = sorted((seq for seq, _ in entries), key=_urgency)
        for seq in waiting:
            self._class(seq.urgency[0]).returned.append(seq)
        self._turns = count(1 + max((seq.urgency[1] for seq in (*waiting, *running)), default=0))
        for seq in held:
            self.hold(seq)

    def check_integrity(self) -> None:
        """Asserts that classes, order and times agree, and that no waiting sequence has a slot, blocks or computed
        tokens.
        """
        assert self._levels == sorted(self._classes), f"classes {self._levels}, members of {list(self._classes)}"
        waiting = list(self)
        assert set(waiting) == set(map(_sequence, self._since_s)), "some have no time, or wait no more"
        assert self.num_held == len(self.held), f"{self.num_held} are held: {self.held}"
        urgencies = [seq.urgency for seq in waiting]
        assert urgencies == sorted(set(urgencies)), f"not in order of urgency: {waiting}"
        for level, members in self._classes.items():
            assert members.came or members.returned, f"class {level} is empty"
            assert all(seq.urgency[0] == level for seq in members), f"in class {level}: {list(members)}"
        for seq in (*waiting, *self.held):
            assert seq.status is SequenceStatus.WAITING, f"waiting: {seq}"
            assert seq.slot is None, f"{seq} waits on slot {seq.slot}"
            assert not seq.block_tables, f"{seq} waits with the blocks {seq.block_tables}"
            assert seq.num_computed_tokens == 0, f"{seq} waits"

    def _entry(self, seq: Sequence) -> _Waiting:
        """Returns the entry of the queue that stands for ``seq``."""
        return seq.request if seq.index == 0 and seq.request in self._since_s else seq

    def _class(self, level: int) -> _Class:
        members = self._classes.get(level)
        if members is None:
            members = self._classes[level] = _Class()
            insort(self._levels, level)
        return members
