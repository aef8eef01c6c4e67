"""The sequences that wait for a slot: strict classes, in each first come, first served, and nobody for ever.

A lower ``priority`` is a more urgent class, as in vLLM, and a class waits while a more urgent one has anybody waiting.
Who has waited in a class for ``aging_s`` seconds moves to the end of the next more urgent class in which somebody
waits. So a sequence that is passed over again and again gets, class by class, into the most urgent one, in which nobody
overtakes, and comes to its head.

The sequences of a request share its prompt. Its first is queued; the others are *held* until that has computed the
prompt, or has ended, and then queued where it was.

What a step costs does not depend on how many wait: joining, leaving and looking at the head take constant time, and few
are moved up at a time. A class more costs nothing while nobody of it waits. A request that came stands in the queue
itself, for its first sequence, which is not made before somebody looks at it.
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
# How many are moved up in a step at most.
_MOST_AGED = 2

_urgency = attrgetter("urgency")
# Who waits: a sequence, or a request for its first one.
_Waiting = Request | Sequence


def _sequence(who: _Waiting) -> Sequence:
    return who.sequences[0] if isinstance(who, Request) else who


def check_aging_s(aging_s: float) -> float:
    """Refuse what is no time after which to move up."""
    if not isinstance(aging_s, int | float) or isinstance(aging_s, bool) or not aging_s > 0:
        raise InvalidArgumentError(f"aging_s={aging_s!r}: expected a number of seconds above 0")
    return aging_s


class _Class:
    """Those of one class, each part in order of urgency: who ``came`` stands behind all before, who ``returned`` has
    been here before, and they are few.
    """

    __slots__ = ("came", "returned")

    def __init__(self) -> None:
        self.returned: list[Sequence] = []
        self.came: OrderedDict[_Waiting, None] = OrderedDict()

    def __iter__(self) -> Iterator[Sequence]:
        came = map(_sequence, self.came)
        return merge(self.returned, came, key=_urgency) if self.returned else came

    def remove(self, who: _Waiting) -> None:
        if who in self.came:
            del self.came[who]
            return
        seq = _sequence(who)
        place = bisect_left(self.returned, seq.urgency, key=_urgency)
        assert self.returned[place] is seq, f"{seq} does not wait"
        del self.returned[place]


class WaitingQueue:
    """Iterates in order of urgency. Keeps :attr:`Sequence.urgency` of those in it: the class, the turn in it, and the
    index among the sequences of a request. Running sequences keep theirs, so that all can be compared.
    """

    def __init__(self, aging_s: float = DEFAULT_AGING_S):
        self.aging_s = check_aging_s(aging_s)
        self._classes: dict[int, _Class] = {}
        # The classes in which somebody waits, ascending.
        self._levels: list[int] = []
        # When each came into its class, in that order.
        self._since_s: OrderedDict[_Waiting, float] = OrderedDict()
        self._turns = count()
        # By request, the sequences that are held.
        self._held: dict[int, dict[Sequence, None]] = {}
        self.num_held = 0

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, seq: Sequence) -> bool:
        return self._who(seq) in self._since_s

    def __iter__(self) -> Iterator[Sequence]:
        for level in self._levels:
            yield from self._classes[level]

    @property
    def head(self) -> Sequence | None:
        """The most urgent."""
        return next(iter(self), None)

    @property
    def request_ids(self) -> set[int]:
        """The requests of all that wait or are held."""
        waiting = {who.request_id if isinstance(who, Request) else who.key[0] for who in self._since_s}
        return waiting.union(self._held)

    @property
    def held(self) -> list[Sequence]:
        """Those that are not in the queue yet."""
        return [seq for held in self._held.values() for seq in held]

    def add(self, request: Request) -> None:
        """``request`` came: its first sequence stands behind all others of its class, the others are held."""
        request.queue(next(self._turns))
        self._class(request.sampling.priority).came[request] = None
        self._since_s[request] = request.arrival_s
        if request.num_sequences > 1:
            others = request.sequences[1:]
            self._held[request.request_id] = dict.fromkeys(others)
            self.num_held += len(others)

    def release(self, first: Sequence, now_s: float) -> None:
        """Queue what is held for ``first``, if anything is."""
        held = self._held.pop(first.key[0], {})
        self.num_held -= len(held)
        for seq in held:
            level, turn, _ = first.urgency
            seq.urgency = (level, turn, seq.index)
            self.requeue(seq, now_s)

    def hold(self, seq: Sequence) -> None:
        """``seq`` is not to be in the queue until it is released, or removed."""
        held = self._held.setdefault(seq.key[0], {})
        assert seq not in held, f"{seq} is held already"
        held[seq] = None
        self.num_held += 1

    def requeue(self, seq: Sequence, now_s: float) -> None:
        """``seq``, or another sequence of its request, has waited here before: it waits where its urgency says."""
        insort(self._class(seq.urgency[0]).returned, seq, key=_urgency)
        self._since_s[seq] = now_s

    def remove(self, seq: Sequence) -> None:
        """``seq`` waits no more, or is held no more."""
        held = self._held.get(seq.key[0], {})
        if seq in held:
            del held[seq]
            self.num_held -= 1
            if not held:
                del self._held[seq.key[0]]
            return
        who = self._who(seq)
        del self._since_s[who]
        level = seq.urgency[0]
        members = self._classes[level]
        members.remove(who)
        if not members.came and not members.returned:
            del self._classes[level]
            del self._levels[bisect_left(self._levels, level)]

    def age(self, now_s: float) -> None:
        """Move up who has waited in a class for too long."""
        for _ in range(_MOST_AGED):
            if len(self._levels) < 2:
                return
            who, since_s = next(iter(self._since_s.items()))
            if now_s - since_s < self.aging_s:
                return
            seq = _sequence(who)
            place = bisect_left(self._levels, seq.urgency[0])
            if place == 0:  # nobody is more urgent now; perhaps later
                self._since_s[who] = now_s
                self._since_s.move_to_end(who)
            else:
                level = self._levels[place - 1]
                self.remove(seq)
                seq.urgency = (level, next(self._turns), seq.index)
                self._class(level).came[seq] = None
                self._since_s[seq] = now_s

    @property
    def entries(self) -> list[tuple[_Waiting, float]]:
        """Who waits, in the order in which they came into their classes, and when that was."""
        return list(self._since_s.items())

    def restore(self, entries: Iterable[tuple[Sequence, float]], held: Iterable[Sequence]) -> None:
        """Be, new, as another was; the sequences have their urgency."""
        entries = list(entries)
        self._since_s = OrderedDict(entries)
        everybody = sorted((seq for seq, _ in entries), key=_urgency)
        for seq in everybody:
            self._class(seq.urgency[0]).returned.append(seq)
        self._turns = count(1 + max((seq.urgency[1] for seq in everybody), default=0))
        for seq in held:
            self.hold(seq)

    def check_integrity(self) -> None:
        """Assert that classes, order and times agree, and that nobody here has a slot, blocks or computed tokens."""
        assert self._levels == sorted(self._classes), f"classes {self._levels}, members of {list(self._classes)}"
        everybody = list(self)
        assert set(everybody) == set(map(_sequence, self._since_s)), "some have no time, or wait no more"
        assert self.num_held == len(self.held), f"{self.num_held} are held: {self.held}"
        urgencies = [seq.urgency for seq in everybody]
        assert urgencies == sorted(set(urgencies)), f"not in order of urgency: {everybody}"
        for level, members in self._classes.items():
            assert members.came or members.returned, f"class {level} has nobody waiting"
            assert all(seq.urgency[0] == level for seq in members), f"in class {level}: {list(members)}"
        for seq in (*everybody, *self.held):
            assert seq.status is SequenceStatus.WAITING, f"waiting: {seq}"
            assert seq.slot is None, f"{seq} waits on slot {seq.slot}"
            assert not seq.block_tables, f"{seq} waits with the blocks {seq.block_tables}"
            assert seq.num_computed_tokens == 0, f"{seq} waits"

    def _who(self, seq: Sequence) -> _Waiting:
        """As what ``seq`` stands in the queue, if it does."""
        return seq.request if seq.index == 0 and seq.request in self._since_s else seq

    def _class(self, level: int) -> _Class:
        members = self._classes.get(level)
        if members is None:
            members = self._classes[level] = _Class()
            insort(self._levels, level)
        return members
